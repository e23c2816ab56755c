"""State that a script carries from batch to batch, such as the hidden state of a recurrent network.

Here: `Carried`, what `worker.carried` returns, and `CarriedTable`, the state of the whole batch on every worker. Not
here: exchanging it (`numbers.py`), and saving it (`values.py`).

Each worker computes the state of its own samples. If that worker fails, no other could compute it again. So the new
state is gathered when the script assigns it, which is before the update of the same batch: an update never counts
without the state that goes with it. When samples are divided otherwise, each worker takes what it needs from the
table. Samples of a failed worker that are trained on again need the state from before: the table of the last two
rounds is kept.

The place of a sample in its batch identifies it: place p of one batch is followed by place p of the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from syncline.data.order import SampleOrder, Share
from syncline.errors import ConfigError
from syncline.workers.own_loop.numbers import Numbers
from syncline.workers.own_loop.training import LoopTraining

_TIMES_OF_A_BATCH = 2**20
"""A time is a batch multiplied by this, plus how many states the script has assigned in it."""

Tensors = list[torch.Tensor]


class _Version(NamedTuple):
    """The state of all places at some point of the training."""

    round: int
    """The round in which it was assigned."""
    times: list[int]
    """By place: when its state was assigned."""
    tensors: Tensors


class Places(NamedTuple):
    """Places in a batch, each with the time of the batch that the sample is in."""

    places: list[int]
    times: list[int]

    @classmethod
    def of(cls, share: Share, order: SampleOrder) -> Places:
        numbers = [(epoch, number) for epoch, low, high in share.ranges for number in range(low, high)]
        batches = [epoch * order.steps_per_epoch + number // order.batch for epoch, number in numbers]
        return cls([number % order.batch for _, number in numbers], [b * _TIMES_OF_A_BATCH for b in batches])


class CarriedTable:
    """The state of every place in a batch, with as many earlier versions as a failure can make necessary."""

    def __init__(self, initial: Tensors, dim: int, reset_every: int | None = None) -> None:
        self.dim, self.size = dim, initial[0].size(dim)
        self._reset_every = reset_every
        self._versions = [_Version(-1, [-1] * self.size, initial)]
        self._initial = self._versions[0]

    @property
    def newest(self) -> Tensors:
        """The state of all places."""
        return [t.clone() for t in self._versions[-1].tensors]

    def before(self, places: Sequence[int], times: Sequence[int]) -> Tensors:
        """The state of each place from before its time."""
        chosen = [self._version_before(place, time) for place, time in zip(places, times, strict=True)]
        if all(version is chosen[0] for version in chosen):
            index = torch.tensor(places, dtype=torch.int64)
            return [t.index_select(self.dim, index.to(t.device)) for t in chosen[0].tensors]
        columns = [[t.narrow(self.dim, p, 1) for t in v.tensors] for v, p in zip(chosen, places, strict=True)]
        return [torch.cat(parts, self.dim) for parts in zip(*columns, strict=True)]

    def _version_before(self, place: int, time: int) -> _Version:
        batch = time // _TIMES_OF_A_BATCH
        first = batch - batch % self._reset_every if self._reset_every is not None else 0
        for version in reversed(self._versions):
            if first * _TIMES_OF_A_BATCH <= version.times[place] < time:
                return version
        return self._initial

    def assign(self, round: int, parts: Sequence[tuple[Sequence[int], Sequence[int], Tensors]]) -> None:
        """The workers have computed these parts, places with times and state, in a round."""
        newest = self._versions[-1]
        times, tensors = list(newest.times), [t.clone() for t in newest.tensors]
        for places, part_times, state in parts:
            if places:
                index = torch.tensor(places, dtype=torch.int64)
                for place, time in zip(places, part_times, strict=True):
                    times[place] = time
                for t, new in zip(tensors, state, strict=True):
                    t.index_copy_(self.dim, index.to(t.device), new.to(t.device, t.dtype))
        self._versions.append(_Version(round, times, tensors))
        # Only this round and the last can be repeated, with what was before.
        rounds = sorted({version.round for version in self._versions})
        older = [version for version in self._versions if version.round not in rounds[-2:]]
        self._versions = older[-1:] + [version for version in self._versions if version.round in rounds[-2:]]

    def state(self) -> list[dict[str, Any]]:
        """For a checkpoint. The tensors are never changed in place, so that they need not be copied."""
        return [{"round": v.round, "times": list(v.times), "tensors": list(v.tensors)} for v in self._versions]

    def load(self, state: list[dict[str, Any]]) -> None:
        saved = [[tuple(t.shape) for t in version["tensors"]] for version in state[:1]]
        shapes = [tuple(t.shape) for t in self._initial.tensors]
        if saved != [shapes]:
            raise ConfigError(
                f"The saved run carries state of the shapes {saved}, and worker.carried got {shapes}. Resume with the "
                "same model and batch, or start a new run.",
                code="carried-shape",
            )
        devices = [t.device for t in self._initial.tensors]
        self._versions = [
            _Version(v["round"], v["times"], [t.to(d) for t, d in zip(v["tensors"], devices, strict=True)])
            for v in state
        ]


class Carried:
    """State that a script carries from batch to batch; `value` is that of this worker's samples."""

    def __init__(
        self, training: LoopTraining, numbers: Numbers, initial: Any, dim: int, reset_every: int | None
    ) -> None:
        self._training, self._numbers, self.structure = training, numbers, initial
        tensors = [t.detach().clone() for t in leaves(initial)]
        _check_initial(tensors, dim)
        if reset_every is not None and reset_every < 1:
            raise ConfigError(f"worker.carried(reset_every={reset_every}): give 1 batch or more.", code="reset-every")
        if not training.is_lock_step:
            strategy = str(training.session.plan.strategy)
            raise ConfigError(
                f"worker.carried needs a strategy that sums gradients in every step, and {strategy} does not: after a "
                "failure, the carried state of several steps would be gone. Use --strategy allreduce.",
                code="carried-strategy",
                strategy=strategy,
            )
        self.table = CarriedTable(tensors, dim, reset_every)
        self._share: Share | None = None
        self._assigned = 0  # how often the script has assigned a value in this batch

    @property
    def value(self) -> Any:
        """The state of this worker's samples of the current batch, detached: what was assigned last, or initial."""
        share, places = self._current()
        if share is None or places is None:
            return rebuilt(self.structure, iter(self.table.newest))
        if not places.places:  # the batch has samples in place of none; see `data/prefetch.py`
            number = min(2, max(1, share.batch))
            places = Places([0] * number, [_TIMES_OF_A_BATCH**2] * number)
        times = [time + self._assigned + 1 for time in places.times]
        return rebuilt(self.structure, iter(self.table.before(places.places, times)))

    @value.setter
    def value(self, value: Any) -> None:
        share, places = self._current()
        if share is None or places is None:
            raise ConfigError(
                "The value of worker.carried was assigned before the script took a batch. Pass the initial state to "
                "worker.carried, and assign in the loop.",
                code="carried-without-batch",
            )
        tensors = [t.detach() for t in leaves(value)]
        self._check(tensors, max(1, len(places.places)), is_empty=not places.places)
        self._assigned += 1
        times = [time + self._assigned for time in places.times]
        own = {"places": places.places, "times": times, "tensors": [t.cpu() for t in tensors] if times else []}
        parts = self._numbers.gather_values(own)
        round = self._training.round.start
        self.table.assign(round, [(part["places"], part["times"], part["tensors"]) for part in parts])

    def _current(self) -> tuple[Share | None, Places | None]:
        """The batch that the script has taken last, and this worker's places in it."""
        share, order = self._training.share, self._training.order
        if share is None or order is None:
            return None, None
        if order.batch != self.table.size:
            raise ConfigError(
                f"worker.carried got a state of {self.table.size} samples along dimension {self.table.dim}, and a "
                f"batch has {order.batch}. Pass the initial state of the whole batch, over all workers; dim= is the "
                "dimension of the samples.",
                code="carried-size",
                size=self.table.size,
                batch=order.batch,
            )
        if share is not self._share:
            self._share, self._assigned = share, 0
        places = Places.of(share, order)
        if len(set(places.places)) < len(places.places):
            raise ConfigError(
                "A worker failed in a step that accumulates several batches, and samples that follow each other are "
                "to be trained again in one batch: each would need the carried state of the one before. Resume from "
                "the last checkpoint, and run scripts that accumulate with --on-worker-failure replace-only.",
                code="carried-accumulation",
            )
        return share, places

    def _check(self, tensors: Tensors, number: int, *, is_empty: bool) -> None:
        expected = [_without(t, self.table.dim) for t in leaves(self.structure)]
        sizes = {t.size(self.table.dim) if t.dim() > self.table.dim else -1 for t in tensors}
        if [_without(t, self.table.dim) for t in tensors] == expected and (is_empty or sizes == {number}):
            return
        shapes = [tuple(t.shape) for t in tensors]
        raise ConfigError(
            f"The value of worker.carried got the shapes {shapes}. It needs the structure of its initial value, with "
            f"the {number} samples of this worker along dimension {self.table.dim}.",
            code="carried-shape",
            shapes=shapes,
        )


def _check_initial(tensors: Tensors, dim: int) -> None:
    sizes = {t.size(dim) if t.dim() > dim else -1 for t in tensors}
    if len(sizes) != 1 or -1 in sizes:
        shapes = [tuple(t.shape) for t in tensors]
        raise ConfigError(
            f"worker.carried got tensors of the shapes {shapes}, which do not have one entry per sample along "
            f"dimension {dim}. Pass the state of the whole batch, and the dimension of the samples as dim=.",
            code="carried-shape",
            shapes=shapes,
        )


def _without(tensor: torch.Tensor, dim: int) -> list[int]:
    """The shape without the dimension of the samples."""
    return [size for number, size in enumerate(tensor.shape) if number != dim]


def leaves(structure: Any) -> Tensors:
    """The tensors in tuples, lists and dicts."""
    return [leaf for leaf in pytree.tree_leaves(structure) if isinstance(leaf, torch.Tensor)]


def rebuilt(structure: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The same structure with other tensors."""
    return pytree.tree_map_only(torch.Tensor, lambda _: next(tensors), structure)
