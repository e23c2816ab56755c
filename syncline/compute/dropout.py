"""Dropout that drops the same elements of a sample wherever the sample is computed.

torch draws masks one after the other from a generator, so they depend on which samples a worker has, and on how it
divides them into micro-batches. Here a mask is a pure function of

    seed of the run, step, number of the call in the forward pass, sample, element within the sample

and so the same for any number of workers, micro-batches, any layout and memory format, and after any recovery.

Here: `Dropouts`, of which a loop enters `of(step, samples)` around each forward pass; the numbers of calls; and which
rows of a tensor are of which sample. Not here: the masks (`kernels/dropout.py`), and torch's operators that use them
(`dropout_operators.py`).

**Recomputing.** The backward pass may compute parts of a forward pass again (`torch.utils.checkpoint`), and must drop
the same elements. torch then sets its generator back to the state that it had in the forward pass. So every call draws
a number from that generator, and remembers it: a call outside of any forward pass that draws a number of this step is
that same call.
"""

from __future__ import annotations

import hashlib
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import torch

from syncline.compute.dropout_callers import axis_in_torch_layers
from syncline.compute.kernels.dropout import Draw
from syncline.errors import ConfigError

_OTHER_PURPOSES = 2**62
"""Calls of dropout have smaller numbers."""
_NO_SAMPLE = -1
"""In place of a sample's index, for tensors that belong to no sample, such as weights."""


@dataclass(frozen=True, slots=True, eq=False)
class DropoutCall:
    """One call of dropout in a forward pass."""

    key: int
    samples: torch.Tensor
    """The indices of the samples, or `_NO_SAMPLE` alone."""
    axis: int
    """The dimension of the samples in the tensor: 0 or 1."""

    def draw(self, probability: float) -> Draw:
        return Draw(self.key, probability)


class Dropouts:
    """The masks of one run; `warn` is called once for dropout that the promise does not cover."""

    def __init__(self, seed: int, warn: Callable[[str], None] | None = None) -> None:
        from syncline.compute.dropout_operators import replace_operators  # which refers to this module

        replace_operators()
        self._seed, self._warn = seed, warn
        self._step: int | None = None
        self.remembered: dict[int, DropoutCall | None] = {}
        """The calls of this step by the number that each has drawn; None if two have drawn the same."""
        _all.add(self)

    def of(self, step: int, samples: np.ndarray | Sequence[int], first_call: int = 0) -> DropoutScope:
        """A context for the forward pass of these `samples`, by their indices in the dataset.

        The first call of dropout inside has number `first_call`: the calls in the parts of the model that come before.
        """
        if step != self._step:
            self.forget()
            self._step = step
        return DropoutScope(self, step, samples, first_call)

    def forget(self) -> None:
        """Forget the calls of the last step, before it is repeated with other samples."""
        self.remembered.clear()

    def key(self, step: int, number: int) -> int:
        packed = struct.pack("<QqQ", self._seed, step, number)
        return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=b"dropout").digest(), "little")

    def remember(self, call: DropoutCall) -> None:
        """Recognize `call` if it is repeated in the backward pass."""
        token = _draw_token()
        # Equal numbers: the model sets the generator's seed in its forward pass.
        self.remembered[token] = None if token in self.remembered else call

    def warn(self, message: str) -> None:
        if self._warn is not None:
            warn, self._warn = self._warn, None
            warn(message)


class DropoutScope:
    """A forward pass."""

    def __init__(self, dropouts: Dropouts, step: int, samples: np.ndarray | Sequence[int], first_call: int) -> None:
        self.calls = 0
        """How many times dropout was called so far."""
        self._dropouts, self._step, self._first_call = dropouts, step, first_call
        self._given, self._indices = samples, _NONE
        self._outer: DropoutScope | None = None

    def __enter__(self) -> Self:
        self._outer, _here.scope = _here.scope, self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _here.scope = self._outer

    def call(self, x: torch.Tensor, axis: int | None = None) -> DropoutCall:
        """The next call of dropout, for `x`; `axis` is the dimension of its samples, if that is known."""
        count = len(self._given)
        if axis is None:
            axis = None if isinstance(x, torch.nn.Parameter) else _axis_of(x.shape, count)
        elif count < 1 or x.shape[axis] % count:
            axis = None
        key = self._dropouts.key(self._step, self._first_call + self.calls)
        call = DropoutCall(key, _NONE, 0) if axis is None else DropoutCall(key, self._samples(), axis)
        self.calls += 1
        self._dropouts.remember(call)
        return call

    def call_of(self, rows: torch.Tensor) -> DropoutCall:
        """The next call of dropout, for a tensor whose rows are those of `rows`, by numbers of the caller's choice."""
        key = self._dropouts.key(self._step, self._first_call + self.calls)
        self.calls += 1
        return DropoutCall(key, rows, 0)

    def key_of(self, number: int) -> int:
        """64 random bits for purpose `number` in this step, the same on all workers."""
        return self._dropouts.key(self._step, _OTHER_PURPOSES + number)

    def leave_to_torch(self, what: str) -> None:
        """Say that torch draws the masks of `what`."""
        self._dropouts.warn(
            f"The masks of dropout {what} are drawn by torch: the result depends on the number of workers and on how "
            "a batch is divided."
        )

    def _samples(self) -> torch.Tensor:
        if self._indices is _NONE:
            self._indices = torch.from_numpy(np.ascontiguousarray(self._given, np.int64))
        return self._indices


def sample_axis(shape: Sequence[int], samples: int) -> int | None:
    """The dimension of a tensor that is divided by sample; None if it belongs to no sample.

    The first dimension if it has one row per sample. Otherwise the second if that has (sequence first). Otherwise the
    first, if it has the same number of consecutive rows for each sample.
    """
    if samples < 1 or not shape:
        return None
    if shape[0] == samples:
        return 0
    if len(shape) > 1 and shape[1] == samples:
        return 1
    return 0 if shape[0] % samples == 0 else None


def _axis_of(shape: Sequence[int], samples: int) -> int | None:
    """As `sample_axis`, but what torch's own layers know counts if the shape fits in two ways."""
    is_ambiguous = samples > 0 and len(shape) > 1 and shape[1] == samples and shape[0] % samples == 0
    known = axis_in_torch_layers() if is_ambiguous else None
    return sample_axis(shape, samples) if known is None else known


def current_scope() -> DropoutScope | None:
    """The forward pass that is running in this thread."""
    return _here.scope


def repeated_call() -> DropoutCall | None:
    """The call of a forward pass that is being repeated now, outside of it; None if this is none."""
    found = _remembered_now()
    if found is None:
        return None
    _draw_token()
    remembered, token = found
    call = remembered[token]
    if call is None:
        raise ConfigError(
            "The model sets the seed of torch's generator in its forward pass, and recomputes activations: it cannot "
            "be known which call of dropout is recomputed. Remove torch.manual_seed from the forward pass, or do not "
            "recompute.",
            code="dropout-seed",
        )
    return call


def is_repeating() -> bool:
    """Whether the next call of dropout would be a repeated one."""
    return _remembered_now() is not None


def _remembered_now() -> tuple[dict[int, DropoutCall | None], int] | None:
    """What remembers the number that would be drawn next, and that number; nothing is drawn."""
    known = [dropouts.remembered for dropouts in _all if dropouts.remembered]
    if not known:
        return None
    state = torch.get_rng_state()
    token = _draw_token()
    torch.set_rng_state(state)
    return next(((remembered, token) for remembered in known if token in remembered), None)


class _Here(threading.local):
    scope: DropoutScope | None = None


_here = _Here()
_all: weakref.WeakSet[Dropouts] = weakref.WeakSet()  # of all threads: torch may recompute in another one
_NONE = torch.tensor([_NO_SAMPLE])
_token = torch.empty((), dtype=torch.int64)


def _draw_token() -> int:
    return int(_token.random_())
