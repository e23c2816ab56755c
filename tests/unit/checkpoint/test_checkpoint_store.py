"""Checkpoints as files: whole or not there, trusted only after a check, and never able to run code."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import re
import signal
import subprocess
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from syncline.checkpoint import store
from syncline.checkpoint.schema import VERSION
from syncline.checkpoint.store import Checkpoint, checkpoints_in, load, newest_sound, save
from syncline.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


def state_of(step: int, numel: int = 1000) -> dict[str, Any]:
    return {
        "position": {"step": step},
        "model": {"weight": torch.full((numel,), float(step))},
        "metrics": {"loss": 0.5},
    }


def files_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def steps_in(folder: Path) -> list[int]:
    return [c.step for c in checkpoints_in(folder)]


def in_another_process(work: Callable[[], None]) -> int:
    """The exit status of a process made only for `work`."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_what_is_loaded_is_what_was_saved(folder):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "plain": [1, 2.5, None, True, "text", (1, 2), {"a": b"bytes"}],
        "brain": torch.ones(3, dtype=torch.bfloat16),
        "integer": torch.tensor(2**60),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    saved = save(folder, 412, state, keep=3)
    loaded = load(saved)
    assert saved.path == folder / "step-00000412.pt"
    assert (saved.step, saved.size_bytes, saved.version) == (412, saved.path.stat().st_size, VERSION)
    assert checkpoints_in(folder) == [saved]
    assert loaded.pop("plain") == state.pop("plain")
    torch.testing.assert_close(loaded, state, rtol=0, atol=0, equal_nan=True)
    assert loaded["channels last"].stride() == state["channels last"].stride()
    assert loaded["model"]._metadata == model.state_dict()._metadata
    nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).load_state_dict(loaded["model"])


def test_the_files_are_as_documented(folder):
    saved = save(folder, 7, state_of(7), keep=3)
    assert files_in(folder) == ["step-00000007.json", "step-00000007.pt"]
    assert json.loads(saved.path.with_suffix(".json").read_text()) == {
        "version": VERSION,
        "step": 7,
        "size_bytes": saved.path.stat().st_size,
        "sha256": hashlib.sha256(saved.path.read_bytes()).hexdigest(),
        "run_id": "",
    }


def test_the_newest_are_kept_and_older_ones_removed_whole(folder):
    for step in (1, 2, 30, 4_000):
        save(folder, step, state_of(step), keep=2)
    assert steps_in(folder) == [30, 4_000]
    assert len(files_in(folder)) == 4
    save(folder, 100_000_000, state_of(1), keep=1)  # nine digits sort before eight as text
    assert steps_in(folder) == [100_000_000]
    assert len(files_in(folder)) == 2


def test_saving_a_step_again_replaces_it(folder):
    save(folder, 5, state_of(5), keep=1)
    save(folder, 5, state_of(6), keep=1)
    (only,) = checkpoints_in(folder)
    assert load(only)["position"] == {"step": 6}


def test_unsound_later_checkpoints_do_not_push_out_the_one_just_saved(folder):
    for step in (10, 20, 30):
        save(folder, step, state_of(step), keep=3)
    for step in (20, 30):
        (folder / f"step-{step:08d}.pt").write_bytes(b"damaged")
    save(folder, 12, state_of(12), keep=2)  # the run resumed from step 10
    checkpoint, state, problems = newest_sound(folder)
    assert checkpoint.step == 12
    assert state["position"] == {"step": 12}
    assert len(problems) == 2
    assert 10 in steps_in(folder)


def test_a_truncated_checkpoint_is_refused_with_both_sizes(folder):
    saved = save(folder, 1, state_of(1), keep=3)
    whole = saved.path.read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        saved.path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=f"{length:,}.*{len(whole):,}") as caught:
            load(saved)
        assert caught.value.code == "checkpoint-truncated"
        assert caught.value.facts["path"] == str(saved.path)
        assert (caught.value.facts["size_bytes"], caught.value.facts["expected_bytes"]) == (length, len(whole))


def test_a_single_flipped_bit_anywhere_is_noticed(folder):
    saved = save(folder, 1, state_of(1, numel=10), keep=3)
    whole = bytearray(saved.path.read_bytes())
    for place in range(0, len(whole), 97):
        whole[place] ^= 4
        saved.path.write_bytes(whole)
        with pytest.raises(CheckpointError, match=r"step-00000001\.pt") as caught:
            load(saved)
        assert caught.value.code == "checkpoint-corrupt"
        whole[place] ^= 4


def test_a_missing_data_file_is_named(folder):
    saved = save(folder, 1, state_of(1), keep=3)
    saved.path.unlink()
    with pytest.raises(CheckpointError, match=r"step-00000001\.pt.*No such file or directory") as caught:
        load(saved)
    assert caught.value.code == "checkpoint-unreadable"


def test_another_version_is_refused_by_number(folder):
    saved = save(folder, 1, state_of(1), keep=3)
    manifest = saved.path.with_suffix(".json")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 99}))
    with pytest.raises(CheckpointError, match=r"step-00000001\.pt") as caught:
        load(checkpoints_in(folder)[0])
    assert caught.value.code == "checkpoint-version"
    assert caught.value.facts == {"version": 99, "supported": VERSION}


def test_the_newest_sound_one_is_found_and_each_newer_one_explained(folder):
    for step in (1, 2, 3, 4):
        save(folder, step, state_of(step), keep=9)
    (folder / "step-00000004.pt").unlink()
    (folder / "step-00000003.pt").write_bytes(b"cut")
    checkpoint, state, problems = newest_sound(folder)
    assert checkpoint.step == 2
    assert state["position"] == {"step": 2}
    assert len(problems) == 2
    assert "step-00000004.pt" in problems[0]
    assert "step-00000003.pt" in problems[1]


def test_a_sound_newest_one_has_no_problems(folder):
    save(folder, 1, state_of(1), keep=3)
    assert newest_sound(folder)[2] == []


def test_when_none_is_sound_all_reasons_are_given(folder):
    for step in (1, 2):
        save(folder, step, state_of(step), keep=9).path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step-00000002\.pt.*step-00000001\.pt") as caught:
        newest_sound(folder)
    assert caught.value.code == "no-sound-checkpoint"
    assert len(caught.value.facts["problems"]) == 2


def test_an_empty_folder_has_no_checkpoint(folder):
    with pytest.raises(CheckpointError) as caught:
        newest_sound(folder)
    assert (caught.value.code, caught.value.facts) == ("no-checkpoint", {"folder": str(folder)})
    assert checkpoints_in(folder) == []


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "null", "[]", "3", '"step"', "{}", '{"step": 1}', "\udce9",
        '{"step": "x", "size_bytes": 1, "sha256": "", "version": 2}',
        '{"step": null, "size_bytes": 1, "sha256": "", "version": 2}',
    ],
)  # fmt: skip
def test_a_manifest_that_is_none_is_passed_over(folder, text):
    save(folder, 1, state_of(1), keep=3)
    (folder / "step-00000002.json").write_bytes(text.encode(errors="surrogateescape"))
    (folder / "step-00000002.pt").write_bytes(b"")
    assert steps_in(folder) == [1]


class Evil:
    """Runs code where it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def forged(folder: Path, data: bytes) -> Checkpoint:
    """A checkpoint with a correct checksum, written by an attacker."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "step-00000009.pt"
    path.write_bytes(data)
    manifest = {"version": VERSION, "step": 9, "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path.with_suffix(".json").write_text(json.dumps(manifest))
    return checkpoints_in(folder)[-1]


@pytest.mark.parametrize("saved_by", [torch.save, lambda state, path: path.write_bytes(pickle.dumps(state, 2))])
def test_a_malicious_checkpoint_is_refused_and_runs_nothing(folder, tmp_path, saved_by):
    target = tmp_path / "proof"
    saved_by({"model": Evil(target)}, tmp_path / "evil")
    checkpoint = forged(folder, (tmp_path / "evil").read_bytes())
    with pytest.raises(CheckpointError, match="could run code"):
        load(checkpoint)
    assert not target.exists()


def test_a_refused_checkpoint_does_not_hide_a_sound_one(folder, tmp_path):
    save(folder, 1, state_of(1), keep=3)
    forged(folder, pickle.dumps(Evil(tmp_path / "proof"), 2))
    checkpoint, _, problems = newest_sound(folder)
    assert checkpoint.step == 1
    assert "could run code" in problems[0]


class Point(NamedTuple):
    x: int


@pytest.mark.parametrize(
    ("thing", "reason"),
    [
        (Path("x"), "it holds pathlib.PosixPath"),
        (Point(1), f"it holds {__name__}.Point"),
        (lambda: 1, "cannot be saved: .*lambda"),
        (open, r"it holds \w+\.open"),
    ],
)
def test_a_state_that_could_not_be_loaded_is_refused_when_it_is_saved(folder, thing, reason):
    save(folder, 1, state_of(1), keep=1)
    with pytest.raises(CheckpointError, match=r"^The state cannot be saved: ") as caught:
        save(folder, 2, {"thing": thing}, keep=1)
    assert re.search(reason, str(caught.value))
    assert steps_in(folder) == [1]
    assert len(files_in(folder)) == 2


def test_a_crash_between_data_and_manifest_leaves_no_checkpoint_and_the_next_save_clears_up(folder):
    save(folder, 1, state_of(1), keep=3)

    def save_and_die() -> None:
        rename = os.replace

        def rename_data_only(source: Path, target: Path) -> None:
            if target.suffix == ".json":
                os.kill(os.getpid(), signal.SIGKILL)
            rename(source, target)

        store.os.replace = rename_data_only  # type: ignore[attr-defined]
        save(folder, 2, state_of(2), keep=3)

    assert in_another_process(save_and_die) == -signal.SIGKILL
    assert "step-00000002.pt" in files_in(folder)
    assert steps_in(folder) == [1]
    assert newest_sound(folder)[0].step == 1
    save(folder, 3, state_of(3), keep=3)
    assert files_in(folder) == [f"step-0000000{step}.{kind}" for step in (1, 3) for kind in ("json", "pt")]


def test_a_crash_while_the_data_is_written_leaves_no_checkpoint_and_the_next_save_clears_up(folder):
    save(folder, 1, state_of(1), keep=3)

    def save_and_die() -> None:
        store.os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[attr-defined]
        save(folder, 1, state_of(2), keep=3)

    assert in_another_process(save_and_die) == -signal.SIGKILL
    assert any(name.endswith(".tmp") for name in files_in(folder))
    assert newest_sound(folder)[1]["position"] == {"step": 1}
    save(folder, 3, state_of(3), keep=3)
    assert files_in(folder) == [f"step-0000000{step}.{kind}" for step in (1, 3) for kind in ("json", "pt")]


@pytest.mark.parametrize("fails_at", [1, 2])
@pytest.mark.parametrize("step", [1, 2])
def test_a_full_disk_is_explained_and_leaves_the_earlier_checkpoint_and_nothing_else(
    folder, monkeypatch, fails_at, step
):
    save(folder, 1, state_of(1), keep=3)
    before = files_in(folder)
    calls = 0

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == fails_at:  # the first is for the data, the second for the manifest
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(
        CheckpointError, match=r"the disk of .* is full \(0\.0 MB needed, .* MB free\)\. Earlier checkpoints are intact"
    ):
        save(folder, step, state_of(9), keep=3)
    assert files_in(folder) == before
    assert newest_sound(folder)[1]["position"] == {"step": 1}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of one megabyte."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mounted)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system is not possible here")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def test_on_a_really_full_disk_the_earlier_checkpoint_survives_and_space_can_be_used_again(small_disk):
    folder = small_disk / "checkpoints"
    save(folder, 1, state_of(1), keep=3)
    with pytest.raises(
        CheckpointError, match=r"is full \(4\.0 MB needed, [01]\.\d MB free\)\. Earlier checkpoints are intact"
    ):
        save(folder, 2, state_of(2, numel=1_000_000), keep=3)
    assert files_in(folder) == ["step-00000001.json", "step-00000001.pt"]
    save(folder, 3, state_of(3, numel=100_000), keep=3)
    assert newest_sound(folder)[0].step == 3


def test_a_folder_that_cannot_be_made_is_explained(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(CheckpointError, match=r"could not be written: Not a directory"):
        save(tmp_path / "run" / "checkpoints", 1, state_of(1), keep=3)


def test_an_old_checkpoint_that_cannot_be_removed_does_not_make_the_new_one_fail(folder, monkeypatch):
    save(folder, 1, state_of(1), keep=1)

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert save(folder, 2, state_of(2), keep=1).step == 2
    monkeypatch.undo()
    assert newest_sound(folder)[0].step == 2


def test_a_plain_ordered_dictionary_survives(folder):
    assert load(save(folder, 1, {"a": OrderedDict(b=1)}, keep=1)) == {"a": OrderedDict(b=1)}
