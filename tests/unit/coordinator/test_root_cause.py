"""The message of a failed run: the first ten lines name the worker, the error, the step and what to do."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import msgspec
import pytest

from syncline.comms.control import Failed, Finished
from syncline.config.run import RunConfig
from syncline.coordinator.exit_diagnosis import ExitDiagnosis, out_of_memory_kills
from syncline.coordinator.membership import Membership, Policy
from syncline.coordinator.root_cause import explain_failure
from syncline.coordinator.supervision import MESSAGE_GRACE_S, Supervision
from syncline.engines.engine import Exit
from syncline.errors import CheckpointError, SynclineError, WorkerFailed
from syncline.planning.machine import Machine
from syncline.planning.plan import Plan
from syncline.planning.planner import TaskFacts, make_plan
from syncline.telemetry.run_dir import RunDir

FACTS = TaskFacts(kind="train", model="mlp", data="digits", fingerprint="", train_samples=1437)


def plan(workers: int = 3, **changes: object) -> Plan:
    return make_plan(FACTS, RunConfig(workers=workers, **changes), Machine.here())  # type: ignore[arg-type]


def supervision_of(policy: Policy = "stop", workers: int = 3, **settings: int) -> Supervision:
    return Supervision(Membership(workers, policy=policy, **settings))


def failed(
    worker_id: int, kind: str = "ValueError", message: str = "too cold", *, step: int = 7, life: int = 0
) -> Failed:
    traceback = f'Traceback (most recent call last):\n  File "my.py", line 3, in forward\n{kind}: {message}\n'
    return Failed(
        worker_id, kind, message, traceback, step, [4, 8], kind == "PeerFailed", life, is_first_step=step == 0
    )


def killed(worker_id: int, number: int = signal.SIGKILL, *, life: int = 0) -> Exit:
    return Exit(worker_id, 4000 + worker_id, None, number, life)


def error_of(supervision: Supervision, folder: Path, checkpoint: Path | None = None) -> SynclineError:
    run_dir, settings = RunDir(folder), plan(max_failures=supervision.membership.max_failures)
    return explain_failure(supervision, settings, run_dir, 7, checkpoint, ExitDiagnosis(run_dir))


def test_an_exception_comes_first_with_its_message_and_its_traceback_last(tmp_path):
    supervision = supervision_of()
    supervision.on_failed(failed(1, message="too cold\nby 3 degrees"), 0.0)
    for worker_id in (0, 2):
        supervision.on_failed(failed(worker_id, "PeerFailed", "gone"), 0.1)
    error = error_of(supervision, tmp_path)
    assert isinstance(error, WorkerFailed)
    assert error.facts == {
        "worker_id": 1, "name": "worker 1", "step": 7, "exception": "ValueError", "samples": [4, 8],
        "run_dir": str(tmp_path), "checkpoint": None, "resume_command": None,
    }  # fmt: skip
    first, second, others, resume, *traceback = str(error).splitlines()
    assert re.fullmatch(r"Worker 1 .*ValueError.* step 7.* 4, 8: too cold", first)
    assert second == "by 3 degrees"
    assert "2 other workers" in others
    assert f"{tmp_path}/logs" in resume
    assert traceback == ["", *failed(1, message="too cold\nby 3 degrees").traceback.splitlines()]


def test_a_long_message_leaves_room_for_what_to_do(tmp_path):
    supervision = supervision_of()
    supervision.on_failed(failed(1, message="\n".join(["x" * 9_000] * 100)), 0.0)
    error = error_of(supervision, tmp_path, tmp_path / "step-00000004.pt")
    head = str(error).splitlines()[:10]
    assert error.facts["resume_command"] == f"syncline resume {tmp_path}"
    assert error.facts["checkpoint"] == "step-00000004.pt"
    assert error.facts["resume_command"] in head[3]
    assert all(len(line) < 500 for line in head[:4])


def test_a_repeated_failure_says_why_no_replacement_was_started(tmp_path):
    supervision = supervision_of("shrink-and-replace")
    supervision.on_failed(failed(1), 0.0)
    supervision.on_exit(Exit(1, 4001, 1, None), 0.1)
    supervision.on_failed(failed(0), 0.2)
    assert re.search("No replacement.*worker 1.*same way", str(error_of(supervision, tmp_path)))
    supervision = supervision_of("shrink-and-replace")
    supervision.on_failed(failed(2, step=0), 0.0)
    assert re.search("No replacement.*first step", str(error_of(supervision, tmp_path)))


def test_other_failures_are_listed_after_the_root_cause(tmp_path):
    supervision = supervision_of("shrink-and-replace", max_failures=2)
    for worker_id, life in ((1, 0), (1, 1), (2, 0)):
        supervision.on_exit(killed(worker_id, life=life), 0.0)
    supervision.on_finished(Finished(0, True, {"metrics": {}}), 1.0)
    for exit in (Exit(0, 4000, 0, None), killed(1, life=2), killed(2, life=1)):
        supervision.on_exit(exit, 2.0)
    assert supervision.gave_up
    error = error_of(supervision, tmp_path)
    assert (error.facts["worker_id"], error.facts["signal"], error.facts["step"]) == (2, "SIGKILL", 7)
    lines = str(error).splitlines()
    assert lines[0].startswith("Worker 2 was killed by SIGKILL (")
    assert re.search("more than 2 processes.*saved.*--max-failures", lines[2])
    assert lines[3].count("worker 1 was killed by SIGKILL") == 2


def test_a_run_that_fails_with_its_last_worker_names_the_limit_and_claims_nothing_saved(tmp_path):
    supervision = supervision_of("shrink-and-replace", workers=1, max_failures=0)
    supervision.on_exit(killed(0), 0.0)
    message = str(error_of(supervision, tmp_path))
    assert "--max-failures" in message
    assert "saved" not in message


def test_a_process_that_the_coordinator_killed_is_reported_as_hung(tmp_path):
    supervision = supervision_of()
    for worker_id in range(3):
        supervision.heartbeats.on_start(worker_id, 0, 0.0)
    now = 0.0
    while 1 not in supervision.failures.hung:
        now += 0.2
        supervision.on_tick(now)
        assert now < 200
    supervision.on_exit(killed(1), now)
    error = error_of(supervision, tmp_path)
    assert "120 s" in error.facts["hung"]
    assert str(error).startswith(f"Worker 1 {error.facts['hung']}")
    assert "SIGKILL" not in str(error)


@pytest.mark.parametrize(
    ("cause", "advice"),
    [
        (failed(1, "MemoryError", "MemoryError"), "smaller --batch"),
        (failed(1, "OutOfMemoryError", "CUDA out of memory"), "smaller --batch"),
        (failed(1, "RuntimeError", "DefaultCPUAllocator: can't allocate memory: you"), "smaller --batch"),
        (failed(1, "ModuleNotFoundError", "No module named 'x'", step=0), "PYTHONPATH"),
        (failed(1, "SystemExit", "3"), "sys.exit"),
        (killed(1), "dmesg"),
        (killed(1, signal.SIGSEGV), "native code"),
        (killed(1, signal.SIGBUS), "/dev/shm"),
        (Exit(1, 4001, 3, None), "os._exit"),
    ],
)
def test_advice_follows_directly_after_the_failure(tmp_path, monkeypatch, cause, advice):
    monkeypatch.setattr("syncline.coordinator.exit_diagnosis.out_of_memory_kills", lambda: 0)
    supervision = supervision_of()
    if isinstance(cause, Failed):
        supervision.on_failed(cause, 0.0)
    else:
        supervision.on_exit(cause, 0.0)
        supervision.on_tick(MESSAGE_GRACE_S)
    assert advice in str(error_of(supervision, tmp_path)).splitlines()[1]


def test_errors_of_our_own_keep_their_type_message_code_and_facts(tmp_path):
    supervision = supervision_of()
    full = msgspec.structs.replace(
        failed(1, "CheckpointError", "The disk is full."), code="disk-full", facts={"free_mb": 0.1}
    )
    supervision.on_failed(full, 0.0)
    error = error_of(supervision, tmp_path)
    assert (type(error), error.code, str(error)) == (CheckpointError, "disk-full", "The disk is full.")
    assert (error.facts["free_mb"], error.facts["worker_id"]) == (0.1, 1)


def test_the_end_of_the_log_is_shown_and_for_a_crash_where_python_was(tmp_path):
    log = tmp_path / "logs" / "worker-1.log"
    log.parent.mkdir()
    log.write_text("".join(f"line {i}\n" for i in range(20)))
    supervision = supervision_of()
    supervision.on_exit(killed(1, signal.SIGSEGV), 0.0)
    lines = str(error_of(supervision, tmp_path)).splitlines()
    assert str(log) in lines[1]
    assert lines[2:7] == [f"  line {i}" for i in range(15, 20)]
    with log.open("a") as file:
        file.write("Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n")
        file.write('  File "/x/torch/nn/modules/module.py", line 1 in _call_impl\n' * 2)
        file.writelines(f'  File "my.py", line {i} in f\n' for i in range(20))
    lines = str(error_of(supervision, tmp_path)).splitlines()
    assert str(log) in lines[1]
    assert lines[2:7] == [
        "  Fatal Python error: Segmentation fault",
        "  Current thread 0x1 (most recent call first):",
        *(f'    File "my.py", line {i} in f' for i in range(3)),
    ]
    assert len(lines) <= 10


def test_only_out_of_memory_kills_during_the_run_count(tmp_path, monkeypatch):
    count = [3]
    monkeypatch.setattr("syncline.coordinator.exit_diagnosis.out_of_memory_kills", lambda: count[0])
    diagnosis = ExitDiagnosis(RunDir(tmp_path))
    assert not diagnosis.was_out_of_memory(killed(1))
    assert diagnosis.describe(killed(1)).startswith("was killed by SIGKILL (not by")
    count[0] = 4
    assert diagnosis.was_out_of_memory(killed(1))
    assert re.search("SIGKILL.*out of memory: 1 kill ", diagnosis.describe(killed(1)))
    assert diagnosis.describe(killed(1, signal.SIGTERM)) == "was killed by SIGTERM"
    supervision = supervision_of()
    supervision.on_exit(killed(1), 0.0)
    error = explain_failure(supervision, plan(), RunDir(tmp_path), 7, None, diagnosis)
    assert "smaller --batch" in str(error).splitlines()[1]


@pytest.mark.parametrize(
    ("groups", "file", "text", "kills"),
    [
        ("4:memory:/jobs/7\n0::/\n", "memory/jobs/7/memory.oom_control", "oom_kill_disable 0\noom_kill 2\n", 2),
        ("9:cpu,memory:/docker/abc\n", "memory/memory.oom_control", "under_oom 0\noom_kill 1\n", 1),
        ("0::/user.slice/run-7.scope\n", "user.slice/run-7.scope/memory.events", "low 0\noom 1\noom_kill 5\n", 5),
        ("0::/\n", "memory.events", "oom_kill 0\n", 0),
        ("0::/\n", "memory.events", "low 0\n", None),
        ("4:memory:/\n", "nothing", "", None),
        ("", "nothing", "", None),
    ],
)
def test_both_versions_of_control_groups_are_read(tmp_path, groups, file, text, kills):
    own = tmp_path / "own"
    own.write_text(groups)
    (tmp_path / "root" / file).parent.mkdir(parents=True)
    (tmp_path / "root" / file).write_text(text)
    assert out_of_memory_kills(own, tmp_path / "root") == kills
    assert out_of_memory_kills(tmp_path / "missing", tmp_path / "root") is None
