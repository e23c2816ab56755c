"""What a run writes is for its user alone, unless the run is shared."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from real_runs import samples, small_net

import syncline
from syncline.errors import ConfigError


@pytest.fixture(autouse=True)
def _umask():
    """One that hides nothing."""
    before = os.umask(0o002)
    yield
    os.umask(before)


def modes(run: Path) -> dict[str, int]:
    return {str(path.relative_to(run)): stat.S_IMODE(path.stat().st_mode) for path in (run, *run.rglob("*"))}


def trained(tmp_path: Path, **settings: object) -> Path:
    data = samples()
    return syncline.train(
        model=small_net(), data=data, test=data, epochs=1, batch=32, out=str(tmp_path), quiet=True, **settings
    ).run_dir


WRITTEN = {
    "plan.json", "expected.json", "config.json", "events.jsonl", "ledger.jsonl", "summary.json", "task.bin",
    "predictions.json", "logs/worker-0.log", "logs/worker-1.log",
}  # fmt: skip


@pytest.mark.slow
def test_nobody_else_can_read_what_a_run_writes(tmp_path):
    found = modes(trained(tmp_path))
    assert found.keys() >= WRITTEN
    assert any(name.endswith(".pt") for name in found)
    assert {name: mode for name, mode in found.items() if mode & 0o077} == {}


@pytest.mark.slow
def test_a_shared_run_can_be_read_by_others_except_for_the_task(tmp_path):
    found = modes(trained(tmp_path, shared=True))
    assert found.pop("task.bin") == 0o600, "nobody else can load it anyway"
    assert found.keys() >= WRITTEN - {"task.bin"}
    assert {name: mode for name, mode in found.items() if mode not in (0o755, 0o644)} == {}


def test_a_run_with_a_name_that_leaves_its_folder_creates_nothing(tmp_path):
    with pytest.raises(ConfigError) as caught:
        trained(tmp_path / "out", name="../evil")
    assert caught.value.facts["setting"] == "name"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_private_run_can_be_resumed(tmp_path):
    run = trained(tmp_path, name="run")
    assert syncline.resume(run, quiet=True, epochs=2).epochs == 2.0
    assert {name: mode for name, mode in modes(run).items() if mode & 0o077} == {}
    assert not list(run.rglob(".*"))
