"""The cost of `kill -9`: time from killing one worker to the first step without it.

Here: the same model, samples, batch and number of workers under Syncline's defaults (all-reduce, shrink-and-replace),
as a task and as a script with its own loop, and under torchrun with DDP and a checkpoint every second; all lose the
same workers at the same times. One
measurement is a *session*: a job and several kills, each some time after all workers train again. Not here:
killing, and reading Syncline's events (`lab/chaos/`), the scripts (`scripts/recovery_ddp.py`, `recovery_loop.py`).

All use the same clock. The killer records the time before it kills; the workers record it after each step. The first
step of a group without the killed worker counts. For Syncline, that is the survivors' next step. For torchrun, it is
the first step of the restarted processes, although they restart from their checkpoint; the steps redone are reported
beside it. Steps that survivors of the old group still finish count for neither. A job without such a step within a
minute is ended: the kill counts as that minute, and a new job starts for the remaining kills.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from syncline.config.run import RunConfig
from syncline.errors import Interrupted, SynclineError
from syncline.lab.bench.harness import BenchSettings, Contender, Goal, Suite
from syncline.lab.bench.overhead import Workload, as_in_a_worker, calibrate, make_workload
from syncline.lab.bench.processes import MARK, end_all, last_lines
from syncline.lab.bench.scripts.recovery_ddp import LR, MOMENTUM
from syncline.lab.chaos.interrupts import interrupt_seen
from syncline.lab.chaos.kills import Killer, KillInterval, choose_victim
from syncline.lab.chaos.processes import RunProcess, send
from syncline.lab.chaos.report import describe_times
from syncline.lab.chaos.runs import run_with_faults
from syncline.lab.chaos.score import FaultResult, Injection, Recovery, times_of
from syncline.lab.chaos.watchdog import Watchdog
from syncline.lab.statistics import quantile
from syncline.observe.state import RunState
from syncline.planning.machine import Machine
from syncline.task import Script, Task, sgd
from syncline.telemetry.events import Event, Recovered

_SEED = 0
_STEP_MS = 10.0
_BATCHES = 16
_EVERY_S = 1.0
_EVERY = KillInterval(seconds=_EVERY_S)
_WORKERS, _QUICK_WORKERS = 4, 2
_KILLS, _QUICK_KILLS = 10, 1
_LIMIT_S = 60.0
_START_LIMIT_S = 120.0
_POLL_S = 0.02
_UNLIMITED = 1_000_000
_GOAL = 0.2
_SCRIPTS = Path(__file__).parent / "scripts"
_DDP, _LOOP = _SCRIPTS / "recovery_ddp.py", _SCRIPTS / "recovery_loop.py"


@dataclass(frozen=True)
class RecoveryWorkload:
    """The training job, and a folder for its files."""

    data: Workload
    folder: Path
    workers: int = _WORKERS
    limit_s: float = _LIMIT_S
    """A kill that costs more counts as this."""


Attempt = Callable[[RecoveryWorkload, int, str], Sequence[Recovery]]
"""Called with a workload, a number of kills and a seed; the recoveries, at least one."""


def suites(settings: BenchSettings) -> Generator[Suite, None, None]:
    """The median of each session, then the 95th percentile of the same sessions. A quick session has one kill."""
    kills, workers = (_QUICK_KILLS, _QUICK_WORKERS) if settings.quick else (_KILLS, _WORKERS)
    core = min(1.0, Machine.here().cores / workers)  # the share of a core per worker
    with as_in_a_worker():
        batch = workers * calibrate(_STEP_MS * core)
    settings.say(f"Batch {batch}: a step of {workers} workers takes about {_STEP_MS:g} ms.")
    settings.say(f"Victims and kill times are drawn with seed {_SEED}, the same for all.")
    with tempfile.TemporaryDirectory(prefix="syncline-bench-") as folder:
        workload = RecoveryWorkload(make_workload(batch, _BATCHES), Path(folder), workers)
        sessions = {
            "torchrun, DDP": Sessions(under_torchrun, workload, kills, warms_up=not settings.quick),
            "syncline": Sessions(under_syncline, workload, kills, warms_up=not settings.quick),
            "syncline, own loop": Sessions(in_an_own_loop, workload, kills, warms_up=not settings.quick),
        }
        measured = {name: made.measure for name, made in sessions.items()}
        yield _suite("recovery", "the median", workload, kills, measured)
        for name, made in sessions.items():
            if made.recoveries:
                settings.say(describe(name, made.recoveries, limit_s=workload.limit_s))
        if not settings.quick:
            again = {name: made.again(0.95) for name, made in sessions.items()}
            yield _suite("recovery-p95", "the 95th percentile", workload, kills, again)


def session(attempt: Attempt, workload: RecoveryWorkload, kills: int, seed: str) -> list[Recovery]:
    """The recoveries from `kills` kills; a new job starts whenever one does not survive."""
    found: list[Recovery] = []
    while len(found) < kills:
        found += attempt(workload, kills - len(found), f"{seed} {len(found)}")
    return found


def seconds_of(recovery: Recovery, *, limit_s: float) -> float:
    """The cost of this kill; the limit if the job did not recover within it."""
    if recovery.result != "recovered" or recovery.recovered_s is None:
        return limit_s
    return recovery.recovered_s


def describe(name: str, found: Sequence[Recovery], *, limit_s: float) -> str:
    """All kills of a contender in one sentence."""
    times = times_of(seconds_of(r, limit_s=limit_s) for r in found)
    assert times is not None, "a session has a kill"
    never = sum(r.result != "recovered" for r in found)
    counted = f" (counted as {limit_s:g} s)" if never else ""
    redone = sum(r.redone for r in found)
    return (
        f"{name}: {describe_times(times)} from kill to next step; not recovered: {never}{counted}; "
        f"steps redone: {redone:,}."
    )


class Sessions:
    """One contender's sessions. Each one runs once and yields several statistics.

    The first is the warm-up of `measure`: it has one kill, which does not count. A quick bench skips it (`warms_up`).
    """

    def __init__(self, attempt: Attempt, workload: RecoveryWorkload, kills: int, *, warms_up: bool = True) -> None:
        self._attempt, self._job, self._kills, self._warms_up = attempt, workload, kills, warms_up
        self._sessions: list[list[Recovery] | Exception] = []

    def measure(self) -> float:
        """Run another session; the median of its times."""
        number = len(self._sessions)
        if number == 0 and not self._warms_up:
            self._sessions.append([])
            return 0.0
        try:
            found = session(self._attempt, self._job, self._kills if number else 1, f"{_SEED} {number}")
        except Exception as error:
            self._sessions.append(error)
            raise
        self._sessions.append(found)
        return self._quantile(found, 0.5)

    def again(self, fraction: float) -> Callable[[], float]:
        """Another quantile of the same sessions, in the same order; a failed session fails again."""
        sessions_left = iter(self._sessions)

        def measure() -> float:
            found = next(sessions_left)
            if isinstance(found, Exception):
                raise found
            return self._quantile(found, fraction)

        return measure

    @property
    def recoveries(self) -> list[Recovery]:
        """Of all sessions except the warm-up."""
        return [r for found in self._sessions[1:] if not isinstance(found, Exception) for r in found]

    def _quantile(self, found: Iterable[Recovery], fraction: float) -> float:
        return quantile([seconds_of(r, limit_s=self._job.limit_s) for r in found], fraction)


def _suite(
    name: str, which: str, workload: RecoveryWorkload, kills: int, measured: dict[str, Callable[[], float]]
) -> Suite:
    what = {
        "torchrun, DDP": f"torchrun --nproc-per-node {workload.workers} --max-restarts, DistributedDataParallel on "
        "gloo, a checkpoint every second. All workers restart; measured to their first step, even a redone one.",
        "syncline": f"syncline train --workers {workload.workers} with defaults: survivors continue, a replacement "
        "joins. Measured to the survivors' first step.",
        "syncline, own loop": f"syncline run --workers {workload.workers} of a script with its own loop, likewise.",
    }
    return Suite(
        name=name,
        measures=f"Time from kill -9 of one of {workload.workers} workers to the next step without it: an MLP "
        f"(784-256-128-10), batch {workload.data.batch}, one thread each; {which} of "
        f"{kills} kill{'s' * (kills > 1)} in a session.",
        unit="s",
        baseline="torchrun, DDP",
        contenders=tuple(Contender(name=n, measure=m, what=what[n]) for n, m in measured.items()),
        goals=tuple(Goal(contender=name, limit=_GOAL) for name in measured if name != "torchrun, DDP"),
    )


def _samples(workload: RecoveryWorkload) -> Path:
    """The samples as a file, for scripts."""
    path = workload.folder / "samples.pt"
    if not path.exists():
        torch.save((workload.data.inputs, workload.data.targets), path)
    return path


# Syncline


def under_syncline(workload: RecoveryWorkload, kills: int, seed: str) -> Sequence[Recovery]:
    """A task, as for `syncline train`."""
    data = (workload.data.inputs, workload.data.targets)
    task = Task(model="mlp", data=data, optimizer=sgd(lr=LR, momentum=MOMENTUM))
    return _recoveries(task, RunConfig(batch=workload.data.batch, epochs=_UNLIMITED), workload, kills, seed)


def in_an_own_loop(workload: RecoveryWorkload, kills: int, seed: str) -> Sequence[Recovery]:
    """A script, as for `syncline run`."""
    script = Script(str(_LOOP), (str(_samples(workload)), str(workload.data.batch)))
    return _recoveries(script, RunConfig(), workload, kills, seed)


def _recoveries(
    what: Task | Script, config: RunConfig, workload: RecoveryWorkload, kills: int, seed: str
) -> Sequence[Recovery]:
    """From a run in this process, with faults and score from `lab/chaos/`."""
    with tempfile.TemporaryDirectory(dir=workload.folder) as folder, interrupt_seen() as was_stopped:
        config = config.replace(
            workers=workload.workers, threads=1, evaluate_every=0, max_failures=_UNLIMITED, out=folder
        )
        with (
            closing(
                Killer(_EVERY, most=kills, seed=seed, only_at_full_size=True, may_kill=lambda: not was_stopped())
            ) as killer,
            closing(
                Watchdog(hang_s=workload.limit_s, limit_s=_START_LIMIT_S + 2 * kills * workload.limit_s)
            ) as watchdog,
        ):
            listener = _UntilRecovered(kills, workload.limit_s)
            score, stopped = run_with_faults(what, config, listener, watchdog, killer, (), hang_s=workload.limit_s)
        if was_stopped() or (stopped is not None and not isinstance(stopped, _Enough)):
            # Even if the run was about to end: the bench itself must stop, too.
            raise stopped or KeyboardInterrupt
    if not score.recoveries:
        raise SynclineError(f"The run ended before a worker was killed. {score.reason or ''}")
    return score.recoveries


class _Enough(Interrupted):
    """All kills are measured; ends the run."""


class _UntilRecovered:
    """Ends the run after `kills` recoveries, or when there was none for too long."""

    def __init__(self, kills: int, limit_s: float) -> None:
        self._left, self._limit_s = kills, limit_s
        self._deadline = time.monotonic() + _START_LIMIT_S

    def on_recovery(self, recovery: Recovery, number: int) -> None:
        del recovery, number
        self._left -= 1
        # Time for the replacement to join, and for the next kill: the limit for each.
        self._deadline = time.monotonic() + 2 * self._limit_s

    def on_run_event(self, state: RunState, event: Event) -> None:
        del state
        if isinstance(event, Recovered):
            return  # not yet in the run's event log, which the score is computed from
        if self._left == 0 or time.monotonic() > self._deadline:
            raise _Enough


# torchrun


class TimedStep(NamedTuple):
    """A step that a worker of a torchrun job has completed."""

    time: float
    number: int
    """Counted from the start of training, including steps before the checkpoint."""
    restarts: int
    """Restarts of the job by then."""


def under_torchrun(workload: RecoveryWorkload, kills: int, seed: str) -> Sequence[Recovery]:
    """A torchrun job whose workers this process kills."""
    with tempfile.TemporaryDirectory(dir=workload.folder) as name, _torchrun(workload, Path(name)) as process:
        folder, rng = Path(name), random.Random(seed)
        steps = folder / "steps"
        hits: list[tuple[float, RunProcess, int]] = []
        restarts, group = _await_group(process, steps, workload.workers, after=-1, limit_s=_START_LIMIT_S)
        while group and len(hits) < kills and not _ends_within(process, _EVERY_S * _EVERY.draw(rng)):
            victim = choose_victim(group, [p.pid for p in group], servers=range(0), rng=rng)
            assert victim is not None, "all of them are ready"
            now = time.time()
            if send(victim.pid, signal.SIGKILL, parent=process.pid):
                hits.append((now, victim, restarts))
            restarts, group = _await_group(process, steps, workload.workers, after=restarts, limit_s=workload.limit_s)
        if not hits:
            raise SynclineError(
                f"torchrun: no worker could be killed. Its last output:\n{last_lines(_log(folder).read_text())}"
            )
        otherwise: FaultResult = "hang" if process.poll() is None else "fatal"
        done = read_steps(steps)
        return [recovery_of(*hit, done, limit_s=workload.limit_s, otherwise=otherwise) for hit in hits]


def recovery_of(
    killed_at: float,
    victim: RunProcess,
    restarts: int,
    steps: Sequence[TimedStep],
    *,
    limit_s: float,
    otherwise: FaultResult = "hang",
) -> Recovery:
    """The recovery from a kill after `restarts` restarts; its result is `otherwise` without a later step."""
    furthest = max((s.number for s in steps if s.restarts <= restarts), default=0)
    what = f"kill worker {victim.worker_id}"
    injection = Injection(what=what, time=killed_at, worker_id=victim.worker_id, pid=victim.pid, step=furthest)
    first = min((s for s in steps if s.restarts > restarts), default=None)
    if first is None:
        return Recovery(injection=injection, result=otherwise)
    return Recovery(
        injection=injection,
        result="recovered" if first.time - killed_at <= limit_s else "hang",
        recovered_s=first.time - killed_at,
        redone=max(0, furthest - (first.number - 1)),
    )


def read_steps(folder: Path) -> list[TimedStep]:
    """All steps that the processes of a job have recorded."""
    found = []
    for file in folder.iterdir():
        restarts = int(file.name.partition("-")[0])
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # otherwise its process was killed while writing it
                at, number = line.split()
                found.append(TimedStep(float(at), int(number), restarts))
    return found


def complete_group(folder: Path, workers: int, *, after: int) -> tuple[int, list[RunProcess]]:
    """The newest group of `workers` processes after more than `after` restarts that have all completed a step.

    Its number of restarts, and the processes by rank; no processes if there is no such group.
    """
    groups: dict[int, list[RunProcess]] = {}
    for file in folder.iterdir():
        restarts, rank, pid = map(int, file.name.split("-"))
        if restarts > after and file.stat().st_size:
            groups.setdefault(restarts, []).append(RunProcess(rank, pid))
    complete = {restarts: sorted(group) for restarts, group in groups.items() if len(group) == workers}
    return max(complete.items(), default=(after, []))


def _await_group(
    process: subprocess.Popen[str], folder: Path, workers: int, *, after: int, limit_s: float
) -> tuple[int, list[RunProcess]]:
    deadline = time.monotonic() + limit_s
    while True:
        restarts, group = complete_group(folder, workers, after=after)
        if group or time.monotonic() > deadline or _ends_within(process, _POLL_S):
            return restarts, group


def _ends_within(process: subprocess.Popen[str], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


@contextmanager
def _torchrun(workload: RecoveryWorkload, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A torchrun job; all its processes end with the context."""
    mark = uuid.uuid4().hex
    (folder / "steps").mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(workload.workers)]
    launcher += ["--max-restarts", str(_UNLIMITED), "--log-dir", str(folder / "logs")]
    # Port 0: any free port, so that concurrent jobs do not clash.
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    environment = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TMPDIR": str(folder),  # torch leaves a folder for compiled code in it
        # By default, restarted processes share a store with the dead ones, find the old addresses in it and wait for
        # them until the next restart, mostly forever (github.com/pytorch/pytorch/issues/135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with _log(folder).open("w") as log:
        process = subprocess.Popen(
            [*launcher, str(_DDP), str(_samples(workload)), str(workload.data.batch), str(folder)],
            env={**os.environ, **environment, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is for the bench
        )
        try:
            yield process
        finally:
            end_all(process, mark)


def _log(folder: Path) -> Path:
    return folder / "log"
