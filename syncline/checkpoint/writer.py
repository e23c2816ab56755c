"""Writing checkpoints in the background.

Here: `CheckpointWriter`. The training thread puts the state where it cannot change any more, and another thread makes a
checkpoint of it. A small state is copied in memory, which takes milliseconds on every disk. Of a large one there may be
no room for a second copy: the training thread writes it to a file, past the system's cache (`direct_writer.py`); the
other thread computes the checksum, which takes longer.

Why the training thread does not leave the writing to the other one, and wait with the next update: strategies and
scripts change parameters at other moments, too, and where workers use all cores, that saves no time.

Not here: the files (`store.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from syncline.checkpoint import store
from syncline.checkpoint.snapshot import bytes_in, copied, in_place
from syncline.compute.memory import LARGEST_COPY_BYTES
from syncline.errors import CheckpointError

_LOWEST_PRIORITY = 19
"""Where training uses all cores, one or two percent of one, and all of it while training waits."""
_PATIENCE_S = 10.0
"""How long a checksum may take that way: then its checkpoint is more urgent."""


class _Job(NamedTuple):
    """What the background thread does: make a checkpoint of a copy, or of what was staged."""

    step: int
    work: Callable[[], store.Checkpoint]
    begun_s: float


class CheckpointWriter:
    """Writes one checkpoint at a time; a periodic one is skipped while another is being written."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        on_saved: Callable[[store.Checkpoint, float], None],
        on_failed: Callable[[CheckpointError], None],
    ) -> None:
        self._folder, self._keep = folder, keep
        self._on_saved, self._on_failed = on_saved, on_failed
        self._jobs: queue.Queue[_Job | None] = queue.Queue(maxsize=1)
        self._idle = threading.Event()
        self._idle.set()
        self._last_error: CheckpointError | None = None
        self._thread = threading.Thread(target=self._write_all, name="syncline-checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether a new checkpoint would be written immediately."""
        return self._idle.is_set()

    def save_if_idle(self, step: int, state: dict[str, Any]) -> bool:
        """Save `state` as it is now, in the background, unless the previous one is still being written."""
        if not self.is_idle:
            return False
        self._hand_over(step, state, quietly=True)
        return True

    def save_last(self, step: int, state: dict[str, Any]) -> None:
        """Write `state` and wait until it is on disk; `CheckpointError` if that fails."""
        assert self._thread.is_alive(), "The writer has ended."
        self._idle.wait()  # the one before: staging removes unfinished files
        self._hand_over(step, state)
        self.close()
        if self._last_error is not None:
            raise self._last_error

    def _hand_over(self, step: int, state: dict[str, Any], *, quietly: bool = False) -> None:
        begun_s = time.perf_counter()
        with self._reporting(step):
            work = self._secured(step, state, quietly=quietly)
            self._idle.clear()
            self._jobs.put(_Job(step, work, begun_s))

    def _secured(self, step: int, state: dict[str, Any], *, quietly: bool) -> Callable[[], store.Checkpoint]:
        """Put `state` where it cannot change; what is left to do."""
        if bytes_in(state) <= LARGEST_COPY_BYTES:
            copy = copied(state)
            return lambda: store.save(self._folder, step, copy, keep=self._keep)
        staged = store.stage(self._folder, step, in_place(state))
        digest = _digest_at_low_priority if quietly else store.sha256_of
        return lambda: store.commit(staged, keep=self._keep, digest=digest)

    def close(self) -> None:
        """Finish the checkpoint in progress and end the thread."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def _write_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._reporting(job.step):
                saved = job.work()
                self._last_error = None
                self._on_saved(saved, time.perf_counter() - job.begun_s)
            self._idle.set()

    @contextlib.contextmanager
    def _reporting(self, step: int) -> Iterator[None]:
        """A failure is reported, and ends nothing: the next one may succeed, and `save_last` must raise it."""
        try:
            yield
        except CheckpointError as error:
            self._fail(error)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self._fail(CheckpointError(f"The checkpoint of step {step} could not be written: {reason}."))

    def _fail(self, error: CheckpointError) -> None:
        self._last_error = error
        self._on_failed(error)


def _digest_at_low_priority(file: BinaryIO) -> str:
    """The checksum of a file, at first by a thread to which the system gives the time that training leaves."""
    file.seek(0)
    digest, until_s = hashlib.sha256(), time.monotonic() + _PATIENCE_S

    def begin() -> None:
        if sys.platform == "linux":  # elsewhere, priorities are those of processes
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        with contextlib.suppress(OSError):  # raised again below
            store.feed(digest, file, until_s=until_s)

    thread = threading.Thread(target=begin, name="syncline-checksum", daemon=True)
    thread.start()
    thread.join()
    store.feed(digest, file)
    return digest.hexdigest()
