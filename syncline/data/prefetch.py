"""Prefetching, so that a worker does not wait for data.

Here: a thread that prefetches batches, and the loader processes (torch's DataLoader) for Datasets, which are watched:
one that is stopped would hold up the run. Not here: which samples (`order.py`), and reading one batch (`source.py`,
`stream.py`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import queue
import random
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from syncline.boundary import shared_memory_left
from syncline.compute.processes import die_with_starter, process_state
from syncline.data.augmented import AugmentedSource, untransformed
from syncline.data.order import Share
from syncline.data.packing import unpacked
from syncline.data.random_state import GeneratorStates, generators_kept, seed_torch
from syncline.data.source import ArraySource, DatasetSource, Source
from syncline.data.stream import ShareReader, StreamSource
from syncline.errors import DataError

T = TypeVar("T")
_POLL_S = 0.1
_SMALL_SHARE_BYTES = 512 * 1024  # reading this much takes about as long as a thread switch under the GIL
_LONGEST_DYING_S = 1.0
"""How long a killed process may take from closing its pipes to having an exit code."""
_LOADER_CHECK_S = 0.5
"""How often the states of the loader processes are checked. One that is stopped in two checks in a row is continued."""
_END = object()


@dataclass(frozen=True)
class Fetched:
    """A share and its batch; an empty share has a batch of a sample or two, for its shape."""

    share: Share
    data: Any


class Prefetcher(Generic[T]):
    """The items of an iterable, produced by a thread, up to `depth` ahead of the consumer.

    Close it (or use it as a context manager) to stop the thread early. `check` is called by the consumer: for each item
    and, while it waits for one, several times a second.
    """

    def __init__(self, items: Iterable[T], depth: int = 3, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._produce, args=(items,), name="syncline-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        self._check()
        item = self._wait()
        if item is _END or isinstance(item, _Raised):
            self._queue.put(item)  # keep it, so that every later call ends the same way
        if item is _END:
            raise StopIteration
        if isinstance(item, _Raised):
            raise item.error
        return item  # type: ignore[no-any-return]  # only items, _END and _Raised are ever put

    def _wait(self) -> Any:
        while True:
            try:
                return self._queue.get(timeout=_LOADER_CHECK_S)
            except queue.Empty:
                self._check()
            except RuntimeError as error:
                # torch's handler of SIGCHLD raises it here, in the main thread, if any loader process of this process
                # died. The thread that has the loader will say which one, and why.
                if not str(error).startswith("DataLoader worker (pid"):
                    raise

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and its loader processes."""
        self._closed.set()
        self._empty()  # unblock a thread that waits for room
        while self._thread.is_alive():
            self._thread.join(_LOADER_CHECK_S)
            self._check()  # it may wait for a loader process
        self._empty()
        self._queue.put(_END)  # a later __next__ ends instead of blocking

    def _empty(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()

    def _produce(self, items: Iterable[T]) -> None:
        try:
            for item in items:
                if not self._put(item):
                    return
            self._put(_END)
        except BaseException as error:  # re-raised in the consumer's thread
            self._put(_Raised(error))
        finally:
            if isinstance(items, Generator):
                items.close()  # now, even if it is still referenced: it may own loader processes

    def _put(self, item: object) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False


class InlineFetcher(Generic[T]):
    """The items of an iterable, each produced on demand: the same interface without a thread.

    For small samples in memory, reading is faster than passing them between threads.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[T]:
        return self._items

    def __enter__(self) -> InlineFetcher[T]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None: ...


class _Raised:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class LoaderWatch:
    """Continues loader processes that were stopped, as by SIGSTOP, and reports that to `warn`."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.processes: Sequence[multiprocessing.process.BaseProcess] = ()
        """Set when they have been started."""
        self.warn = warn
        self._checked_at = 0.0
        self._stopped: set[int] = set()  # at the last check

    def check(self) -> None:
        """Called often; looks at the processes now and then."""
        now = time.monotonic()
        if now - self._checked_at < _LOADER_CHECK_S:
            return
        self._checked_at = now
        stopped = {p.pid for p in self.processes if p.pid is not None and process_state(p.pid) == "T"}
        for pid in stopped & self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)  # our child, so this is no other process
            self.warn(f"Data loader process {pid} was stopped, as by SIGSTOP, and has been continued.")
        self._stopped = stopped - self._stopped


def prefetched(
    source: Source,
    shares: Iterator[Share],
    *,
    samples: int,
    loaders: int,
    seed: int,
    warn: Callable[[str], None] = lambda _: None,
) -> Prefetcher[Fetched] | InlineFetcher[Fetched]:
    """Each share with its batch, prefetched if that pays; a share has about `samples` samples.

    `warn` gets sentences for the user, in the consumer's thread.
    """
    watch = LoaderWatch(warn)
    fetched = fetch(source, shares, loaders=loaders, seed=seed, watch=watch)
    base = untransformed(source)
    if base is source and isinstance(base, ArraySource) and samples * base.bytes_per_sample <= _SMALL_SHARE_BYTES:
        return InlineFetcher(fetched)
    return Prefetcher(fetched, check=watch.check)


def fetch(
    source: Source, shares: Iterator[Share], *, loaders: int, seed: int, watch: LoaderWatch | None = None
) -> Iterator[Fetched]:
    """Each share with its batch.

    With `loaders` processes, the generators used in a Dataset's `__getitem__` are seeded by the seed, the epoch and the
    sample's index, so results depend neither on the number of workers nor on resuming.
    """
    if isinstance(source, AugmentedSource):
        fetched = fetch(source.base, shares, loaders=loaders, seed=seed, watch=watch)
        return (Fetched(f.share, source.of_share(f.data, f.share)) for f in fetched)
    if isinstance(source, StreamSource):
        return _of_stream(source, shares, watch)
    if loaders and isinstance(source, DatasetSource):
        return _through_processes(source, shares, loaders, seed, watch)
    return (Fetched(share, _read(source, share)) for share in shares)


def read_inline(source: DatasetSource, shares: Iterator[Share], seed: int) -> InlineFetcher[Fetched]:
    """Each share with its batch, read on demand in the caller's thread, with the same random numbers as by processes.

    The generators that the rest of this process draws from are left as they were.
    """
    items = _SeededItems(source.dataset, seed)
    return InlineFetcher(Fetched(share, _read_seeded(source, share, items)) for share in shares)


def _read_seeded(source: DatasetSource, share: Share, items: _SeededItems) -> Any:
    indices = _wanted(share)
    with generators_kept():
        samples = items.__getitems__([(share.position.epoch, int(i)) for i in indices])
        return source.collated(indices, [sample for _, sample in samples])


def _read(source: Source, share: Share) -> Any:
    indices = _wanted(share)
    try:
        return source.fetch(indices)
    except Exception as error:
        error.add_note(f"This happened while reading samples {_some(indices)} of epoch {share.position.epoch}.")
        raise


def _wanted(share: Share) -> np.ndarray:
    """The samples to read. In place of none two: much code takes a batch of one for a sample, as `squeeze` does."""
    return share.indices if len(share.indices) else np.zeros(min(2, max(1, share.batch)), np.int64)


def _through_processes(
    source: DatasetSource, shares: Iterator[Share], loaders: int, seed: int, watch: LoaderWatch | None
) -> Iterator[Fetched]:
    requested: queue.SimpleQueue[Share] = queue.SimpleQueue()

    def keys() -> Iterator[list[tuple[int, int]]]:
        for share in shares:
            requested.put(share)
            yield [(share.position.epoch, int(i)) for i in _wanted(share)]

    loader = DataLoader(
        _SeededItems(source.dataset, seed),
        batch_sampler=_Once(keys()),
        collate_fn=_Collated(source),
        num_workers=loaders,
        prefetch_factor=4,
        worker_init_fn=_init_loader,
        generator=torch.Generator(),  # else it would draw from the global one, within a seeded step
        multiprocessing_context="fork",
    )
    for data in _received(loader, watch):
        yield Fetched(requested.get(), data)


def _of_stream(source: StreamSource, shares: Iterator[Share], watch: LoaderWatch | None) -> Iterator[Fetched]:
    """A process reads the stream. It has the same shares as this one: they were copied when it was forked."""
    received = read_in_process(ShareReader(source, shares), watch)
    next(received)  # it is forked now, before a share is taken here
    has_warned = False
    for share in shares:
        portion = next(data for data in received if data is not None)
        if portion.has_more and watch is not None and not has_warned:
            has_warned = True
            watch.warn(
                f"The stream of {source.name} continues after {source.count:,} samples. They are an epoch, as its "
                "__len__ says; what follows is not used."
            )
        yield Fetched(replace(share, checksum=portion.checksum), unpacked(portion.packed))


def read_in_process(reader: IterableDataset[Any], watch: LoaderWatch | None = None) -> Generator[Any, None, None]:
    """The items of `reader`, which another process iterates."""
    loader: DataLoader[Any] = DataLoader(
        reader,
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=1,
        prefetch_factor=4,
        worker_init_fn=_init_loader,
        generator=torch.Generator(),
        multiprocessing_context="fork",
    )
    return _received(loader, watch)


def _received(loader: DataLoader[Any], watch: LoaderWatch | None) -> Generator[Any, None, None]:
    """What the processes of `loader` send."""
    batches = iter(loader)
    processes = multiprocessing.active_children()
    if watch is not None:
        watch.processes = processes
    failure: Exception | None = None
    try:
        for data in batches:
            if isinstance(data, DataError):
                raise data
            yield data
    except Exception as error:
        failure = _explained(error, processes)
    if failure is not None:
        # The tracebacks refer to the loader's iterator, and would keep its processes alive as long as the error. The
        # process's own traceback is in the message.
        del batches
        failure.__cause__ = failure.__context__ = None
        raise failure.with_traceback(None)


def _explained(error: Exception, processes: Sequence[multiprocessing.process.BaseProcess]) -> Exception:
    """`error`, or its cause: if a loader process died, torch reports only a broken pipe."""
    if isinstance(error, DataError) or str(error).startswith("Caught "):
        return error  # raised in the process, by the Dataset
    gone = multiprocessing.connection.wait([p.sentinel for p in processes], _LONGEST_DYING_S)
    for process in processes:
        if process.sentinel in gone:
            process.join(_LONGEST_DYING_S)  # its pipes close shortly before its exit code is available
    codes = sorted({p.exitcode for p in processes if p.exitcode})
    ends = [f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}" for code in codes]
    if not ends:
        return error
    what = f"A data loader process exited unexpectedly: {', '.join(ends)}."
    if -signal.SIGBUS in codes:
        return RuntimeError(
            f"{what}\nIts shared memory is probably full: /dev/shm has {shared_memory_left()}. Enlarge it (for Docker: "
            "--shm-size 1g), or use --loaders 0 or a smaller --batch."
        )
    return RuntimeError(
        f"{what}\nIf it ran out of memory, use fewer --loaders; with 0, the worker loads the data itself."
    )


class _Once:
    def __init__(self, keys: Iterator[list[tuple[int, int]]]) -> None:
        self._keys = keys

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self._keys


class _Collated:
    """Collates in the loader process. It returns a `DataError`: raised there, only its text would get here."""

    def __init__(self, source: DatasetSource) -> None:
        self._source = source

    def __call__(self, pairs: list[tuple[int, Any]]) -> Any:
        try:
            return self._source.collated([index for index, _ in pairs], [item for _, item in pairs])
        except DataError as error:
            return DataError(str(error), code=error.code, **error.facts)  # without the frames, which cannot be sent


class _SeededItems(Dataset[Any]):
    """The samples of a Dataset, with their indices. What it draws for a sample depends on the sample alone.

    Seeding for each sample can take as long as reading it. So a batch is read without; if it turns out that the Dataset
    has drawn from a generator, it is read again with a seed for each sample, as all batches after it.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._draws = False

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[tuple[int, Any]]:
        """What torch calls to read a batch."""
        if not self._draws:
            before = GeneratorStates.now()
            items = [self._read(key) for key in keys]
            if GeneratorStates.now() == before:
                return items
            self._draws = True
        return [self[key] for key in keys]

    def __getitem__(self, key: tuple[int, int]) -> tuple[int, Any]:
        words = np.random.SeedSequence([self._seed, *key]).generate_state(3)
        random.seed(int(words[0]))
        np.random.seed(int(words[1]))
        seed_torch(int(words[2]))
        return self._read(key)

    def _read(self, key: tuple[int, int]) -> tuple[int, Any]:
        epoch, index = key
        try:
            return index, self._dataset[index]
        except Exception as error:
            error.add_note(f"This happened while reading sample {index} of epoch {epoch}.")
            raise


def _as_it_is(data: Any) -> Any:
    return data


def _some(indices: np.ndarray) -> str:
    shown = ", ".join(str(int(i)) for i in indices[:5])
    return f"{shown}, ... ({len(indices)} in all)" if len(indices) > 5 else shown


def _init_loader(worker_id: int) -> None:
    del worker_id  # torch passes it
    die_with_starter()
