"""Whatever breaks, the first ten lines that the user reads name the true cause.

Each fault is a real one, done to a real run of the real command. What the user must read is written down once: in the
table of docs/failures.md, which has a row for each case here. Digits may differ from those in the table, and `...`
stands for anything; `names` makes sure that a row does not lose what matters.
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

from syncline.cli.main import app
from syncline.comms.control import Events
from syncline.coordinator.evidence import Evidence
from syncline.coordinator.membership import KillOne, Membership
from syncline.coordinator.supervision import Lost, Supervision
from syncline.coordinator.watch import LEAST_STUCK_S
from syncline.data.audit import audit_file
from syncline.engines.engine import Exit
from syncline.telemetry.events import Event, Progress, RunEnded, Warned, WorkerLost
from syncline.telemetry.run_dir import RunDir
from syncline.testing.faults import VARIABLE
from syncline.view.losses import Losses

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
            sys.exit("no licence for this machine")
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
    """Something that breaks. `what` is its row in the table."""

    what: str
    names: tuple[str, ...]
    fault: str = ""
    """What the task in a file does; without it, the model and data are ready-made, and `script` breaks them."""
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


ENDS = [
    Case("native code crashes", ("Worker 1", "SIGSEGV", "task.py"), "segfault", flags=("--on-loss", "stop")),
    Case("a sample that the model cannot take", ("ValueError", "out of range", "at this step"), "bad sample"),
    Case("a sample that cannot be read", ("OSError", "23.png", "sample 23"), "bad file"),
    Case("an allocation that is too large", ("RuntimeError", "can't allocate memory", "--batch"), "memory"),
    Case("the loss becomes NaN", ("nan", "worker 1", "samples", "--on-nan skip"), "nan"),
    Case("`sys.exit` in your code", ("Worker 1", "SystemExit", "no licence"), "sys.exit", flags=("--on-loss", "stop")),
    Case("an exception with a message of 10 MB", ("ValueError",), "long message", flags=("--on-loss", "stop")),
    Case("your task's file raises an exception", ("AttributeError", "Conv9d", "task.py"), "mistake in the file"),
    Case("a task that the workers cannot import", ("only_there", "PYTHONPATH"), "not importable"),
    Case("a task that cannot travel", ("cannot be sent", "pickle", "a lock"), "not picklable"),
    Case("the disk is full", ("is full", "resume"), script="fill the disk at step 60",
         flags=("--checkpoint-every-steps", "10")),
]  # fmt: skip

GOES_ON = [
    Case("a worker is killed", ("worker 1", "SIGKILL"), script="kill worker 1 at step 20"),
    Case("a worker is frozen", ("worker 1", "SIGSTOP"), script="stop worker 1 at step 20"),
    Case("an exception in one worker, once", ("worker 1", "ScriptedFault"), script="raise in worker 1 at step 20"),
    Case("`os._exit` in your code, or in a library", ("worker 1", "exit code 3"), "os._exit"),
    Case("a process that loads data is killed", ("loads data", "SIGKILL"), "loader killed"),
    Case("a server of parameters is killed", ("server 0", "SIGKILL"), script="kill server 0 at step 25",
         flags=("--strategy", "ssp", "--checkpoint-every-steps", "10")),
    Case("a worker's network is cut, with servers", ("worker 1", "network"), script="cut worker 1 at step 20",
         flags=("--strategy", "ssp")),
    Case("a worker's network is cut, with torch.distributed", ("worker 1", "network"),
         script="cut worker 1 at step 20", flags=("--collective", "process-group")),
    Case("a worker's connections break off", ("connection",), script="disconnect worker 1 at step 20",
         flags=("--collective", "process-group")),
]  # fmt: skip

BY_ITSELF = [
    "the kernel ends a worker for want of memory",
    "an exception in your own loop",
    "a checkpoint is damaged",
    "every checkpoint is damaged",
    "Ctrl-C",
    "the driver is killed",
    "a worker is stuck (see below)",
]
"""The rows of the cases that have a test of their own."""


def rows() -> dict[str, list[str]]:
    """The table: what broke, and the lines that are to be read."""
    found = re.findall(r"^\| (.+?) \| (`.+`) \|$", PAGE.partition("## What you read")[2].partition("\n## ")[0], re.M)
    return {what: re.findall(r"`([^`]+)`", lines) for what, lines in found}


def told(what: str, lines: list[str]) -> list[str]:
    """The lines that the table promises for `what`, as they really are, in this order."""
    found, rest = list[str](), lines
    for promised in rows()[what]:
        parts = [re.sub(r"\d+(\\\.\d+)?", r"[\\d.,]+", re.escape(part)) for part in promised.split("...")]
        place = next((i for i, line in enumerate(rest) if re.fullmatch(".*".join(parts), line)), None)
        assert place is not None, f"not told: {promised}\n" + "\n".join(lines)
        found.append(rest[place])
        rest = rest[place + 1 :]
    return found


def events(run_dir: Path, kind: type[Event]) -> list[Event]:
    return [e for e in RunDir(run_dir).read_events() if isinstance(e, kind)]


def assert_told_first(what: str, ran: Ran, run_dir: Path | None, *, code: int = 1) -> list[str]:
    """The first ten lines of the report say what the table promises, beginning with the first; and so do the events."""
    assert ran.code == code, ran.err
    report = ran.err.splitlines()
    found = told(what, report[:10])
    assert found[0] == report[0], "the cause comes first"
    assert "PeerLost" not in ran.err, "what the others said because of it is folded"
    assert ran.err.count("Traceback (most recent call last)") <= 1
    if run_dir is not None:
        (ended,) = events(run_dir, RunEnded)
        assert [line.rstrip() for line in ended.message.splitlines()] == [line.rstrip() for line in report]
    return found


def assert_went_on(what: str, ran: Ran, run_dir: Path) -> list[str]:
    assert ran.code == 0, ran.err
    found = told(what, ran.out.splitlines())
    audited = CliRunner().invoke(app, ["audit", str(run_dir)])
    assert audited.exit_code == 0, audited.output
    assert "committed once; 0 lost, 0 repeated" in audited.output
    assert audit_file(RunDir(run_dir).ledger).is_complete
    return found


@pytest.mark.parametrize("case", ENDS, ids=lambda case: case.what)
def test_a_run_that_ends_says_why_in_its_first_ten_lines(case, tmp_path):
    ran = case.run(tmp_path)
    has_begun = bool(ran.out)
    found = "\n".join(assert_told_first(case.what, ran, tmp_path / "runs" / "broken" if has_begun else None))
    assert not [name for name in case.names if name not in found], found
    if case.fault == "long message":
        assert len(ran.err) < 100_000
        assert re.search(
            r" \[\.\.\. 9,9\d\d,\d\d\d characters are left out here \.\.\.\] x+ and ended like that", ran.err
        )


@pytest.mark.parametrize("case", GOES_ON, ids=lambda case: case.what)
def test_a_run_that_goes_on_says_whom_it_lost_and_why(case, tmp_path):
    ran = case.run(tmp_path)
    (first, *_) = found = assert_went_on(case.what, ran, tmp_path / "runs" / "broken")
    assert not [name for name in case.names if name not in "\n".join(found)], found
    lost = [e for e in events(tmp_path / "runs" / "broken", WorkerLost) if isinstance(e, WorkerLost)]
    is_loss = not case.script.startswith("disconnect")
    assert not is_loss or first in [Losses().on_lost(e) for e in lost], "the events say the same"


def test_the_kernels_out_of_memory_killer_is_named(tmp_path):
    with memory_limit(3 * 2**29) as join:
        (tmp_path / "task.py").write_text(TASK)
        done = subprocess.run(
            [*COMMAND, "train", "task.py:task", "--batch", "10", "--epochs", "4", "--name", "broken"],
            cwd=tmp_path, env=environment({"FAULT": "out of memory"}), preexec_fn=join, timeout=WITHIN_S,
            capture_output=True, text=True,
        )  # fmt: skip
    ran = Ran(done.returncode, done.stdout, done.stderr)
    (line,) = assert_went_on("the kernel ends a worker for want of memory", ran, tmp_path / "runs" / "broken")
    assert "worker 1 was killed by SIGKILL (out of memory" in line


def test_an_exception_in_a_loop_of_the_users_own_is_told_like_any_other(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    ran = syncline(
        "run", "loop.py", "--workers", "2", "--name", "broken", "--on-loss", "stop", cwd=tmp_path, timeout_s=WITHIN_S
    )
    (line,) = assert_told_first("an exception in your own loop", ran, tmp_path / "runs" / "broken")
    assert line.startswith("Worker 1 raised KeyError at step 13, with samples ")
    assert 'loop.py", line 16, in <module>' in ran.err


def test_a_damaged_checkpoint_is_named_and_an_earlier_one_taken(tmp_path):
    run = tmp_path / "runs" / "broken"
    whole = syncline(
        "train", "mlp", "--data", "digits", "--epochs", "1", "--name", "broken", "--checkpoint-every-steps", "8",
        cwd=tmp_path, timeout_s=WITHIN_S,
    )  # fmt: skip
    assert whole.code == 0, whole.err
    *_, newest = sorted(run.glob("checkpoints/*.pt"))
    damage(newest)
    resumed = syncline("resume", "runs/broken", "--epochs", "2", cwd=tmp_path, timeout_s=WITHIN_S)
    (line,) = assert_went_on("a checkpoint is damaged", resumed, run)
    assert newest.name in line
    assert line.removeprefix("warning: ") in [e.message for e in events(run, Warned)]
    for checkpoint in run.glob("checkpoints/*.pt"):
        damage(checkpoint)
    refused = syncline("resume", "runs/broken", "--epochs", "3", cwd=tmp_path, timeout_s=WITHIN_S)
    assert_told_first("every checkpoint is damaged", refused, None)


def test_ctrl_c_says_that_all_is_saved_and_how_to_go_on(tmp_path):
    run = tmp_path / "runs" / "broken"
    with started(tmp_path) as process:
        until(lambda: is_training(run), "it does not train")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WITHIN_S)
    assert_told_first("Ctrl-C", Ran(process.returncode, out, err), run, code=130)


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
    (line,) = assert_went_on("the driver is killed", resumed, run)
    assert f"resumed at step {step:,}:" in line


def test_a_worker_whose_loop_is_stuck_is_named_while_it_still_says_that_it_lives(tmp_path):
    # Nobody is thought to be stuck for a minute, so this one is played to the pure parts with a clock of its own.
    supervision, given_out = Supervision(Membership(2)), []
    now = 0.0
    for number in (0, 1):
        supervision.on_start(number, now)
    while now < LEAST_STUCK_S + 5:
        now += 0.1
        supervision.on_sign(Events(rank=0, step=21, events=[], waits=True), now)
        supervision.on_sign(Events(rank=1, step=20, events=[]), now)
        given_out += supervision.on_tick(now)
    assert given_out == [KillOne(1)]
    (lost, *_) = supervision.on_exit(Exit(1, 4711, None, signal.SIGKILL), now)
    assert isinstance(lost, Lost)
    assert isinstance(lost.cause, Exit)
    cause = Evidence(RunDir(tmp_path)).how_it_ended(lost.cause, lost.hung)
    line = Losses(2).on_lost(
        WorkerLost(rank=1, name="worker 1", cause=cause, step=21, workers=1, is_replaced=lost.replaced)
    )
    assert told("a worker is stuck (see below)", [line]) == [line]


def test_the_table_has_a_row_for_every_case_and_no_other():
    assert sorted(rows()) == sorted([*(case.what for case in [*ENDS, *GOES_ON]), *BY_ITSELF])
    assert len(rows()) >= 12


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
        until(lambda: not (group / "cgroup.procs").read_text(), "somebody is still in the control group")
        group.rmdir()


@contextlib.contextmanager
def started(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that would take long, in runs/broken."""
    with subprocess.Popen(
        [*COMMAND, "train", "mlp", "--data", "digits", "--epochs", "100000", "--evaluate-every", "0",
         "--name", "broken"],
        cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
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
    data[len(data) // 2] ^= 255
    checkpoint.write_bytes(data)


def until(condition: Callable[[], bool], complaint: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, complaint
        threading.Event().wait(0.05)
