"""Writing checkpoints in the background.

Here: `CheckpointWriter`: the training thread copies the state in memory (milliseconds), and another thread writes it.
Not here: the files (`store.py`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from syncline.checkpoint import store
from syncline.errors import CheckpointError


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
        self._jobs: queue.Queue[tuple[int, dict[str, Any]] | None] = queue.Queue(maxsize=1)
        self._busy = threading.Lock()
        self._last_error: CheckpointError | None = None
        self._thread = threading.Thread(target=self._write_all, name="syncline-checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether a new checkpoint would be written immediately."""
        return not self._busy.locked() and not self._jobs.full()

    def save_if_idle(self, step: int, state: dict[str, Any]) -> bool:
        """Copy `state` and write it in the background, unless the previous one is still being written."""
        if not self.is_idle:
            return False
        self._jobs.put((step, copied(state)))
        return True

    def save_last(self, step: int, state: dict[str, Any]) -> None:
        """Write `state` and wait until it is on disk; `CheckpointError` if that fails."""
        assert self._thread.is_alive(), "The writer has ended."
        self._jobs.put((step, copied(state)))
        self.close()
        if self._last_error is not None:
            raise self._last_error

    def close(self) -> None:
        """Finish the checkpoint in progress and end the thread."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def _write_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            step, state = job
            with self._busy:
                start = time.perf_counter()
                try:
                    saved = store.save(self._folder, step, state, keep=self._keep)
                except CheckpointError as error:
                    self._fail(error)
                except Exception as error:  # the next one may succeed, and `save_last` must raise it
                    reason = f"{type(error).__name__}: {error}"
                    self._fail(CheckpointError(f"The checkpoint of step {step} could not be written: {reason}."))
                else:
                    self._last_error = None
                    self._on_saved(saved, time.perf_counter() - start)

    def _fail(self, error: CheckpointError) -> None:
        self._last_error = error
        self._on_failed(error)


def copied(value: Any) -> Any:
    """A copy of `value` with every tensor copied to CPU memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, OrderedDict):
        ordered = OrderedDict((k, copied(v)) for k, v in value.items())
        vars(ordered).update(vars(value))  # a Module's `_metadata`: the version of each layer's state
        return ordered
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    if isinstance(value, list):
        return [copied(v) for v in value]
    if isinstance(value, tuple):
        items = [copied(v) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
