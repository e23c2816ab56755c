"""Whatever breaks, the first ten lines that the user reads name the root cause.

Each fault is a real one, injected into a real run of the real command. `facts` are what the user must be shown: the
worker, the error, the step, the fix. They are checked in what the command prints and in the row of the table in
docs/failures.md, so that the wording of both can change.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from real_runs import ROOT, Ran, environment, final_state, syncline
from typer.testing import CliRunner
from warm_process import WarmCommand

from syncline.cli.main import app
from syncline.comms.control import Events
from syncline.coordinator.exit_diagnosis import ExitDiagnosis
from syncline.coordinator.heartbeats import LEAST_STUCK_S
from syncline.coordinator.membership import KillProcess, Membership
from syncline.coordinator.supervision import ReportFailure, Supervision
from syncline.data.audit import audit_file
from syncline.engines.engine import Exit
from syncline.lab.faults import VARIABLE
from syncline.telemetry.events import Event, Progress, RunEnded, WarningMessage, WorkerFailure
from syncline.telemetry.run_dir import RunDir

PAGE = (ROOT / "docs" / "failures.md").read_text()
COMMAND = [sys.executable, "-m", "syncline.cli.main"]
WITHIN_S = 90.0

TASK = """
import ctypes, os, signal, sys, threading
from pathlib import Path
import torch
import syncline

FAULT = os.environ["FAULT"]


def is_first_time():
    try:
        os.close(os.open("happened", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def take_all_memory():
    Path("/proc/self/oom_score_adj").write_text("1000")  # so that the kernel takes this process and no other
    hoard = []
    while True:
        hoard.append(bytearray(2**26))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(12, 3), 0

    def forward(self, x):
        out = self.layer(x)
        self.calls += 1
        if FAULT == "bad sample" and (x > 1e8).any():
            raise ValueError("an input is out of range")
        if FAULT == "memory" and self.calls == 9:
            torch.empty(2**50)
        if self.calls != 9 or not os.readlink("/proc/self/fd/1").endswith("worker-1.log"):
            return out
        if FAULT == "segfault":
            ctypes.string_at(0)
        if FAULT == "sys.exit":
            sys.exit("no license for this machine")
        if FAULT == "long message":
            raise ValueError("it began like this, " + 10_000_000 * "x" + " and ended like that")
        if FAULT == "nan":
            return out * float("nan")
        if FAULT == "os._exit" and is_first_time():
            os._exit(3)
        if FAULT == "out of memory" and is_first_time():
            take_all_memory()
        return out


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 103

    def __getitem__(self, index):
        if index == 23 and FAULT == "bad file":
            raise OSError("cannot read image 23.png")
        if index == 23 and FAULT == "loader killed" and is_first_time():
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((12,), index / 103), index % 3


inputs = torch.randn(103, 12, generator=torch.Generator().manual_seed(0))
if FAULT == "bad sample":
    inputs[40] = 1e9
targets = torch.arange(103) % 3
model = Net()
if FAULT == "not importable":
    sys.path.insert(0, "elsewhere")
    import only_there
    sys.path.pop(0)
    model = only_there.Net(12, 3)
if FAULT == "not picklable":
    model.lock = threading.Lock()
if FAULT == "mistake in the file":
    torch.nn.Conv9d(1, 1, 1)
task = syncline.Task(model=model, data=Data() if FAULT in ("bad file", "loader killed") else (inputs, targets))
"""

LOOP = """
import torch
import syncline
from torch.utils.data import DataLoader, TensorDataset

worker = syncline.worker()
model = torch.nn.Linear(12, 3)
model, optimizer, batches = worker.prepare(
    model,
    torch.optim.SGD(model.parameters(), lr=0.1),
    DataLoader(TensorDataset(torch.randn(103, 12), torch.arange(103) % 3), batch_size=10),
)
for epoch in range(3):
    for i, (x, y) in enumerate(batches):
        if worker.rank == 1 and epoch == 1 and i == 2:
            raise KeyError("price")
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@dataclass(frozen=True)
class Case:
    """Something that breaks. `what` is its row in the table; the first of the `facts` is in the first line."""

    what: str
    facts: tuple[str, ...]
    fault: str = ""
    """What the task's file does; without it, model and data are built in, and `script` breaks the run."""
    script: str = ""
    flags: tuple[str, ...] = ()

    def run(self, folder: Path) -> Ran:
        """The command, in a folder of its own; the run is in runs/broken."""
        (folder / "task.py").write_text(TASK)
        (folder / "elsewhere").mkdir()
        (folder / "elsewhere" / "only_there.py").write_text("import torch\nclass Net(torch.nn.Linear): pass\n")
        what = ["mlp", "--data", "digits", "--epochs", "3"]
        if self.fault:
            what = ["task.py:task", "--batch", "10", "--epochs", "4"]
        return syncline(
            "train", *what, "--workers", "2", "--name", "broken", *self.flags,
            cwd=folder, timeout_s=WITHIN_S,
            # A process that is killed cannot clear away what it has for a moment.
            env={"FAULT": self.fault, VARIABLE: self.script, "TMPDIR": str(folder)},
        )  # fmt: skip


STOP = ("--on-worker-failure", "stop")
ENDS = [
    Case("native code crashes", ("Worker 1", "SIGSEGV", "task.py", "native code"), "segfault", flags=STOP),
    Case("a sample that the model rejects", ("ValueError", "out of range", "replacement"), "bad sample"),
    Case("a sample that cannot be read", ("OSError", "23.png", "sample 23", "replacement"), "bad file"),
    Case("an allocation that is too large", ("RuntimeError", "can't allocate memory", "--batch"), "memory"),
    Case("the loss becomes NaN", ("nan", "worker 1", "step", "samples", "--on-nan skip"), "nan"),
    Case("`sys.exit` in your code", ("Worker 1", "SystemExit", "no license"), "sys.exit", flags=STOP),
    Case("an exception with a message of 10 MB", ("Worker 1", "ValueError"), "long message", flags=STOP),
    Case("your task's file raises an exception", ("task.py", "AttributeError", "Conv9d"), "mistake in the file"),
    Case("a task that the workers cannot import", ("only_there", "PYTHONPATH"), "not importable"),
    Case("a task that cannot be sent", ("cannot be sent", "pickle", "a lock"), "not picklable"),
    Case("the disk is full", ("is full", "step-", "syncline resume"), script="fill the disk at step 60",
         flags=("--checkpoint-every-steps", "10")),
]  # fmt: skip

CONTINUES = [
    Case("a worker is killed", ("worker 1", "SIGKILL"), script="kill worker 1 at step 20"),
    Case("a worker is frozen", ("worker 1", "SIGSTOP"), script="stop worker 1 at step 20"),
    Case("an exception in one worker, once", ("worker 1", "ScriptedFault"), script="raise in worker 1 at step 20"),
    Case("`os._exit` in your code, or in a library", ("worker 1", "exit code 3"), "os._exit"),
    Case("a data-loading process is killed", ("worker 0", "data loader", "SIGKILL"), "loader killed"),
    Case("a parameter server is killed", ("server 0", "SIGKILL"), script="kill server 0 at step 25",
         flags=("--strategy", "ssp", "--checkpoint-every-steps", "10")),
    Case("a worker's network is cut, with servers", ("worker 1", "network"), script="cut worker 1 at step 20",
         flags=("--strategy", "ssp")),
    Case("a worker's network is cut, with torch.distributed", ("worker 1", "network"),
         script="cut worker 1 at step 20", flags=("--collective", "process-group")),
    Case("a worker's connections are reset", ("connection",), script="disconnect worker 1 at step 20",
         flags=("--collective", "process-group")),
]  # fmt: skip

ALONE = {
    "the kernel runs out of memory": ("worker 1", "SIGKILL", "out of memory"),
    "an exception in your own loop": ("Worker 1", "KeyError", "step 13", "samples"),
    "a checkpoint is corrupt": (".pt", "corrupt", "checksum"),
    "every checkpoint is corrupt": (".pt", "corrupt", "checksum"),
    "Ctrl-C": ("Stopped after step", "saved", "syncline resume"),
    "the driver is killed": ("resumed at step",),
    "a worker is stuck (see below)": ("worker 1", "60 s"),
}
"""The facts of the cases that have a test of their own."""


def rows() -> dict[str, str]:
    """The table: what broke, and the lines to be read."""
    section = PAGE.partition("## Error messages")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| (.+?) \| (`.+`) \|$", section, re.M))


def assert_shows(facts: tuple[str, ...], lines: list[str]) -> str:
    """All facts are in these lines, and the first of them opens the message; returns the line with that one."""
    text = "\n".join(lines)
    assert not [fact for fact in facts if fact not in text], text
    return next(line for line in lines if facts[0] in line)


def events(run_dir: Path, kind: type[Event]) -> list[Event]:
    return [e for e in RunDir(run_dir).read_events() if isinstance(e, kind)]


def assert_failed(facts: tuple[str, ...], ran: Ran, run_dir: Path | None, *, code: int = 1) -> str:
    """The first ten lines of the report show these facts, the first line the cause; and so do the events."""
    assert ran.code == code, ran.err
    report = ran.err.splitlines()
    first = assert_shows(facts, report[:10])
    assert first == report[0], "the cause comes first"
    assert "PeerFailed" not in ran.err, "consequences are summarized"
    assert ran.err.count("Traceback (most recent call last)") <= 1
    if run_dir is not None:
        (ended,) = events(run_dir, RunEnded)
        assert [line.rstrip() for line in ended.message.splitlines()] == [line.rstrip() for line in report]
    return first


def assert_completed(facts: tuple[str, ...], ran: Ran, run_dir: Path) -> str:
    """The run came to its end with every sample used once, and a line of it shows these facts."""
    assert ran.code == 0, ran.err
    audited = CliRunner().invoke(app, ["audit", str(run_dir)])
    assert audited.exit_code == 0, audited.output
    assert audit_file(RunDir(run_dir).ledger).is_complete
    matching = [line for line in ran.out.splitlines() if all(fact in line for fact in facts)]
    assert matching, ran.out
    return matching[0]


@pytest.mark.parametrize("case", ENDS, ids=lambda case: case.what)
def test_a_run_that_ends_says_why_in_its_first_ten_lines(case, tmp_path):
    ran = case.run(tmp_path)
    has_begun = bool(ran.out)
    assert_failed(case.facts, ran, tmp_path / "runs" / "broken" if has_begun else None)
    if case.fault == "long message":
        assert len(ran.err) < 100_000
        assert re.search(r"9,9\d\d,\d\d\d characters.* x+ and ended like that", ran.err)


@pytest.mark.parametrize("case", CONTINUES, ids=lambda case: case.what)
def test_a_run_that_continues_says_which_worker_failed_and_why(case, tmp_path):
    ran = case.run(tmp_path)
    line = assert_completed(case.facts, ran, tmp_path / "runs" / "broken")
    failures = [e for e in events(tmp_path / "runs" / "broken", WorkerFailure) if isinstance(e, WorkerFailure)]
    if not case.script.startswith("disconnect"):
        assert any(event.name in line and event.cause in line for event in failures), "the events say the same"


def test_the_kernels_out_of_memory_killer_is_named(tmp_path):
    with memory_limit(3 * 2**29) as join:
        (tmp_path / "task.py").write_text(TASK)
        done = subprocess.run(
            [*COMMAND, "train", "task.py:task", "--batch", "10", "--epochs", "4", "--name", "broken"],
            cwd=tmp_path, env=environment({"FAULT": "out of memory"}), preexec_fn=join, timeout=WITHIN_S,
            capture_output=True, text=True,
        )  # fmt: skip
    ran = Ran(done.returncode, done.stdout, done.stderr)
    assert_completed(ALONE["the kernel runs out of memory"], ran, tmp_path / "runs" / "broken")


def test_an_exception_in_a_loop_of_the_users_own_is_reported_like_any_other(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    ran = syncline(
        "run", "loop.py", "--workers", "2", "--name", "broken", *STOP,
        cwd=tmp_path, timeout_s=WITHIN_S,
    )  # fmt: skip
    assert_failed(ALONE["an exception in your own loop"], ran, tmp_path / "runs" / "broken")
    assert 'loop.py", line 16, in <module>' in ran.err


def test_a_corrupt_checkpoint_is_named_and_an_earlier_one_used(tmp_path):
    run = tmp_path / "runs" / "broken"
    whole = syncline(
        "train", "mlp", "--data", "digits", "--epochs", "1", "--name", "broken", "--checkpoint-every-steps", "8",
        cwd=tmp_path, timeout_s=WITHIN_S,
    )  # fmt: skip
    assert whole.code == 0, whole.err
    *_, newest = sorted(run.glob("checkpoints/*.pt"))
    damage(newest)
    resumed = syncline("resume", "runs/broken", "--epochs", "2", cwd=tmp_path, timeout_s=WITHIN_S)
    line = assert_completed((newest.name, *ALONE["a checkpoint is corrupt"]), resumed, run)
    assert line.removeprefix("warning: ") in [e.message for e in events(run, WarningMessage)]
    for checkpoint in run.glob("checkpoints/*.pt"):
        damage(checkpoint)
    refused = syncline("resume", "runs/broken", "--epochs", "3", cwd=tmp_path, timeout_s=WITHIN_S)
    assert_failed(ALONE["every checkpoint is corrupt"], refused, None)


def test_ctrl_c_says_that_all_is_saved_and_how_to_resume(tmp_path):
    run = tmp_path / "runs" / "broken"
    with started(tmp_path) as process:
        until(lambda: is_training(run), "it does not train")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WITHIN_S)
    assert_failed(ALONE["Ctrl-C"], Ran(process.returncode, out, err), run, code=130)


def test_after_the_driver_was_killed_the_run_is_resumed_where_the_workers_saved_it(tmp_path):
    run = tmp_path / "runs" / "broken"
    with started(tmp_path) as process:
        until(lambda: is_training(run), "it does not train")
        process.kill()
        process.communicate(timeout=WITHIN_S)
        until(lambda: not workers_of(run), "the workers do not end by themselves")
    step = final_state(run)["position"]["step"]
    resumed = syncline(
        "resume", "runs/broken", "--epochs", str(step // 23 + 2), cwd=tmp_path, timeout_s=WITHIN_S
    )  # an epoch of the digits has 23 steps
    line = assert_completed(ALONE["the driver is killed"], resumed, run)
    assert f"{step:,}" in line


def test_a_worker_whose_loop_is_stuck_is_named_although_it_sends_heartbeats(tmp_path):
    # No loop is called stuck within a minute, so the pure parts are played with a clock of their own.
    supervision, instructions = Supervision(Membership(2)), []
    now = 0.0
    for worker_id in (0, 1):
        supervision.heartbeats.on_start(worker_id, 0, now)
    while now < LEAST_STUCK_S + 5:
        now += 0.1
        supervision.heartbeats.on_heartbeat(Events(worker_id=0, step=21, events=[], waits=True), now)
        supervision.heartbeats.on_heartbeat(Events(worker_id=1, step=20, events=[]), now)
        instructions += supervision.on_tick(now)
    assert instructions == [KillProcess(1)]
    (report, *_) = supervision.on_exit(Exit(1, 4711, None, signal.SIGKILL), now)
    assert isinstance(report, ReportFailure)
    assert isinstance(report.cause, Exit)
    how = ExitDiagnosis(RunDir(tmp_path)).describe(report.cause, report.hung)
    assert_shows(ALONE["a worker is stuck (see below)"], [f"worker 1 {how}"])


def test_the_table_has_a_row_for_every_case_that_shows_its_facts():
    facts = {**{case.what: case.facts for case in [*ENDS, *CONTINUES]}, **ALONE}
    assert sorted(rows()) == sorted(facts)
    for what, row in rows().items():
        assert not [fact for fact in facts[what] if fact not in row], what


# Helpers


@contextlib.contextmanager
def memory_limit(most_bytes: int) -> Iterator[Callable[[], None]]:
    """A control group inside this process's own, with so much memory; what it gives puts a new process into it."""
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    first = {path: "memory" for _, controllers, path in groups if controllers == "memory"}
    unified = {path: "" for _, controllers, path in groups if not controllers}
    parent, mount = next(iter((first or unified).items()), ("", ""))
    group = Path("/sys/fs/cgroup", mount, parent.lstrip("/"), f"syncline-test-{os.getpid()}")
    limits = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if first else ("memory.max", "memory.swap.max")
    try:
        group.mkdir()
        (group / limits[0]).write_text(str(most_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"a control group with a limit of memory needs privileges: {error}")
    with contextlib.suppress(OSError):  # without it, what is too much is swapped out first
        (group / limits[1]).write_text(str(most_bytes) if first else "0")
    try:
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        until(lambda: not (group / "cgroup.procs").read_text(), "a process is still in the control group")
        group.rmdir()


@contextlib.contextmanager
def started(folder: Path) -> Iterator[WarmCommand]:
    """A run that would take long, in runs/broken."""
    with WarmCommand(
        "-m", "syncline.cli.main", "train", "mlp", "--data", "digits", "--epochs", "100000", "--evaluate-every", "0",
        "--name", "broken", cwd=folder, env=environment(),
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def is_training(run_dir: Path) -> bool:
    return (run_dir / "events.jsonl").exists() and bool(events(run_dir, Progress))


def workers_of(run_dir: Path) -> list[str]:
    """The processes that write to the run's logs."""
    logs, found = str((run_dir / "logs").resolve()), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone
            if os.readlink(process / "fd" / "1").startswith(logs):
                found.append(process.name)
    return found


def damage(checkpoint: Path) -> None:
    data = bytearray(checkpoint.read_bytes())
    data[len(data) // 2] = (data[len(data) // 2] + 1) % 256  # damaged twice, it is still damaged
    checkpoint.write_bytes(data)


def until(condition: Callable[[], bool], complaint: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, complaint
        threading.Event().wait(0.05)
