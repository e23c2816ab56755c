"""The arguments of a recorded call, so that it can be repeated with other values and another batch size.

Here: `Part`, what an argument consists of, and `merged`, which compares two recordings of the same call at two batch
sizes. A number that differs between them depends on the batch size. Not here: recording (`recording.py`).
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Values = dict[int, Any]
"""The tensors that a stage holds, by number."""

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, range, enum.Enum, type, type(...),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""Types whose instances can be compared by value."""


class Mismatch(Exception):
    """Two recordings of the same call cannot be merged; the message completes "because ..."."""


class Part(ABC):
    """Something that a call takes."""

    @abstractmethod
    def make(self, values: Values, samples: int) -> Any:
        """The argument, for a batch of so many samples."""

    def uses(self) -> Iterator[int]:
        """The numbers of the tensors in it."""
        return iter(())

    def held(self) -> Iterator[Held]:
        """The parameters and buffers in it."""
        return iter(())

    @abstractmethod
    def merged(self, other: Part, sizes: tuple[int, int]) -> Part:
        """This part, recorded with the first batch size, and the other one, recorded with the second."""


@dataclass(frozen=True)
class Use(Part):
    """A tensor that was computed before, or an input of the model."""

    number: int

    def make(self, values: Values, samples: int) -> Any:
        del samples
        return values[self.number]

    def uses(self) -> Iterator[int]:
        yield self.number

    def merged(self, other: Part, sizes: tuple[int, int]) -> Part:
        del sizes
        if self != other:
            raise Mismatch("which results an operation takes depends on the batch size")
        return self


@dataclass(frozen=True, eq=False)
class Held(Part):
    """A parameter or buffer, looked up where it is kept each time, as a buffer may be replaced."""

    owner: nn.Module
    attribute: str
    name: str
    """Its name in the model."""

    def make(self, values: Values, samples: int) -> Any:
        del values, samples
        return getattr(self.owner, self.attribute)

    def held(self) -> Iterator[Held]:
        yield self

    def merged(self, other: Part, sizes: tuple[int, int]) -> Part:
        del sizes
        if not isinstance(other, Held) or other.name != self.name:
            raise Mismatch("which parameters an operation takes depends on the batch size")
        return self


@dataclass(frozen=True, eq=False)
class Fixed(Part):
    """A value that is the same in every call."""

    value: Any

    def make(self, values: Values, samples: int) -> Any:
        del values, samples
        return self.value

    def merged(self, other: Part, sizes: tuple[int, int]) -> Part:
        if not isinstance(other, Fixed):
            raise Mismatch("the arguments of an operation depend on the batch size")
        first, second = self.value, other.value
        if first is second or (type(first) is type(second) and isinstance(first, _PLAIN) and first == second):
            return self
        if type(first) is int and type(second) is int:
            return Sized.through(sizes, (first, second))
        if isinstance(first, Tensor):
            raise Mismatch("a tensor is computed in a way that cannot be followed (through numpy, for instance)")
        if isinstance(first, _PLAIN):
            raise Mismatch(f"the value {first!r} becomes {second!r} with another batch size")
        raise Mismatch(f"a {type(first).__name__} is passed, which cannot be sent from worker to worker")


@dataclass(frozen=True)
class Sized(Part):
    """A whole number that depends on the batch size: slope x samples + offset."""

    slope: int
    offset: int

    @classmethod
    def through(cls, sizes: tuple[int, int], numbers: tuple[int, int]) -> Sized:
        """The line through two points."""
        slope, rest = divmod(numbers[1] - numbers[0], sizes[1] - sizes[0])
        if rest:
            raise Mismatch("a number depends on the batch size, and not linearly")
        return cls(slope, numbers[0] - slope * sizes[0])

    def make(self, values: Values, samples: int) -> int:
        del values
        return self.slope * samples + self.offset

    def merged(self, other: Part, sizes: tuple[int, int]) -> Part:
        del other, sizes
        raise AssertionError("a recording has numbers, not lines")


@dataclass(frozen=True, eq=False)
class Nested(Part):
    """A container of other parts."""

    kind: type
    children: tuple[Part, ...]
    rebuild: Callable[[Sequence[Any]], Any]

    def make(self, values: Values, samples: int) -> Any:
        return self.rebuild([child.make(values, samples) for child in self.children])

    def uses(self) -> Iterator[int]:
        for child in self.children:
            yield from child.uses()

    def held(self) -> Iterator[Held]:
        for child in self.children:
            yield from child.held()

    def merged(self, other: Part, sizes: tuple[int, int]) -> Part:
        if not isinstance(other, Nested) or other.kind is not self.kind or len(other.children) != len(self.children):
            raise Mismatch("the arguments of an operation depend on the batch size")
        both = zip(self.children, other.children, strict=True)
        return Nested(self.kind, tuple(a.merged(b, sizes) for a, b in both), self.rebuild)


def part_of(value: Any, of_leaf: Callable[[Any], Part]) -> Part:
    """The part for a value, with `of_leaf` for what is no container."""
    inside = _opened(value)
    if inside is None:
        return of_leaf(value)
    children, rebuild = inside
    return Nested(type(value), tuple(part_of(child, of_leaf) for child in children), rebuild)


def leaves_of(value: Any) -> list[Any]:
    """What is in containers, in the order of `part_of`."""
    inside = _opened(value)
    if inside is None:
        return [value]
    return [leaf for child in inside[0] for leaf in leaves_of(child)]


def _opened(value: Any) -> tuple[Sequence[Any], Callable[[Sequence[Any]], Any]] | None:
    """What is in a container, and how to make one with other contents."""
    kind = type(value)
    if kind is tuple or kind is torch.Size:
        return value, tuple
    if kind is list:
        return value, list
    if kind is dict:
        keys = list(value)
        return list(value.values()), lambda items: dict(zip(keys, items, strict=True))
    if kind is slice:
        return (value.start, value.stop, value.step), lambda items: slice(*items)
    leaves, form = pytree.tree_flatten(value)
    if form.is_leaf():
        return None
    return leaves, lambda items: pytree.tree_unflatten(list(items), form)
