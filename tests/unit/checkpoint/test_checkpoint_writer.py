"""Saving in the background: training continues, the copy does not change, and every failure is reported."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from syncline.checkpoint import store
from syncline.checkpoint.snapshot import copied
from syncline.checkpoint.store import Checkpoint, checkpoints_in, load
from syncline.checkpoint.writer import CheckpointWriter
from syncline.errors import CheckpointError

LIMIT_S = 30.0


class Log:
    """What the writer reported."""

    def __init__(self) -> None:
        self.saved: list[int] = []
        self.failed: list[str] = []
        self.seconds: list[float] = []

    def on_saved(self, checkpoint: Checkpoint, seconds: float) -> None:
        self.saved.append(checkpoint.step)
        self.seconds.append(seconds)

    def on_failed(self, error: CheckpointError) -> None:
        self.failed.append(str(error))


class SlowDisk:
    """Stands for `store.save`; holds the first call until it is released."""

    def __init__(self) -> None:
        self.begun, self.release = threading.Event(), threading.Event()
        self.save = store.save

    def __call__(self, *args: Any, **kwargs: Any) -> Checkpoint:
        self.begun.set()
        assert self.release.wait(LIMIT_S)
        return self.save(*args, **kwargs)


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def writer_in(log: Log) -> Iterator[Callable[[Path], CheckpointWriter]]:
    opened = []

    def make(folder: Path) -> CheckpointWriter:
        opened.append(CheckpointWriter(folder, keep=3, on_saved=log.on_saved, on_failed=log.on_failed))
        return opened[-1]

    yield make
    for writer in opened:
        writer.close()


def state_of(step: int) -> dict[str, Any]:
    return {"step": step, "weight": torch.full((10,), float(step))}


def test_what_is_saved_in_the_background_is_on_disk_after_closing(tmp_path, log, writer_in):
    writer = writer_in(tmp_path)
    assert writer.save_if_idle(5, state_of(5))
    writer.close()
    assert log.saved == [5]
    assert log.seconds[0] > 0
    assert load(checkpoints_in(tmp_path)[0])["step"] == 5


def test_the_state_is_as_it_was_when_it_was_handed_over(tmp_path, writer_in, monkeypatch):
    disk = SlowDisk()
    monkeypatch.setattr(store, "save", disk)
    writer = writer_in(tmp_path)
    weight = torch.zeros(10)
    writer.save_if_idle(1, {"weight": weight, "nested": [{"same": weight}]})
    assert disk.begun.wait(LIMIT_S)
    weight.fill_(7.0)  # training continues
    disk.release.set()
    writer.close()
    state = load(checkpoints_in(tmp_path)[0])
    assert not state["weight"].any()
    assert not state["nested"][0]["same"].any()


def test_a_periodic_one_is_left_out_while_another_is_written(tmp_path, log, writer_in, monkeypatch):
    disk = SlowDisk()
    monkeypatch.setattr(store, "save", disk)
    writer = writer_in(tmp_path)
    assert writer.save_if_idle(1, state_of(1))
    assert disk.begun.wait(LIMIT_S)

    def not_even_looked_at() -> dict[str, Any]:
        raise AssertionError("the state was copied for nothing")

    assert not writer.save_if_idle(2, not_even_looked_at)
    disk.release.set()
    writer.close()
    assert log.saved == [1]


def test_the_last_one_waits_for_the_one_before_and_is_never_left_out(tmp_path, log, writer_in, monkeypatch):
    disk = SlowDisk()
    monkeypatch.setattr(store, "save", disk)
    writer = writer_in(tmp_path)
    writer.save_if_idle(1, state_of(1))
    assert disk.begun.wait(LIMIT_S)
    disk.release.set()
    writer.save_last(2, state_of(2))
    assert log.saved == [1, 2]
    assert [c.step for c in checkpoints_in(tmp_path)] == [1, 2]


def test_a_failure_in_the_background_is_reported_and_the_next_one_may_succeed(tmp_path, log, writer_in):
    folder = tmp_path / "checkpoints"
    folder.write_text("in the way")
    writer = writer_in(folder)
    reported = threading.Event()
    writer._on_failed = lambda error: (log.on_failed(error), reported.set())
    assert writer.save_if_idle(1, state_of(1))
    assert reported.wait(LIMIT_S)
    folder.unlink()
    writer.save_last(2, state_of(2))
    assert len(log.failed) == 1
    assert "could not be written" in log.failed[0]
    assert log.saved == [2]


def test_a_failure_of_the_last_one_is_raised(tmp_path, log, writer_in):
    folder = tmp_path / "checkpoints"
    folder.write_text("in the way")
    with pytest.raises(CheckpointError, match="could not be written"):
        writer_in(folder).save_last(1, state_of(1))
    assert len(log.failed) == 1


@pytest.mark.parametrize("error", [MemoryError("no memory"), RuntimeError("surprise"), OSError("odd")])
def test_whatever_goes_wrong_is_a_failure_that_is_heard_of(tmp_path, log, writer_in, monkeypatch, error):
    def fail(*args: Any, **kwargs: Any) -> Checkpoint:
        raise error

    monkeypatch.setattr(store, "save", fail)
    text = f"The checkpoint of step 1 could not be written: {type(error).__name__}: {error}"
    with pytest.raises(CheckpointError, match=text):
        writer_in(tmp_path).save_last(1, state_of(1))
    assert log.failed == [f"{text}."]


def test_what_cannot_be_saved_is_a_failure_that_names_it(tmp_path, writer_in):
    with pytest.raises(CheckpointError, match=r"it holds pathlib\.PosixPath"):
        writer_in(tmp_path).save_last(1, {"path": tmp_path})


def test_closing_again_and_again_is_harmless_and_leaves_no_thread(tmp_path, writer_in):
    writer = writer_in(tmp_path)
    writer.close()
    writer.close()
    assert "syncline-checkpoint" not in {t.name for t in threading.enumerate()}


def test_saving_after_the_end_is_not_silently_lost(tmp_path, writer_in):
    writer = writer_in(tmp_path)
    writer.close()
    with pytest.raises(AssertionError, match="The writer has ended"):
        writer.save_last(1, state_of(1))


class Pair(NamedTuple):
    first: torch.Tensor
    second: int


def test_a_copy_has_the_same_shape_and_no_shared_memory():
    tensor = torch.ones(3, requires_grad=True)
    value = {
        "list": [tensor, 1],
        "tuple": (tensor,),
        "pair": Pair(tensor, 2),
        "size": tensor.shape,
        "text": "x",
        3: None,
    }
    copy = copied(value)
    with torch.no_grad():
        tensor.fill_(5.0)
    assert copy["list"][0].tolist() == copy["tuple"][0].tolist() == copy["pair"].first.tolist() == [1.0, 1.0, 1.0]
    assert copy["pair"].second == 2
    assert copy["size"] == (3,)
    assert (copy["text"], copy[3], copy["list"][1]) == ("x", None, 1)
    assert not copy["list"][0].requires_grad


def test_a_copy_keeps_what_modules_note_about_the_version_of_their_format():
    state = nn.BatchNorm2d(3).state_dict()
    assert copied(state)._metadata == state._metadata
    assert list(copied(state)) == list(state)
