"""Run directories that another user made or tampered with: what runs code refuses them, and what reads takes care."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
from contextlib import closing
from pathlib import Path

import pytest
from other_user import NOBODY, as_nobody, needs_root, write_files
from report_runs import nobody, plan, whole_run, write_run

import syncline
from syncline import task_file
from syncline.checkpoint import store
from syncline.cli.report import report
from syncline.config.run import RunConfig
from syncline.coordinator.open_run import earlier_run
from syncline.coordinator.requests import Request, RequestBox, send_request
from syncline.data.audit import audit_file
from syncline.data.ledger import Used, encode
from syncline.data.ledger_file import put_back
from syncline.driver import _written_task
from syncline.errors import ConfigError
from syncline.observe.report.load import load
from syncline.planning.plan import Plan
from syncline.strategies.own import Own, only_our_files
from syncline.telemetry.events import to_line
from syncline.telemetry.run_dir import EventLog, RunDir
from syncline.telemetry.run_lock import DriverLock

STRATEGY = "from pathlib import Path\nPath({proof!r}).touch()\ndef Evil(): ...\n"


class Touch:
    """Pickled, it creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def ours(tmp_path: Path) -> RunDir:
    """A run of ours that could be resumed, as far as its files go."""
    run_dir = RunDir(write_run(tmp_path / "ours", whole_run(ends=False)))
    run_dir.config.write_text(json.dumps(dataclasses.asdict(RunConfig())))
    run_dir.ledger.touch()
    task_file.write(run_dir.task_file, "a task")
    store.save(run_dir.checkpoints, 3, {"step": 3}, keep=1)
    return run_dir


def refused(run: Path, **changes: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        syncline.resume(run, quiet=True, **changes)
    return caught.value


@needs_root
def test_code_that_another_users_config_or_task_names_does_not_run(tmp_path, ours):
    """The config names a Python file, and the task is a link to one that belongs to root."""
    proof = tmp_path / "proof"
    evil = tmp_path / "evil"
    config = {**dataclasses.asdict(RunConfig()), "strategy": f"{evil}/run/evil.py:Evil"}
    files = {
        "run/plan.json": json.dumps(plan()).encode(),
        "run/config.json": json.dumps(config).encode(),
        "run/evil.py": STRATEGY.format(proof=str(proof)).encode(),
        "run/task.bin": ours.task_file,
        "run/checkpoints": ours.checkpoints,
    }
    as_nobody(evil, lambda: write_files(files))
    error = refused(evil / "run")
    assert (error.code, error.facts) == ("foreign-run", {"path": str(evil / "run"), "owner": "nobody"})
    assert not proof.exists()


@needs_root
@pytest.mark.parametrize("load_it", [syncline.resume, lambda run: syncline.predict(run, [])], ids=["resume", "predict"])
def test_another_users_pickle_is_not_loaded(tmp_path, load_it):
    proof = tmp_path / "proof"
    body = pickle.dumps(Touch(proof))
    (tmp_path / "evil").mkdir()
    task_file.write(tmp_path / "good", "a task")
    good = (tmp_path / "good").read_bytes()
    sizes = (1).to_bytes(8, "little") + len(body).to_bytes(8, "little")
    head = good[: good.index(b"\0") + 1] + sizes
    task = head + b"\0" * (-len(head) % 64) + body
    files = {
        "run/plan.json": json.dumps(plan()).encode(),
        "run/config.json": json.dumps(dataclasses.asdict(RunConfig())).encode(),
        "run/task.bin": task,
    }
    as_nobody(tmp_path / "evil", lambda: write_files(files))
    with pytest.raises(ConfigError) as caught:
        load_it(tmp_path / "evil" / "run")
    assert caught.value.code == "foreign-run"
    assert not proof.exists()
    assert pickle.loads(body) is None, "and it would have run"
    assert proof.exists()


FILES = ["config.json", "plan.json", "task.bin", "events.jsonl", "ledger.jsonl", "checkpoints"]


@needs_root
@pytest.mark.parametrize("name", [*FILES, "checkpoints/step-00000003.json", "checkpoints/step-00000003.pt"])
def test_a_single_file_of_another_user_is_refused(ours, name):
    os.chown(ours.path / name, NOBODY, -1)
    with pytest.raises(ConfigError) as caught:
        store.newest_sound(RunDir.owned(ours.path).checkpoints)
    assert (caught.value.code, caught.value.facts["owner"]) == ("foreign-run", "nobody")
    assert name in caught.value.facts["path"]


@pytest.mark.parametrize("name", FILES)
def test_a_single_link_is_refused(ours, name, tmp_path):
    (ours.path / name).rename(tmp_path / "moved")
    (ours.path / name).symlink_to(tmp_path / "moved")
    with pytest.raises(ConfigError) as caught:
        RunDir.owned(ours.path)
    assert (caught.value.code, caught.value.facts) == ("linked-file", {"path": str(ours.path / name)})


def test_a_run_that_everyone_can_write_is_refused_and_the_fix_is_named(ours):
    ours.path.chmod(0o777)
    error = refused(ours.path)
    assert (error.code, error.facts) == ("writable-by-others", {"path": str(ours.path)})
    assert f"chmod o-w {ours.path}" in str(error)


def test_our_own_link_to_a_run_is_followed(ours, tmp_path):
    (tmp_path / "latest").symlink_to(ours.path)
    assert RunDir.owned(tmp_path / "latest").path == ours.path


@needs_root
def test_another_users_link_to_a_run_of_ours_is_not_followed(ours, tmp_path):
    as_nobody(tmp_path / "evil", lambda: write_files({"latest": ours.path}))
    assert refused(tmp_path / "evil" / "latest").code == "linked-file"


@needs_root
def test_resume_auto_passes_over_the_runs_of_others(ours):
    found = Plan.from_dict(plan())
    config = RunConfig(out=str(ours.path.parent), resume="auto")
    earlier = earlier_run(config, found.fingerprint)
    assert earlier is not None
    assert earlier.path == ours.path
    os.chown(ours.path, NOBODY, -1)
    assert earlier_run(config, found.fingerprint) is None


@needs_root
@pytest.mark.parametrize("where", ["planted.py", "planted"])
def test_a_saved_strategy_is_not_loaded_from_a_file_that_another_user_put_here(tmp_path, monkeypatch, where):
    proof = tmp_path / "proof"
    as_nobody(tmp_path / "evil", lambda: write_files({"planted.py": STRATEGY.format(proof=str(proof)).encode()}))
    monkeypatch.chdir(tmp_path / "evil")
    with only_our_files(), pytest.raises(ConfigError) as caught:
        Own(where, "Evil").make()
    assert (caught.value.code, caught.value.facts["owner"]) == ("foreign-run", "nobody")
    assert not proof.exists()


# --- reading what others made -----------------------------------------------------------------------------------------


@needs_root
def test_a_report_on_another_users_run_is_made_and_nothing_is_written_to_it(ours, tmp_path, monkeypatch, capsys):
    for path in (ours.path, *ours.path.rglob("*")):
        os.chown(path, NOBODY, -1)
    before = sorted(ours.path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    report([ours.path], None)
    assert "lenet" in (tmp_path / "report.html").read_text()
    assert sorted(ours.path.rglob("*")) == before
    assert audit_file(RunDir.existing(ours.path).ledger) is not None


@needs_root
@pytest.mark.parametrize("open_it", [RunDir.existing, RunDir.owned, lambda path: load([path], nobody)])
def test_a_private_run_of_another_user_is_refused_with_a_reason(tmp_path, open_it):
    def look() -> None:
        with pytest.raises(ConfigError) as caught:
            open_it(Path("run"))
        assert caught.value.code in ("unreadable-run", "foreign-run")
        assert caught.value.facts["path"] == "run"

    (tmp_path / "runs").mkdir()
    RunDir.new(tmp_path / "runs", "run", exact=True).plan.write_text("{}")
    as_nobody(tmp_path / "runs", look)


@pytest.mark.parametrize("name", ["plan.json", "events.jsonl", "ledger.jsonl", "predictions.json"])
def test_what_only_reads_a_run_follows_no_link_out_of_it(ours, tmp_path, name):
    secret = tmp_path / "secret"
    (ours.path / name).rename(secret)
    (ours.path / name).symlink_to(secret)
    with pytest.raises(ConfigError) as caught:
        load([ours.path], nobody)
    assert (caught.value.code, caught.value.facts) == ("linked-file", {"path": str(ours.path / name)})
    if name == "ledger.jsonl":
        with pytest.raises(ConfigError):
            audit_file(ours.path / name)


# --- writing ----------------------------------------------------------------------------------------------------------


def test_no_victims_file_is_overwritten_through_a_name_planted_in_a_run(ours, tmp_path):
    """The names that were used before, and could be predicted."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    pid = os.getpid()
    planted = [
        ".plan.json.tmp", ".task.bin.tmp", ".ledger.jsonl.tmp",
        f"checkpoints/.step-00000004.pt.{pid}.tmp", f"checkpoints/.step-00000004.json.{pid}.tmp",
    ]  # fmt: skip
    for name in planted:
        (ours.path / name).symlink_to(victim)
    RunDir.write(ours.plan, b"{}")
    with _written_task(ours, "a task"):  # type: ignore[arg-type]
        pass
    store.save(ours.checkpoints, 4, {"step": 4}, keep=1)
    put_back(ours.ledger, [encode(Used(1, 0, 1, [], "session.0.1")).decode()])
    assert victim.read_bytes() == b"precious"
    assert task_file.read(ours.task_file) == "a task"


@pytest.mark.parametrize("open_it", [lambda run: EventLog(run), lambda run: RunDir.owned(run.path)])
def test_no_victims_file_is_appended_to_through_a_link(ours, tmp_path, open_it):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    ours.events.unlink()
    ours.events.symlink_to(victim)
    with pytest.raises(ConfigError) as caught:
        open_it(ours)
    assert caught.value.code == "linked-file"
    assert victim.read_bytes() == b"precious"


@needs_root
def test_a_request_of_another_user_is_ignored(ours):
    with closing(DriverLock(ours.path, "session")), closing(RequestBox(ours.path)) as box:
        send_request(ours.path, Request(stop=True))
        (sent,) = (ours.path / "requests").glob("request-*.json")
        os.chown(sent, NOBODY, -1)
        assert box.poll() == []
        send_request(ours.path, Request(add=1))
        assert box.poll() == [Request(add=1)]


@needs_root
def test_no_request_is_written_to_another_users_run(tmp_path):
    run = tmp_path / "evil" / "run"
    as_nobody(tmp_path / "evil", lambda: write_files({"run/plan.json": b"{}", "run/requests/old": b""}))
    with closing(DriverLock(run, "session")), pytest.raises(ConfigError) as caught:
        send_request(run, Request(stop=True))
    assert caught.value.code == "foreign-run"


def test_events_start_on_their_own_line_after_a_crash(ours):
    whole = ours.events.read_bytes()
    ours.events.write_bytes(whole + b'{"cut')
    log = EventLog(ours)
    log.write(whole_run()[0])
    log.close()
    assert ours.events.read_bytes() == whole + b'{"cut\n' + to_line(whole_run()[0]) + b"\n"
