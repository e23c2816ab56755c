"""The report of a failure: the first ten lines say who, what, when and what to do; all else comes after, or folded."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from syncline.comms.control import Failed, Finished
from syncline.config.run import RunConfig
from syncline.coordinator.cause import explain_failure
from syncline.coordinator.evidence import Evidence, out_of_memory_kills
from syncline.coordinator.membership import Membership, Policy
from syncline.coordinator.supervision import MESSAGE_GRACE_S, Supervision
from syncline.engines.engine import Exit
from syncline.errors import CheckpointError, SynclineError, WorkerFailed
from syncline.plan.machine import Machine
from syncline.plan.plan import Plan
from syncline.plan.planner import TaskFacts, make_plan
from syncline.telemetry.run_dir import RunDir

FACTS = TaskFacts(kind="train", model="mlp", data="digits", fingerprint="", train_samples=1437)


def plan(workers: int = 3, **changes: object) -> Plan:
    return make_plan(FACTS, RunConfig(workers=workers, **changes), Machine.here(), "cpu")  # type: ignore[arg-type]


def watching(policy: Policy = "stop", workers: int = 3, **settings: int) -> Supervision:
    return Supervision(Membership(workers, policy=policy, **settings))


def failed(rank: int, kind: str = "ValueError", message: str = "too cold", *, step: int = 7, life: int = 0) -> Failed:
    traceback = f'Traceback (most recent call last):\n  File "my.py", line 3, in forward\n{kind}: {message}\n'
    return Failed(rank, kind, message, traceback, step, [4, 8], kind == "PeerLost", life, is_first_step=step == 0)


def killed(rank: int, number: int = signal.SIGKILL, *, life: int = 0) -> Exit:
    return Exit(rank, 4000 + rank, None, number, life)


def told(supervision: Supervision, folder: Path, checkpoint: Path | None = None) -> SynclineError:
    run_dir, settings = RunDir(folder), plan(most_losses=supervision.membership.most_losses)
    return explain_failure(supervision, settings, run_dir, 7, checkpoint, Evidence(run_dir))


def test_an_exception_is_told_in_a_line_with_what_it_said_and_its_traceback_comes_last(tmp_path):
    supervision = watching()
    supervision.on_failed(failed(1, message="too cold\nby 3 degrees"), 0.0)
    for rank in (0, 2):
        supervision.on_failed(failed(rank, "PeerLost", "gone"), 0.1)
    error = told(supervision, tmp_path)
    assert isinstance(error, WorkerFailed)
    assert str(error).splitlines() == [
        "Worker 1 raised ValueError at step 7, with samples 4, 8: too cold",
        "by 3 degrees",
        "The other workers ended because of it.",
        f"No checkpoint had been made. The logs are in {tmp_path}/logs.",
        "",
        "Traceback (most recent call last):",
        '  File "my.py", line 3, in forward',
        "ValueError: too cold",
        "by 3 degrees",
    ]


def test_a_long_message_leaves_room_for_what_to_do(tmp_path):
    supervision = watching()
    supervision.on_failed(failed(1, message="\n".join(["x" * 9_000] * 100)), 0.0)
    head = str(told(supervision, tmp_path, tmp_path / "step-00000004.pt")).splitlines()[:10]
    assert f"go on from it with: syncline resume {tmp_path}" in head[3]
    assert all(len(line) < 500 for line in head[:4])


def test_what_came_twice_says_why_nobody_was_put_in_its_place(tmp_path):
    supervision = watching("shrink-and-replace")
    supervision.on_failed(failed(1), 0.0)
    supervision.on_exit(Exit(1, 4001, 1, None), 0.1)
    supervision.on_failed(failed(0), 0.2)
    assert "Worker 1 failed in the same way at this step, so the run was ended" in str(told(supervision, tmp_path))
    supervision = watching("shrink-and-replace")
    supervision.on_failed(failed(2, step=0), 0.0)
    assert "It had not done a step, so the run was ended" in str(told(supervision, tmp_path))


def test_others_with_a_cause_of_their_own_are_told_apart(tmp_path):
    supervision = watching("shrink-and-replace", most_losses=2)
    for rank, life in ((1, 0), (1, 1), (2, 0)):
        supervision.on_exit(killed(rank, life=life), 0.0)
    supervision.on_finished(Finished(0, True, {"metrics": {}}), 1.0)
    for exit in (Exit(0, 4000, 0, None), killed(1, life=2), killed(2, life=1)):
        supervision.on_exit(exit, 2.0)
    assert supervision.gave_up
    lines = str(told(supervision, tmp_path)).splitlines()
    assert lines[0].startswith("Worker 2 was killed by SIGKILL (")
    assert lines[2].startswith("More than 2 processes were lost within five minutes, so the run was ended; what the")
    assert lines[3] == "Also lost: worker 1 was killed by SIGKILL, worker 1 was killed by SIGKILL."


def test_a_run_that_loses_its_last_worker_says_that_there_were_too_many_losses(tmp_path):
    supervision = watching("shrink-and-replace", workers=1, most_losses=0)
    supervision.on_exit(killed(0), 0.0)
    message = str(told(supervision, tmp_path))
    assert "More than 0 processes were lost" in message
    assert "is saved" not in message


def test_a_process_that_we_ended_was_not_killed_by_somebody_else(tmp_path):
    supervision = watching()
    for number in range(3):
        supervision.on_start(number, 0.0)
    now = 0.0
    while not supervision.why_given_up(1):
        now += 0.2
        supervision.on_tick(now)
        assert now < 200
    supervision.on_exit(killed(1), now)
    lines = str(told(supervision, tmp_path)).splitlines()
    assert lines[0] == "Worker 1 did not say a word within 120 s and was ended, after step 7."
    assert "SIGKILL" not in "".join(lines)


@pytest.mark.parametrize(
    ("cause", "advice"),
    [
        (failed(1, "MemoryError", "MemoryError"), "A smaller --batch"),
        (failed(1, "OutOfMemoryError", "CUDA out of memory"), "A smaller --batch"),
        (failed(1, "RuntimeError", "DefaultCPUAllocator: can't allocate memory: you"), "A smaller --batch"),
        (failed(1, "ModuleNotFoundError", "No module named 'x'", step=0), "put its folder into PYTHONPATH"),
        (failed(1, "SystemExit", "3"), "must not call sys.exit"),
        (killed(1), "It was not Syncline that killed it"),
        (killed(1, signal.SIGSEGV), "a crash in native code"),
        (killed(1, signal.SIGBUS), "Is /dev/shm full"),
        (Exit(1, 4001, 3, None), "It left without an exception"),
    ],
)
def test_what_to_do_stands_right_below_what_happened(tmp_path, monkeypatch, cause, advice):
    monkeypatch.setattr("syncline.coordinator.evidence.out_of_memory_kills", lambda: 0)
    supervision = watching()
    if isinstance(cause, Failed):
        supervision.on_failed(cause, 0.0)
    else:
        supervision.on_exit(cause, 0.0)
        supervision.on_tick(MESSAGE_GRACE_S)
    assert advice in str(told(supervision, tmp_path)).splitlines()[1]


def test_our_own_errors_are_told_as_they_are(tmp_path):
    supervision = watching()
    supervision.on_failed(failed(1, "CheckpointError", "The disk is full."), 0.0)
    error = told(supervision, tmp_path)
    assert isinstance(error, CheckpointError)
    assert str(error) == "The disk is full."


def test_the_last_words_of_who_died_are_told_and_of_a_crash_where_it_was(tmp_path):
    log = tmp_path / "logs" / "worker-1.log"
    log.parent.mkdir()
    log.write_text("".join(f"line {i}\n" for i in range(20)))
    supervision = watching()
    supervision.on_exit(killed(1, signal.SIGSEGV), 0.0)
    lines = str(told(supervision, tmp_path)).splitlines()
    assert lines[1:7] == [f"Its last output, in {log}:", *(f"  line {i}" for i in range(15, 20))]
    with log.open("a") as file:
        file.write("Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n")
        file.write('  File "/x/torch/nn/modules/module.py", line 1 in _call_impl\n' * 2)
        file.writelines(f'  File "my.py", line {i} in f\n' for i in range(20))
    lines = str(told(supervision, tmp_path)).splitlines()
    assert lines[1:7] == [
        f"Where it was, from {log}:",
        "  Fatal Python error: Segmentation fault",
        "  Current thread 0x1 (most recent call first):",
        *(f'    File "my.py", line {i} in f' for i in range(3)),
    ]
    assert len(lines) <= 10


def test_only_what_the_kernel_killed_during_the_run_is_evidence(tmp_path, monkeypatch):
    count = [3]
    monkeypatch.setattr("syncline.coordinator.evidence.out_of_memory_kills", lambda: count[0])
    evidence = Evidence(RunDir(tmp_path))
    assert evidence.how_it_ended(killed(1)) == "was killed by SIGKILL (no out-of-memory record)"
    count[0] = 4
    assert evidence.how_it_ended(killed(1)).startswith(
        "was killed by SIGKILL (out of memory: the kernel has ended 1 process of"
    )
    assert evidence.how_it_ended(killed(1, signal.SIGTERM)) == "was killed by SIGTERM"
    supervision = watching()
    supervision.on_exit(killed(1), 0.0)
    error = explain_failure(supervision, plan(), RunDir(tmp_path), 7, None, evidence)
    assert "A smaller --batch" in str(error).splitlines()[1]


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
