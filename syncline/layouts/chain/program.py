"""A recorded forward pass that can be repeated in sections, with any batch size.

Here: `Program`, which knows where it can be cut and which tensors cross there, and `Section`, the part between two
cuts. Tensors that depend on shapes alone (positions, masks) do not cross: each section computes them again. Not here:
recording (`recording.py`), what users see (`chain.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from syncline.errors import ConfigError
from syncline.layouts.chain.parts import Mismatch, Part, Sized, Values, leaves_of
from syncline.layouts.chain.recording import Context, Recording, Step, Untraceable


@dataclass(frozen=True)
class Crossing:
    """A tensor that a stage passes to the next one."""

    sizes: tuple[Sized, ...]
    dtype: torch.dtype
    requires_grad: bool
    order: tuple[int, ...]
    """Its dimensions from the one with the longest stride to the one with the shortest."""

    def shape(self, samples: int) -> tuple[int, ...]:
        """Its shape for a batch of so many samples."""
        return tuple(size.make({}, samples) for size in self.sizes)

    def bytes(self, samples: int) -> int:
        """Its size for a batch of so many samples."""
        return int(torch.Size(self.shape(samples)).numel()) * self.dtype.itemsize

    def packed(self, tensor: Tensor) -> Tensor:
        """The numbers in the order in which they lie in memory, contiguous, to be sent."""
        return tensor.detach().permute(self.order).contiguous()

    def packed_shape(self, samples: int) -> tuple[int, ...]:
        """The shape of `packed`."""
        shape = self.shape(samples)
        return tuple(shape[dim] for dim in self.order)

    def unpacked(self, packed: Tensor) -> Tensor:
        """The tensor with the strides that it had before it was packed: some operations round by strides."""
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return packed.permute(inverse)


def received(crossing: Sequence[Crossing], values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What the next stage gets if these values are sent to it: copies, at which its own backward pass ends."""
    return tuple(
        c.unpacked(c.packed(value).clone()).requires_grad_(value.requires_grad)
        for c, value in zip(crossing, values, strict=True)
    )


class Program:
    """What a model does with a batch, in training or in evaluation."""

    def __init__(self, first: Recording, second: Recording) -> None:
        sizes = (first.samples, second.samples)
        self.context = first.context
        self.inputs = first.inputs
        merged = [_merged_step(a, b, sizes) for a, b in zip(first.steps, second.steps, strict=False)]
        if len(first.steps) != len(second.steps):
            longer = max(first.steps, second.steps, key=len)
            raise Untraceable(longer[len(merged)].scope, "the number of its operations depends on the batch size")
        self.values = [_crossing(a, b, sizes) for a, b in zip(first.tensors, second.tensors, strict=True)]
        self.steps = _with_purity(merged)
        self.output = _merged(first.output, second.output, sizes, scope="")
        self._made = [-1] * first.inputs + [n for n, step in enumerate(self.steps) for _ in step.outputs]
        self._pure = {number for step in self.steps if step.is_pure for _, number in step.outputs}
        self._last_use = self._find_last_uses()

    def crossing(self, position: int) -> tuple[int, ...]:
        """The numbers of the values that cross before the step at `position`."""
        if position == 0:
            return tuple(range(self.inputs))
        return tuple(
            number
            for number, made in enumerate(self._made)
            if made < position <= self._last_use[number] and number not in self._pure
        )

    def can_cut(self, position: int) -> bool:
        """Whether a stage may begin at this step.

        Not between a value and a step that changes it in place: what else refers to the value must see the change. And
        the batch size must be evident from what crosses.
        """
        if any(
            self._made[number] < position <= at
            for at, step in enumerate(self.steps[position:], start=position)
            for number in step.changes
        ):
            return False
        return self.batch_clue(position) is not None

    def batch_clue(self, position: int) -> tuple[int, int, Sized] | None:
        """Where to see the batch size: in which of the values that cross, in which dimension."""
        for index, number in enumerate(self.crossing(position)):
            for dim, size in enumerate(self.values[number].sizes):
                if size.slope:
                    return index, dim, size
        return None

    def needed(self, low: int, high: int, *, is_last: bool) -> list[int]:
        """The steps from `low` to `high`, and those before them that this section computes again.

        `is_last`: whether it makes the output: units that are empty in this mode may follow the last step.
        """
        own = [n for n in range(low, high) if not self.steps[n].is_pure]
        wanted = {number for n in own for number in self.steps[n].arguments.uses()}
        if is_last:
            wanted |= set(self.output.uses())
        found = set(own)
        for number in sorted(wanted & self._pure, reverse=True):
            self._add_pure(self._made[number], found)
        return sorted(found)

    def _add_pure(self, at: int, found: set[int]) -> None:
        if at not in found:
            found.add(at)
            for number in self.steps[at].arguments.uses():
                self._add_pure(self._made[number], found)

    def _find_last_uses(self) -> list[int]:
        last = [-1] * len(self._made)
        for at, step in enumerate(self.steps):
            if not step.is_pure:
                for number in step.arguments.uses():
                    last[number] = at
        for number in self.output.uses():
            last[number] = len(self.steps)
        return last


class Section:
    """The steps of one stage."""

    def __init__(self, program: Program, low: int, high: int, *, is_last: bool) -> None:
        self._program = program
        self.takes = program.crossing(low)
        self.is_last = is_last
        self.gives = () if is_last else program.crossing(high)
        self._clue = program.batch_clue(low)
        steps = [program.steps[n] for n in program.needed(low, high, is_last=is_last)]
        self._steps = list(zip(steps, self._frees(steps), strict=True))

    def run(self, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        """What the section makes of its inputs."""
        samples = self._check(inputs)
        values: Values = dict(zip(self.takes, inputs, strict=True))
        for step, frees in self._steps:
            with _surroundings(step.context, self._program.context, inputs[0].device.type):
                positional, by_name = step.arguments.make(values, samples)
                result = _callable(step.target)(*positional, **by_name)
            if step.outputs:
                leaves = [result] if isinstance(result, Tensor) else leaves_of(result)
                values.update({number: leaves[position] for position, number in step.outputs})
            for number in frees:
                values.pop(number, None)
        if self.is_last:
            return (self._program.output.make(values, samples),)
        return tuple(values[number] for number in self.gives)

    def _check(self, inputs: Sequence[Tensor]) -> int:
        """The batch size; `ConfigError` if the shapes are others than those that were traced."""
        assert self._clue is not None, "no cut where the batch size cannot be seen"
        index, dim, size = self._clue
        shapes = [tuple(tensor.shape) for tensor in inputs]
        samples = 0
        if len(inputs) == len(self.takes) and dim < len(shapes[index]):
            samples = (shapes[index][dim] - size.offset) // size.slope
        traced = [self._program.values[number].shape(samples) for number in self.takes]
        if shapes != traced:
            raise ConfigError(
                f"A pipeline stage got tensors of shape {shapes}, but was traced for {traced}. Only the number of "
                "samples may change from batch to batch: pad the samples to one size.",
                code="layout", layout="pipeline", reason="shape", shapes=shapes, traced=traced,
            )  # fmt: skip
        return samples

    def _frees(self, steps: Sequence[Step]) -> Iterator[list[int]]:
        """After each step, the values that are not used any more: only autograd keeps what it needs."""
        keep = {*self.gives, *(self._program.output.uses() if self.is_last else ())}
        last = {number: at for at, step in enumerate(steps) for number in step.arguments.uses()}
        for at, step in enumerate(steps):
            mentioned = {*step.arguments.uses(), *(number for _, number in step.outputs)}
            yield [number for number in mentioned if number not in keep and last.get(number, at) <= at]


def _callable(target: Any) -> Any:
    return target.apply if isinstance(target, type) and issubclass(target, torch.autograd.Function) else target


def _surroundings(step: Context, whole: Context, device: str) -> AbstractContextManager[Any]:
    """What the model put around a step: not what was around the model, which may be another in every call."""
    if step == whole:
        return nullcontext()
    stack = ExitStack()
    if step.has_gradients != whole.has_gradients:
        stack.enter_context(torch.set_grad_enabled(step.has_gradients))
    if step.autocast != whole.autocast:
        dtype = step.autocast
        stack.enter_context(torch.autocast(device, dtype=dtype, enabled=dtype is not None))
    return stack


def _merged_step(first: Step, second: Step, sizes: tuple[int, int]) -> Step:
    alike = (first.outputs, first.context, first.is_pure) == (second.outputs, second.context, second.is_pure)
    if first.target != second.target or not alike:
        raise Untraceable(first.scope, "its operations depend on the batch size")
    return replace(
        first,
        arguments=_merged(first.arguments, second.arguments, sizes, first.scope),
        changes=first.changes | second.changes,
    )


def _merged(first: Part, second: Part, sizes: tuple[int, int], scope: str) -> Part:
    try:
        return first.merged(second, sizes)
    except Mismatch as mismatch:
        raise Untraceable(scope, str(mismatch)) from mismatch


def _with_purity(steps: Sequence[Step]) -> list[Step]:
    """The steps, of which none is pure that works with values which are changed in place."""
    impure = {number for step in steps for number in step.changes}
    found = []
    for step in steps:
        made = {number for _, number in step.outputs}
        is_pure = step.is_pure and not impure & {*made, *step.arguments.uses()}
        impure |= set() if is_pure else made
        found.append(replace(step, is_pure=is_pure))
    return found


def _crossing(first: Tensor, second: Tensor, sizes: tuple[int, int]) -> Crossing:
    if first.dim() != second.dim():
        raise Untraceable("", "the number of dimensions of a tensor depends on the batch size")
    shape = tuple(Sized.through(sizes, (a, b)) for a, b in zip(first.shape, second.shape, strict=True))
    strides = second.stride()
    order = tuple(sorted(range(second.dim()), key=lambda dim: -strides[dim]))
    return Crossing(shape, second.dtype, second.requires_grad, order)


def modules_of(steps: Sequence[Step]) -> list[nn.Module]:
    """The modules that are called as a whole."""
    return [step.target for step in steps if isinstance(step.target, nn.Module)]
