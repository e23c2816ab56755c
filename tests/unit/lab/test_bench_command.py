"""`syncline bench` as a whole, with simulated suites, and small versions of the real ones.

No test asserts a duration: measuring is the bench's job.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from syncline.cli.main import app
from syncline.errors import ConfigError, Interrupted, SynclineError, UnknownName
from syncline.lab.bench import command, overhead, processes, startup, suites
from syncline.lab.bench.harness import BenchSettings, Contender, Suite, measure
from syncline.lab.bench.report import Report, as_dict

ROOT = Path(__file__).parents[3]


def suite(name: str, *contenders: Contender) -> Suite:
    return Suite(name=name, measures="A thing.", unit="s", contenders=contenders, baseline=contenders[0].name)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Suite]]:
    """Suites to be filled in by the test, by name, in place of the real ones."""
    made: dict[str, list[Suite]] = {}

    def prepare(name: str, settings: BenchSettings) -> Iterator[Suite]:
        yield from made[name]

    monkeypatch.setattr(command, "prepare", prepare)
    monkeypatch.setattr(suites, "SUITES", {name: suites.SUITES[name] for name in ("startup", "overhead")})
    return made


def steady(name: str, value: float = 1.0) -> Contender:
    return Contender(name=name, measure=lambda: value)


def failing(name: str, error: BaseException) -> Contender:
    def fail() -> float:
        raise error

    return Contender(name=name, measure=fail)


def test_all_suites_are_measured_and_written_unless_some_are_named(scripted, tmp_path: Path, capsys) -> None:
    scripted.update({"startup": [suite("one", steady("a"))], "overhead": [suite("two", steady("a"), steady("b", 2.0))]})
    command.bench([], repeats=1, out=tmp_path)
    data = json.loads((tmp_path / "bench.json").read_text())
    assert [s["name"] for s in data["suites"]] == ["one", "two"]
    out, err = capsys.readouterr()
    assert "2.000 (2.000–2.000)" in out
    assert "two, round 1 of 1: a 1 s, b 2 s" in err, "progress goes to stderr, the report to stdout"
    command.bench(["overhead"], repeats=1, out=tmp_path)
    assert [s["name"] for s in json.loads((tmp_path / "bench.json").read_text())["suites"]] == ["two"]


def test_the_last_of_the_json_lines_is_the_report(scripted, tmp_path: Path, capsys) -> None:
    scripted["startup"] = [suite("one", steady("a"), steady("b", 3.0))]
    command.bench(["startup"], repeats=1, out=tmp_path, as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines] == ["measured"] * 4 + ["summary"]
    assert lines[3]["value"] == 3.0
    assert lines[-1]["suites"][0]["contenders"][1]["ratio"]["median"] == 3.0


def test_a_failing_contender_is_an_error_after_everything_else_was_measured(scripted, tmp_path: Path, capsys) -> None:
    scripted["startup"] = [suite("one", steady("a"), failing("b", OSError("no such program")))]
    scripted["overhead"] = [suite("two", steady("a"))]
    with pytest.raises(SynclineError, match=r"1 measurements? failed"):
        command.bench([], repeats=1, out=tmp_path)
    assert "one: b failed twice and was skipped. OSError: no such program" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "bench.json").read_text())["suites"]) == 2


def test_a_suite_that_cannot_be_prepared_does_not_cost_the_others(scripted, tmp_path: Path, capsys) -> None:
    scripted["overhead"] = [suite("two", steady("a"))]  # and startup is missing
    with pytest.raises(SynclineError):
        command.bench([], repeats=1, out=tmp_path)
    assert "startup could not be measured. KeyError" in capsys.readouterr().out
    assert [s["name"] for s in json.loads((tmp_path / "bench.json").read_text())["suites"]] == ["two"]


def test_ctrl_c_shows_and_writes_the_results_so_far(scripted, tmp_path: Path, capsys) -> None:
    turns = iter([1.0, 1.0])
    contender = Contender(name="b", measure=lambda: next(turns, None) or signal.raise_signal(signal.SIGINT) or 0.0)
    scripted.update({"startup": [suite("one", steady("a"), contender)], "overhead": [suite("two", steady("a"))]})
    with pytest.raises(Interrupted, match="results"):
        command.bench([], repeats=5, out=tmp_path)
    assert "Interrupted in round 2 of 5." in capsys.readouterr().out
    data = json.loads((tmp_path / "bench.json").read_text())
    assert data["is_interrupted"]
    assert [s["name"] for s in data["suites"]] == ["one"]


def test_an_unknown_suite_suggests_the_nearest_name() -> None:
    with pytest.raises(UnknownName, match=r"'overhed'.*'overhead'"):
        command.bench(["overhed"])


def test_an_unwritable_folder_is_rejected_before_measuring(scripted, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/folder"):
        command.bench([], out=tmp_path / "file" / "folder")


def test_fewer_than_one_repeat_is_rejected() -> None:
    with pytest.raises(ConfigError, match="repeats is 0"):
        command.bench([], repeats=0)


def test_the_help_names_every_suite() -> None:
    text = CliRunner().invoke(app, ["bench", "--help"]).output
    assert all(name in text for name in suites.SUITES)


def test_every_suite_can_be_found() -> None:
    for name in suites.SUITES:
        made = suites.prepare(name, BenchSettings())
        assert isinstance(made, Generator), name
        made.close()


@pytest.mark.slow
def test_the_overhead_suite_reports_both_loops_on_the_same_work() -> None:
    work = overhead.make_workload(batch=4, steps=8)
    with overhead.as_in_a_worker():
        result = measure(overhead.suite_for("tiny", work, goal=1.03), repeats=2)
    report = as_dict(Report(command.BenchMachine.here(), is_quick=True, results=[result]))
    (found,) = report["suites"]
    assert [c["name"] for c in found["contenders"]] == ["by hand", "syncline", "by hand, again"]
    for contender in found["contenders"]:
        assert not contender["failures"]
        assert len(contender["values"]) == len(contender["ratios"]) == 2
        assert all(value > 0 for value in contender["values"])
    assert found["contenders"][0]["ratios"] == [1.0, 1.0]
    assert found["goals"][0]["is_met"] in (True, False)


def test_both_loops_of_the_overhead_suite_end_with_bit_identical_parameters() -> None:
    work = overhead.make_workload(batch=8, steps=6)
    with overhead.as_in_a_worker():
        hand, ours = overhead.by_hand(work), overhead.built_in(work)
    assert len(hand.step_ends) == len(ours.step_ends) == work.steps == 6
    for mine, theirs in zip(ours.model.parameters(), hand.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_overhead_suites_restore_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "calibrate", lambda target_ms: 2)
    before = torch.get_num_threads()
    made = overhead.suites(BenchSettings())
    assert next(made).name == "overhead-10ms"
    assert torch.get_num_threads() == 1
    made.close()
    assert torch.get_num_threads() == before


def test_a_command_is_timed_to_the_first_step_that_it_reports(tmp_path: Path) -> None:
    # Rank 0's first step counts. It claims to have ended at 1000 s, which is long ago.
    lines = [
        "not JSON",
        '{"event": "progress", "worker_id": 1, "step": 1, "time": 1}',
        '{"event": "progress", "worker_id": 0, "step": 1, "time": 1000}',
        '{"event": "progress", "worker_id": 0, "step": 2, "time": 2}',
    ]
    program = f"import time; print({chr(10).join(lines)!r})"
    before = time.time()
    found = processes.time_to_first_step([sys.executable, "-c", program], environment={}, folder=tmp_path, timeout_s=60)
    assert -time.time() <= found - 1000 <= -before


def test_a_command_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(SynclineError, match=r"(?s)code 3.*alas"):
        processes.time_to_first_step(
            [sys.executable, "-c", "import sys; print('alas', file=sys.stderr); sys.exit(3)"],
            environment={}, folder=tmp_path, timeout_s=60,
        )  # fmt: skip


def test_a_command_without_a_first_step_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SynclineError, match="reported no first step"):
        processes.time_to_first_step([sys.executable, "-c", "pass"], environment={}, folder=tmp_path, timeout_s=60)


def test_a_command_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(SynclineError, match=r"0\.5 s"):
        processes.time_to_first_step(
            [sys.executable, "-c", "import time; time.sleep(99)"], environment={}, folder=tmp_path, timeout_s=0.5
        )


def test_processes_that_a_command_leaves_behind_are_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The orphan has its own session and ignores SIGTERM, so only its mark identifies it.
    monkeypatch.setattr(processes, "_GRACE_S", 0.1)
    orphan = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open('ready', 'w'); time.sleep(99)"
    program = (
        "import os, subprocess, sys, time; null = subprocess.DEVNULL; "
        f"p = subprocess.Popen([sys.executable, '-c', {orphan!r}], stdout=null, stderr=null, start_new_session=True); "
        "open('pid', 'w').write(str(p.pid)); "
        "[time.sleep(0.01) for _ in iter(lambda: os.path.exists('ready'), True)]"
    )
    with pytest.raises(SynclineError, match="reported no first step"):
        processes.time_to_first_step([sys.executable, "-c", program], environment={}, folder=tmp_path, timeout_s=60)
    pid = (tmp_path / "pid").read_text()
    assert has_ended(int(pid))


def test_a_ctrl_c_while_a_process_starts_ends_it(tmp_path: Path) -> None:
    def interrupted_start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(99)"], env={**os.environ, processes.MARK: "m"}, text=True
        )
        pids.append(process.pid)
        signal.raise_signal(signal.SIGINT)  # before the caller knows the process
        return process

    pids: list[int] = []
    with pytest.raises(KeyboardInterrupt), processes.ended_with_all_it_started("m") as start:
        start(interrupted_start)
    assert has_ended(*pids)


def test_a_real_ctrl_c_leaves_no_process_behind(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    bench = subprocess.Popen(
        [sys.executable, "-m", "syncline.cli.main", "bench", "startup", "--out", str(tmp_path / "out")],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not _children(bench.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    (child,) = _children(bench.pid)
    bench.send_signal(signal.SIGINT)
    out, err = bench.communicate(timeout=60)
    assert bench.returncode == 130
    assert "Interrupted during warm-up." in out
    assert str(tmp_path / "out") in err
    assert has_ended(child)
    assert (tmp_path / "out" / "bench.json").exists()


@pytest.mark.slow
def test_the_contenders_of_the_startup_suite_take_the_same_first_step(tmp_path: Path) -> None:
    # DDP's rank 0 knows only the loss of its own share, so compare the others.
    losses = []
    for made in (
        startup._syncline("startup_task.py", tmp_path),
        [sys.executable, str(startup._SCRIPTS / "startup_plain.py")],
    ):
        done = subprocess.run(
            made, cwd=tmp_path, env={**os.environ, **startup.environment()}, capture_output=True, text=True, check=True
        )
        events = [json.loads(line) for line in done.stdout.splitlines()]
        losses += [e["loss"] for e in events if e["event"] == "progress" and e["worker_id"] == 0 and e["step"] == 1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_torchrun_reports_its_first_step(tmp_path: Path) -> None:
    for attempt in range(3):
        try:
            took = processes.time_to_first_step(
                startup._torchrun(), environment=startup.environment(), folder=tmp_path, timeout_s=120
            )
            break
        except SynclineError as error:  # torch's own teardown aborts now and then, after the step was reported
            if attempt == 2 or "SIGABRT" not in str(error):
                raise
    assert took > 0


def has_ended(pid: int) -> bool:
    """Its parent, which may be init, may not have waited for it yet."""
    stat = Path("/proc", str(pid), "stat")
    try:
        return ") Z " in stat.read_text()
    except OSError:
        return True


def _children(pid: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text()
            except OSError:
                continue
            if int(stat.rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry))
    return found
