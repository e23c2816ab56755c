"""What a script iterates over: this worker's share of each batch.

Here: `PreparedBatches`, which stands in for the user's DataLoader, in training and in evaluation, `DrawnBatches`, for
batches that a function draws, and `ListedBatches`, for an epoch of batches that the script has made. Not here: where
samples come from (`feed.py`), what taking a batch means (`training.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from syncline.compute.partition import share
from syncline.data.assignment import Position
from syncline.data.loader_order import order_of
from syncline.data.order import Share
from syncline.data.packing import unpacked
from syncline.data.prefetch import Fetched, InlineFetcher, Prefetcher, fetch, prefetched, read_in_process, read_inline
from syncline.data.source import DatasetSource
from syncline.data.stream import PartReader, StreamSource
from syncline.data.stream_order import check_has_batches
from syncline.errors import ConfigError, DataError
from syncline.workers.forward import to_device
from syncline.workers.own_loop.counting import NumberedBatches, count_batches
from syncline.workers.own_loop.division import Division
from syncline.workers.own_loop.feed import DrawnSource, Feed, listed_feed, loader_feed
from syncline.workers.own_loop.numbers import Numbers
from syncline.workers.own_loop.training import LoopTraining

_START = Position()
_IsDue = Callable[[int, int], bool]
"""Whether a worker evaluates this part of this batch."""
_ReadParts = Callable[[int, _IsDue], Iterator[Any]]
"""Reads those parts, of so many for each batch."""


class TrainingBatches:
    """This worker's share of each training batch, fetched ahead, for whatever assignment is in force."""

    def __init__(self, training: LoopTraining, feed: Feed, numbers: Numbers) -> None:
        self._training, self.feed, self._numbers = training, feed, numbers
        self._ahead: Prefetcher[Fetched] | InlineFetcher[Fetched] | None = None
        self._items: Iterator[Fetched] | None = None
        self._generation = -1
        training.on_end.append(self.close)
        if training.session.link is not None:  # a script under plain python takes every batch from the first on
            count_batches()
        training.in_use.on_use = lambda share: numbers.begin_batch(len(share.indices))

    def epoch(self, epoch: int) -> Iterator[Any]:
        """The batches of one epoch that are not done yet."""
        training = self._training
        if not training.begin_epoch(epoch):
            return
        training.session.recorder.leave_out()  # what the script did between two epochs
        while True:
            training.end_step()
            fetched = self._next(epoch)
            while fetched is not None and not training.begin_batch(fetched.share):
                if self._generation != training.progress.generation:  # the batch belongs to an earlier assignment
                    fetched = self._next(epoch)
            if fetched is None:
                break
            self._numbers.warn_if_uncombined()
            yield to_device(fetched.data, training.session.device)
        self.close()

    def _next(self, epoch: int) -> Fetched | None:
        progress = self._training.progress
        if self._items is None or self._generation != progress.generation:
            self.close()
            self._generation = progress.generation
            self._ahead = self._fetch_from(epoch)
            self._items = iter(self._ahead)
        return next(self._items, None)

    def _fetch_from(self, epoch: int) -> Prefetcher[Fetched] | InlineFetcher[Fetched]:
        progress, session = self._training.progress, self._training.session
        taken = len(self._training.round.taken) if self._training.round.is_open else 0
        remaining = replace(progress.remaining(taken), epochs=None if self.feed.is_endless else epoch + 1)
        shares: Iterator[Share] = progress.order.shares_of(remaining, progress.rank)
        if isinstance(self.feed.source, DrawnSource):
            # Not in a thread: drawing seeds the generators that the script's own thread uses.
            return InlineFetcher(fetch(self.feed.source, shares, loaders=0, seed=session.plan.seed))
        if isinstance(self.feed.source, DatasetSource) and not self.feed.loaders:
            return read_inline(self.feed.source, shares, session.plan.seed)  # its samples may be random, too
        return prefetched(
            self.feed.source,
            shares,
            samples=-(-progress.order.batch // session.plan.size),
            loaders=self.feed.loaders,
            seed=session.plan.seed,
            warn=session.warn_of_worker,
        )

    def close(self) -> None:
        """Stop fetching ahead, and the processes that do it."""
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = self._items = None


class PreparedBatches(NumberedBatches):
    """Stands in for the user's DataLoader, and decides at each iteration whether the script trains or evaluates.

    Training means that gradients are enabled, and that a prepared model is in training mode or this is the script's
    only loader. What the DataLoader has besides its batches (`dataset`, `batch_size`, ...) is available as before.
    """

    def __init__(self, training: LoopTraining, loader: DataLoader[Any], numbers: Numbers, *, may_train: bool) -> None:
        self._training, self._loader, self._numbers = training, loader, numbers
        self._batches: TrainingBatches | None = None
        self._is_first, self._is_stream = may_train, isinstance(loader.dataset, IterableDataset)
        self.next_epoch = 0
        if may_train:
            feed = loader_feed(loader, training.session.plan.seed, training.session.warn)
            training.set_order(feed.order)
            self._batches = TrainingBatches(training, feed, numbers)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        """The number of batches of an epoch, which is the same on all workers."""
        return self._batches.feed.order.steps_per_epoch if self._batches is not None else len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self._evaluates():
            return self._evaluation()
        if self._batches is None:
            raise ConfigError(
                "The script trains with a second DataLoader. The samples of one loader are divided and accounted for: "
                "prepare the training loader first, and pass loaders for evaluation after it. To train on several "
                "datasets, combine them (torch.utils.data.ConcatDataset or StackDataset).",
                code="second-training-loader",
            )
        epoch, self.next_epoch = self.next_epoch, self.next_epoch + 1
        return self._batches.epoch(epoch)

    def is_numbered(self) -> bool:
        return self._batches is not None and not self._evaluates()

    def last_number(self) -> int:
        return self._training.batch

    def _evaluates(self) -> bool:
        if not torch.is_grad_enabled():
            return True
        models = self._training.parts.models
        return bool(models) and not self._is_first and not any(model.training for model in models)

    def _evaluation(self) -> Iterator[Any]:
        """This worker's share of each batch; all of it if the workers are not at the same step."""
        training, device = self._training, self._training.session.device
        self._numbers.begin_pass()
        if training.is_catching_up or not training.parts.optimizers:
            # It repeats an epoch that is done. One batch is enough for what comes after the loop.
            for data in self._loader:
                self._numbers.begin_batch(_size(data))
                yield to_device(data, device)
                if training.is_catching_up:
                    break
            self._numbers.end_pass()
            return
        training.enter()
        is_alone = training.session.plan.size == 1
        if training.is_asynchronous or (is_alone and not self._is_stream):
            for data in self._loader:
                self._numbers.begin_batch(_size(data))
                yield to_device(data, device)
            self._numbers.end_pass()
            return
        for data in self._divided():
            self._numbers.begin_batch(_size(data))
            yield to_device(data, device)
        self._numbers.end_pass(is_divided=not is_alone)

    def _divided(self) -> Iterator[Any]:
        """Each worker's part of every batch. The results of one that fails are gone: others do its part again."""
        session = self._training.session
        holders = self._numbers.holders()
        read = self._stream_reader() if self._is_stream else self._index_reader(len(holders))
        division: Division | None = Division(holders)
        is_wanted = self._is_counted()
        while division is not None:
            if is_wanted:
                yield from read(division.parts, _due(session.worker_id, division))
            division, is_wanted = division.after_failures(self._numbers.members()), True

    def _stream_reader(self) -> _ReadParts:
        """Each worker reads the whole stream, and once more if a worker fails."""
        check_has_batches(self._loader)
        source = StreamSource(self._loader, self._training.session.plan.seed)

        def read(parts: int, is_due: _IsDue) -> Iterator[Any]:
            return (unpacked(portion.packed) for portion in read_in_process(PartReader(source, parts, is_due)))

        return read

    def _index_reader(self, workers: int) -> _ReadParts:
        batches = _index_batches(self._loader, self._training.session.plan.seed, workers)

        def read(parts: int, is_due: _IsDue) -> Iterator[Any]:
            due = [
                batch[slice(*share(len(batch), parts, part))]
                for number, batch in enumerate(batches)
                for part in range(parts)
                if is_due(number, part)
            ]
            return self._fetch([indices for indices in due if indices])

        return read

    def _is_counted(self) -> bool:
        """Whether this worker's part is wanted; otherwise the others have done it, and this worker repeats a round."""
        recorded = self._training.round.recorded
        return recorded is None or self._training.session.worker_id in recorded

    def _fetch(self, batches: list[list[int]]) -> Iterator[Any]:
        loader = self._loader
        return iter(
            DataLoader(
                loader.dataset,
                batch_sampler=batches,
                collate_fn=loader.collate_fn,
                num_workers=loader.num_workers,
                worker_init_fn=loader.worker_init_fn,
                generator=torch.Generator(),  # else it would draw from the script's
            )
        )


class DrawnBatches(NumberedBatches):
    """Batches that a function draws, as an iterator: `for x, y in worker.batches(...)`, or `next(...)`."""

    def __init__(self, training: LoopTraining, feed: Feed, numbers: Numbers) -> None:
        training.set_order(feed.order)
        self._training, self._batches = training, TrainingBatches(training, feed, numbers)
        self._current: Iterator[Any] | None = None
        self._is_endless = feed.is_endless
        self._steps = feed.order.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        return self

    def is_numbered(self) -> bool:
        return self._current is None

    def last_number(self) -> int:
        share = self._training.share
        return self._training.batch + (share.position.epoch * self._steps if share is not None else 0)

    def __len__(self) -> int:
        if self._is_endless:
            raise TypeError("worker.batches without steps= has no length")
        return self._steps

    def __next__(self) -> Any:
        if self._current is None:
            self._training.enter()
            first = self._training.epoch_at_start
            if first and not self._is_endless:
                raise StopIteration
            self._current = self._batches.epoch(first)
        return next(self._current)


class ListedBatches(NumberedBatches):
    """Whole batches that the script has made; each iteration is an epoch."""

    def __init__(self, training: LoopTraining, batches: Sequence[Any], numbers: Numbers, dim: int) -> None:
        self._training, self._dim = training, dim
        feed = listed_feed(batches, training.session.plan.seed, dim=dim)
        training.set_order(feed.order)
        self._batches = TrainingBatches(training, feed, numbers)
        self.next_epoch = 0

    def replace(self, batches: Sequence[Any]) -> None:
        """The script gives the batches of another epoch."""
        feed = listed_feed(batches, self._training.session.plan.seed, dim=self._dim)
        before = self._batches.feed.order
        if feed.order != before:
            raise DataError(
                f"worker.batches got {feed.order.count} samples in batches of {feed.order.batch}, and {before.count} "
                f"in batches of {before.batch} in the epoch before. Give as many in every epoch.",
                code="batches-changed",
            )
        self._batches.feed = feed

    def __len__(self) -> int:
        return self._batches.feed.order.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        epoch, self.next_epoch = self.next_epoch, self.next_epoch + 1
        return self._batches.epoch(epoch)

    def is_numbered(self) -> bool:
        return True

    def last_number(self) -> int:
        return self._training.batch


def _due(worker_id: int, division: Division) -> _IsDue:
    return lambda batch, part: division.is_due(batch, part, worker_id)


def _index_batches(loader: DataLoader[Any], seed: int, workers: int) -> list[list[int]]:
    """The batches of an evaluation; a last one with fewer samples than workers is part of the one before it."""
    order = order_of(loader, seed)
    steps = order.shares(start=_START, rank=0, size=1, epochs=1)
    batches = [[int(i) for i in step.indices] for step in steps]
    if len(batches) > 1 and len(batches[-1]) < workers:
        last = batches.pop()
        batches[-1] = batches[-1] + last
    return batches


def _size(batch: Any) -> int:
    """How many samples a batch has, as far as its first tensor shows."""
    while isinstance(batch, (list, tuple, dict)) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return len(batch) if hasattr(batch, "__len__") and getattr(batch, "ndim", 1) > 0 else 1
