"""Saving and loading a state that is too large for a second copy in memory."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint_store import files_in, in_another_process
from test_checkpoint_writer import LIMIT_S, Log

from syncline.checkpoint import store, writer
from syncline.checkpoint.store import checkpoints_in, load, newest_sound
from syncline.checkpoint.writer import CheckpointWriter
from syncline.compute.memory import Peak
from syncline.errors import CheckpointError

NUMBERS = 7_200_000
BYTES = 4 * NUMBERS
ROOM = 8_000_000
"""What saving may take beside the state: buffers, a thread's stack, what Python has not returned."""


def state_of(flat: torch.Tensor) -> dict[str, Any]:
    return {"model": {str(n): part for n, part in enumerate(flat.view(12, 1000, -1))}, "metrics": {"loss": 0.5}}


def writer_in(folder: Path, log: Log | None = None) -> CheckpointWriter:
    log = log or Log()
    return CheckpointWriter(folder, keep=2, on_saved=log.on_saved, on_failed=log.on_failed)


def exit_status_of(work: Callable[[], bool]) -> int:
    """In a process of its own, whose peak memory is only that of `work`: 0 if that returns True."""
    return in_another_process(lambda: os._exit(0 if work() else 1))


def grown_by(work: Callable[[], None]) -> int:
    """How much more memory `work` needs at its peak than is in use before, when it is done for the second time."""
    work()  # loads code
    ctypes.CDLL(None).malloc_trim(0)  # memory that earlier tests have freed would hide what is allocated
    peak = Peak(torch.device("cpu"))
    peak.reset()
    before = peak.read()
    work()
    return peak.read() - before


def test_saving_takes_no_second_copy(tmp_path):
    def save() -> bool:
        flat = torch.ones(NUMBERS)

        def both() -> None:
            background = writer_in(tmp_path)
            assert background.save_if_idle(1, state_of(flat))
            background._idle.wait(LIMIT_S)
            background.save_last(2, state_of(flat))

        return grown_by(both) < ROOM

    assert exit_status_of(save) == 0
    assert [c.size_bytes > BYTES for c in checkpoints_in(tmp_path)] == [True, True]


def test_a_copy_would_have_been_noticed(tmp_path):
    def copy() -> bool:
        flat = torch.ones(NUMBERS)
        return grown_by(lambda: store.save(tmp_path, 1, writer.copied(state_of(flat)), keep=1) and None) > BYTES - ROOM

    assert exit_status_of(copy) == 0


def test_loading_takes_no_memory_beside_the_tensors_that_are_filled(tmp_path):
    flat = torch.arange(NUMBERS, dtype=torch.float32)
    store.save(tmp_path, 1, state_of(flat), keep=1)

    def read() -> bool:
        filled = torch.zeros(NUMBERS)

        def load_all() -> None:
            model = load(checkpoints_in(tmp_path)[0])["model"]
            for own, (name, saved) in zip(filled.view(12, 1000, -1), model.items(), strict=True):
                if int(name) < 2:  # mapped pages count, though the system can drop them
                    own.copy_(saved)

        return grown_by(load_all) < 2 * BYTES / 12 + ROOM and bool(
            torch.equal(filled[: NUMBERS // 6], flat[: NUMBERS // 6])
        )

    assert exit_status_of(read) == 0


def test_where_files_cannot_be_mapped_they_are_read(tmp_path, monkeypatch):
    saved = store.save(tmp_path, 1, state_of(torch.ones(NUMBERS)), keep=1)
    read = torch.load

    def unmappable(*args: Any, mmap: bool = False, **kwargs: Any) -> Any:
        if mmap:
            raise RuntimeError("unable to mmap: No such device (19)")
        return read(*args, **kwargs)

    monkeypatch.setattr(torch, "load", unmappable)
    assert load(saved)["model"]["11"].all()


def test_what_changes_while_a_checkpoint_is_completed_is_not_in_it(tmp_path, monkeypatch):
    begun, release, feed = threading.Event(), threading.Event(), store.feed

    def slowly(*args: Any, **kwargs: Any) -> None:
        begun.set()
        assert release.wait(LIMIT_S)
        feed(*args, **kwargs)

    monkeypatch.setattr(store, "feed", slowly)
    flat, log = torch.randn(NUMBERS), Log()
    expected = flat.clone()
    background = writer_in(tmp_path, log)
    assert background.save_if_idle(1, state_of(flat))
    assert begun.wait(LIMIT_S)
    assert not background.is_idle
    flat.mul_(-1.0)  # the next steps
    assert not background.save_if_idle(2, state_of(flat)), "one at a time"
    assert checkpoints_in(tmp_path) == [], "it is not complete yet"
    release.set()
    background.close()
    assert log.saved == [1]
    state = load(checkpoints_in(tmp_path)[0])
    assert torch.equal(torch.cat([part.flatten() for part in state["model"].values()]), expected)


@pytest.mark.parametrize("moment", ["while the state is written", "before its checksum is known", "before the rename"])
def test_a_kill_at_any_moment_leaves_the_checkpoint_before(tmp_path, moment):
    flat = torch.randn(NUMBERS)
    writer_in(tmp_path).save_last(1, state_of(flat))

    def die(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def save() -> bool:
        if moment == "while the state is written":
            # The fifth tensor is on its way: torch calls this after each write of the file.
            save, count = torch.save, iter(range(9))
            torch.save = lambda state, file: save(state, Dying(file, count))
        elif moment == "before its checksum is known":
            store.feed = die
        else:
            store.os.replace = die  # type: ignore[attr-defined]
        writer_in(tmp_path).save_last(2, state_of(flat + 1))
        return True

    assert exit_status_of(save) == -signal.SIGKILL
    assert any(name.endswith(".tmp") for name in files_in(tmp_path))
    found, state, problems = newest_sound(tmp_path)
    assert (found.step, problems) == (1, [])
    assert torch.equal(state["model"]["11"], flat.view(12, 1000, -1)[11])
    writer_in(tmp_path).save_last(3, state_of(flat))
    assert files_in(tmp_path) == [f"step-0000000{step}.{kind}" for step in (1, 3) for kind in ("json", "pt")]


def test_a_checksum_for_which_training_leaves_no_time_is_completed_without_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_PATIENCE_S", -1.0)
    background = writer_in(tmp_path)
    assert background.save_if_idle(1, state_of(torch.ones(NUMBERS)))
    background.close()
    assert load(checkpoints_in(tmp_path)[0])["model"]["11"].all()


class Dying:
    """A file during whose ninth write the process is killed."""

    def __init__(self, file: Any, count: Any) -> None:
        self._file, self._count = file, count

    def write(self, data: Any) -> int:
        if next(self._count, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_a_state_that_cannot_be_staged_is_reported_and_training_continues(tmp_path, monkeypatch):
    log = Log()
    background = writer_in(tmp_path, log)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full)
        assert background.save_if_idle(1, state_of(torch.ones(NUMBERS)))
    assert len(log.failed) == 1
    assert "is full (28.8 MB needed" in log.failed[0]
    assert files_in(tmp_path) == []
    assert background.is_idle
    background.save_last(2, state_of(torch.ones(NUMBERS)))
    assert log.saved == [2]


def test_a_large_state_with_an_object_in_it_is_refused_and_leaves_no_file(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        writer_in(tmp_path).save_last(1, {**state_of(torch.ones(NUMBERS)), "object": Log()})
    assert caught.value.code == "unsavable"
    assert files_in(tmp_path) == []
