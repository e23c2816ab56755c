"""Fetching ahead, so that a worker does not wait for data.

Here: an iterator that a thread keeps filled, and the loader processes behind it for Datasets with code of their own
(torch's DataLoader). Not here: which samples (`order.py`) and how one batch is read (`source.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import random
import signal
import threading
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from syncline.data.order import Share
from syncline.data.source import DatasetSource, Source

__all__ = ["Ahead", "Fetched", "fetch"]

T = TypeVar("T")
_POLL_S = 0.1
_END = object()


@dataclass(frozen=True)
class Fetched:
    """A share and its samples; for an empty share, one sample that shows what samples look like."""

    share: Share
    data: Any


class Ahead(Generic[T]):
    """The items of an iterable, produced by a thread up to `depth` ahead of whoever iterates.

    Close it (or use it as a context manager) to end the thread before the items do.
    """

    def __init__(self, items: Iterable[T], depth: int = 3) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._produce, args=(items,), name="syncline-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        item = self._queue.get()
        if item is _END or isinstance(item, _Raised):
            self._queue.put(item)  # it is the last one: whoever asks again gets the same answer
        if item is _END:
            raise StopIteration
        if isinstance(item, _Raised):
            raise item.error
        return item  # type: ignore[no-any-return]  # only items, _END and _Raised are ever put

    def __enter__(self) -> Ahead[T]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread, and with it the loader processes it may own."""
        self._closed.set()
        self._thread.join()
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        self._queue.put(_END)  # nobody who still asks waits for ever

    def _produce(self, items: Iterable[T]) -> None:
        try:
            for item in items:
                if not self._put(item):
                    return
            self._put(_END)
        except BaseException as error:  # carried to the thread that iterates
            self._put(_Raised(error))
        finally:
            if isinstance(items, Generator):
                items.close()  # now, even if somebody still refers to it: it may own loader processes

    def _put(self, item: object) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False


class _Raised:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def fetch(source: Source, shares: Iterator[Share], *, loaders: int, seed: int) -> Iterator[Fetched]:
    """Each share with its samples.

    With `loaders` processes, everything random in a Dataset's `__getitem__` is seeded by the seed, the epoch and the
    sample's own index, so it depends neither on the number of workers nor on where a run was resumed.
    """
    if loaders and isinstance(source, DatasetSource):
        return _through_processes(source, shares, loaders, seed)
    return (Fetched(share, _read(source, share)) for share in shares)


def _read(source: Source, share: Share) -> Any:
    indices = share.indices if len(share.indices) else np.zeros(1, np.int64)
    try:
        return source.fetch(indices)
    except Exception as error:
        error.add_note(f"This happened while reading samples {_some(indices)} of epoch {share.position.epoch}.")
        raise


def _through_processes(source: DatasetSource, shares: Iterator[Share], loaders: int, seed: int) -> Iterator[Fetched]:
    asked: queue.SimpleQueue[Share] = queue.SimpleQueue()

    def keys() -> Iterator[list[tuple[int, int]]]:
        for share in shares:
            asked.put(share)
            yield [(share.position.epoch, int(i)) for i in share.indices] or [(share.position.epoch, 0)]

    loader = DataLoader(
        _SeededItems(source.dataset, seed),
        batch_sampler=_Once(keys()),
        collate_fn=source.collate,
        num_workers=loaders,
        prefetch_factor=4,
        worker_init_fn=_die_with_parent,
        generator=torch.Generator(),  # else it draws from the global one, in the middle of somebody's seeded step
        multiprocessing_context="fork",
    )
    try:
        for data in loader:
            yield Fetched(asked.get(), data)
    except Exception as error:
        # The tracebacks refer to the loader's iterator, and would keep its processes as long as somebody keeps the
        # error. What matters, the process's own traceback, is in the message.
        error.__cause__ = error.__context__ = None
        raise error.with_traceback(None)  # noqa: B904  # it is the same error


class _Once:
    def __init__(self, keys: Iterator[list[tuple[int, int]]]) -> None:
        self._keys = keys

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self._keys


class _SeededItems(Dataset[Any]):
    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        words = np.random.SeedSequence([self._seed, epoch, index]).generate_state(3)
        random.seed(int(words[0]))
        np.random.seed(int(words[1]))
        torch.manual_seed(int(words[2]))
        try:
            return self._dataset[index]
        except Exception as error:
            error.add_note(f"This happened while reading sample {index} of epoch {epoch}.")
            raise


def _some(indices: np.ndarray) -> str:
    shown = ", ".join(str(int(i)) for i in indices[:5])
    return f"{shown}, ... ({len(indices)} in all)" if len(indices) > 5 else shown


def _die_with_parent(worker_id: int) -> None:
    del worker_id
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
