"""Computing one stage of a pipeline.

Here: `StagedModel`, a model cut into stages, and `StageRunner`, which computes one of them on the micro-batches of a
share: it receives activations from the stage before, sends its own to the next, and in the backward pass the gradients
of what it received. Micro-batches may differ in size, from one another and from step to step. Not here: where the model
is cut (`cut.py`), the order of the passes (`schedule.py`), and the update (`shared_model.py`).

torch.distributed.pipelining needs micro-batches of one shape, known in advance, and a process group for each pipeline;
here a batch that divides by nothing is computed as it is, and activations pass through shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from syncline.comms.collective import Collective
from syncline.comms.shared_memory import SharedMemory
from syncline.compute.backward import seeded
from syncline.layouts.schedule import SCHEDULES

if TYPE_CHECKING:
    from syncline.layouts.chain.chain import Chain, Stage

_SLOT_BYTES = 1 << 20
"""Activations pass through slots of this size; larger ones in pieces."""
_SLOTS = 4


@dataclass(frozen=True)
class StagedModel:
    """A model cut into stages."""

    chain: Chain
    bounds: tuple[int, ...]
    """The unit with which each stage begins, and the number of units."""
    schedule: str
    micro_batch_bytes: int = 0
    """The most that a stage sends for one micro-batch, as far as is known."""
    dropouts: tuple[int, ...] = ()
    """How often each unit drops out: masks are numbered through the whole model (`compute/dropout.py`)."""

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    def stage(self, number: int) -> Stage:
        return self.chain.stage(self.bounds[number], self.bounds[number + 1])

    def names(self, number: int) -> str:
        """The units of a stage, in words."""
        names = [unit.name for unit in self.chain.units[self.bounds[number] : self.bounds[number + 1]]]
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"

    def users(self) -> list[set[int]]:
        """Of each stage, the parameters that it uses, by identity."""
        return [
            {id(p) for unit in self.chain.units[low:high] for p in unit.parameters.values()}
            for low, high in zip(self.bounds, self.bounds[1:], strict=False)
        ]

    def owned(self, parameters: Sequence[nn.Parameter]) -> list[list[int]]:
        """Of each stage, the parameters that it updates: those that it is the first to use, stage 0 the unused too."""
        users = self.users()
        owners = [next((s for s, used in enumerate(users) if id(p) in used), 0) for p in parameters]
        return [[n for n, owner in enumerate(owners) if owner == stage] for stage in range(self.stages)]

    def tied(self, parameters: Sequence[nn.Parameter]) -> list[tuple[int, int, int]]:
        """(parameter, owner, other user) for each stage that uses a parameter which another one updates."""
        users, owned = self.users(), self.owned(parameters)
        return [
            (n, owner, other)
            for owner, numbers in enumerate(owned)
            for n in numbers
            for other, used in enumerate(users)
            if other != owner and id(parameters[n]) in used
        ]


class MicroBatch(NamedTuple):
    """A part of a share: its inputs, and its fraction of the share's samples."""

    inputs: tuple[Any, ...]
    fraction: float


class StageRunner:
    """Computes stage `number` of a model; `team` are the workers that compute the same samples."""

    def __init__(self, staged: StagedModel, number: int, team: Collective) -> None:
        assert isinstance(team, SharedMemory), "a pipeline has two workers or more, which share memory"
        self._stage, self._number, self._stages = staged.stage(number), number, staged.stages
        self._order = SCHEDULES[staged.schedule]
        self.first_dropout = sum(staged.dropouts[: staged.bounds[number]])
        """The number of the first call of dropout in this stage."""
        self._received = staged.chain.crossing(staged.bounds[number]) if number else ()
        self._sent = staged.chain.crossing(staged.bounds[number + 1]) if number + 1 < staged.stages else ()
        slices = team.size // staged.stages
        me = team.rank
        routes = [(r, r + slices) for r in range(team.size - slices)]
        both = [*routes, *((target, source) for source, target in routes)]
        slot = min(max(staged.micro_batch_bytes, 64 << 10), _SLOT_BYTES)
        self._channels = team.open_channels(both, slots=_SLOTS, slot_bytes=slot)
        self._before = self._channels.get((me - slices, me)), self._channels.get((me, me - slices))
        self._after = self._channels.get((me, me + slices)), self._channels.get((me + slices, me))

    @property
    def is_first(self) -> bool:
        return self._number == 0

    @property
    def is_last(self) -> bool:
        return self._number == self._stages - 1

    @property
    def stage(self) -> Stage:
        return self._stage

    @property
    def bytes_sent(self) -> int:
        return sum(channel.bytes_sent for channel in self._channels.values())

    @property
    def waited_s(self) -> float:
        """How long this stage has waited for others: the bubble."""
        return sum(channel.waited_s for channel in self._channels.values())

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: Callable[[int, Any], torch.Tensor],
        *,
        computing: Callable[[int], AbstractContextManager[Any]],
        mark: Callable[[str], None],
    ) -> None:
        """Forward and backward over all micro-batches; gradients add up in the parameters.

        The last stage calls `loss(number, output)`. Forward passes run in the context `computing(number)`.
        """
        kept: dict[int, tuple[list[Any], list[Any]]] = {}
        for direction, number in self._order(self._number, self._stages, len(micro_batches)):
            if direction == "forward":
                kept[number] = self._forward(number, micro_batches[number], loss, computing)
            else:
                self._backward(*kept.pop(number))
            mark(direction)

    def _forward(
        self,
        number: int,
        micro_batch: MicroBatch,
        loss: Callable[[int, Any], torch.Tensor],
        computing: Callable[[int], AbstractContextManager[Any]],
    ) -> tuple[list[Any], list[Any]]:
        source, target = self._before[0], self._after[0]
        inputs = list(micro_batch.inputs) if source is None else self._unpacked(source.receive())
        with computing(number):
            outputs = list(self._stage(*inputs))
            if target is None:
                value = loss(number, outputs[0])
                outputs = [value if micro_batch.fraction == 1.0 else value * micro_batch.fraction]
        if target is not None:
            packed = [c.packed(value) for c, value in zip(self._sent, outputs, strict=True)]
            target.send(packed, [value.requires_grad for value in outputs])
        return inputs, outputs

    def _unpacked(self, values: Sequence[torch.Tensor | None]) -> list[Any]:
        """What was received, with the strides that it had where it was computed, as the ends of a backward pass."""
        return [
            c.unpacked(value.detach()).requires_grad_(value.requires_grad) if value is not None else None
            for c, value in zip(self._received, values, strict=True)
        ]

    def _backward(self, inputs: list[Any], outputs: list[Any]) -> None:
        source, target = self._after[1], self._before[1]
        if source is None:
            torch.autograd.backward(outputs)
        else:
            pairs = [(o, g) for o, g in zip(outputs, source.receive(), strict=True) if g is not None]
            if pairs:
                torch.autograd.backward(seeded([o for o, _ in pairs], [g for _, g in pairs]))
        if target is not None:
            target.send([x.grad if isinstance(x, torch.Tensor) and x.requires_grad else None for x in inputs])
