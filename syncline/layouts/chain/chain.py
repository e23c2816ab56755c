"""A model as a chain of units, and its stages.

    chain = trace_chain(model, (images,))
    first, second = chain.stage(0, 3), chain.stage(3, len(chain))
    (output,) = second(*first(images))

Here: `Chain`, `Unit` and `Stage`. They hold the model's own modules, parameters and buffers, never copies. Not here:
tracing (`tracing.py`), where to cut (`layouts/cut.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from syncline.layouts.chain.program import Crossing, Program, Section, modules_of
from syncline.layouts.chain.recording import Step


@dataclass(frozen=True, eq=False)
class Unit:
    """The smallest piece that a stage can consist of."""

    name: str
    model: nn.Module
    steps: tuple[Step, ...]
    """What it does, in training and in evaluation."""

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that it uses, by the names that they have in the model; tied ones are in several units."""
        mine = self._tensors()
        return {name: p for name, p in self.model.named_parameters() if id(p) in mine}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers that it uses, by the names that they have in the model."""
        mine = self._tensors()
        return {name: b for name, b in self.model.named_buffers() if id(b) in mine}

    def _tensors(self) -> set[int]:
        held = {id(part.make({}, 0)) for step in self.steps for part in step.arguments.held()}
        for module in modules_of(self.steps):
            held |= {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        return held


class Chain:
    """The units of a model in the order of execution."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        programs: Mapping[bool, Program],
        starts: Mapping[bool, Sequence[int]],
        kept_whole: Mapping[str, str],
    ) -> None:
        self.model = model
        self.units = tuple(units)
        self.kept_whole = dict(kept_whole)
        """Modules that could not be taken apart, and why."""
        self._programs, self._starts = programs, starts

    def __len__(self) -> int:
        return len(self.units)

    def stage(self, low: int, high: int) -> Stage:
        """The units from `low` to `high`, without the latter."""
        if not 0 <= low < high <= len(self):
            raise ValueError(f"There is no stage from unit {low} to {high} of {len(self)}.")
        return Stage(self, low, high)

    def crossing(self, boundary: int, *, training: bool = True) -> tuple[Crossing, ...]:
        """The tensors that cross before the unit `boundary`; before the first, the inputs of the model."""
        program = self._programs[training]
        return tuple(program.values[n] for n in program.crossing(self._starts[training][boundary]))

    def crossing_numbers(self, boundary: int) -> tuple[int, ...]:
        """Numbers of the tensors that cross in training. One that passes several boundaries has the same at all."""
        return self._programs[True].crossing(self._starts[True][boundary])

    def section(self, low: int, high: int, *, training: bool) -> Section:
        """What a stage does in this mode."""
        starts = self._starts[training]
        return Section(self._programs[training], starts[low], starts[high], is_last=high == len(self))


class Stage:
    """Some consecutive units of a chain, to be called like a module.

    The first stage takes the inputs of the model, each other one what the one before it returned. The last returns a
    tuple with the output of the model. The mode is that of the model: `train` and `eval` set it there.
    """

    def __init__(self, chain: Chain, low: int, high: int) -> None:
        self._chain = chain
        self.low, self.high = low, high
        self._sections: dict[bool, Section] = {}

    @property
    def units(self) -> tuple[Unit, ...]:
        """Its units."""
        return self._chain.units[self.low : self.high]

    @property
    def is_last(self) -> bool:
        """Whether it returns the output of the model."""
        return self.high == len(self._chain)

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self._chain.model.training

    def train(self, mode: bool = True) -> Stage:
        """Set the mode of the model."""
        self._chain.model.train(mode)
        return self

    def eval(self) -> Stage:
        """Set the model to evaluation mode."""
        return self.train(False)

    def __call__(self, *values: Tensor) -> tuple[Any, ...]:
        return self.forward(*values)

    def forward(self, *values: Tensor) -> tuple[Any, ...]:
        """What crosses to the next stage, or (output,)."""
        mode = self.training
        if mode not in self._sections:
            self._sections[mode] = self._chain.section(self.low, self.high, training=mode)
        return self._sections[mode].run(values)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that it uses, with their names in the model, in the model's order."""
        mine = {name for unit in self.units for name in unit.parameters}
        return ((name, p) for name, p in self._chain.model.named_parameters() if name in mine)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that it uses."""
        return (parameter for _, parameter in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers that it uses, with their names in the model, in the model's order."""
        mine = {name for unit in self.units for name in unit.buffers}
        return ((name, b) for name, b in self._chain.model.named_buffers() if name in mine)

    def buffers(self) -> Iterator[Tensor]:
        """The buffers that it uses."""
        return (buffer for _, buffer in self.named_buffers())
