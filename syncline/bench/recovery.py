"""What a `kill -9` costs: from the kill of one worker to the next step that is done without it.

Here: the same model, samples, batch and number of workers under Syncline as it is (all-reduce, shrink-and-replace) and
under torchrun with DDP and a checkpoint every second, both killed by the same lots. One measurement is a *session*: a
job and so many kills, one after the other, each some time after all workers are there again. Not here: the mechanism of
a kill and the reading of Syncline's events (`chaos/`), torchrun's script (`scripts/recovery_ddp.py`).

Both are measured by the same clock and in the same way. The killer notes the time before it kills, the workers note it
when a step is done; what counts is the first step of a group that the dead one is no part of. For Syncline, that is
the survivors' next step. For torchrun it is the first step of the restarted processes, though they have gone back to
their checkpoint: how many steps were done again is told beside it. Steps that survivors of the old group still finish
count for neither. A job that takes no such step within a minute is ended; the kill counts as that minute, and another
job is started for the kills that are left.
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

from syncline.bench.harness import Contender, Goal, Settings, Suite
from syncline.bench.overhead import Workload, as_in_a_worker, calibrate, make_workload
from syncline.bench.processes import MARK, end_all, last_lines
from syncline.bench.statistics import quantile
from syncline.chaos.attack import attack
from syncline.chaos.ctrl_c import ctrl_c_seen
from syncline.chaos.kills import Killer, Rhythm, choose
from syncline.chaos.limit import Limit
from syncline.chaos.processes import Process, send
from syncline.chaos.report import times_in_words
from syncline.chaos.score import Blow, Came, Recovery, times_of
from syncline.config.run import RunConfig
from syncline.errors import Interrupted, SynclineError
from syncline.plan.machine import Machine
from syncline.task import Task, sgd
from syncline.telemetry.events import Event, WentOn
from syncline.view.state import RunState

__all__ = [
    "Attempt", "Job", "Sessions", "Step", "in_words", "read_steps", "recovery_of", "seconds_of", "session", "suites",
    "under_syncline", "under_torchrun", "whole_group",
]  # fmt: skip

_SEED = 0
_STEP_MS = 10.0
_BATCHES = 16
_LR, _MOMENTUM = 0.01, 0.9
_EVERY_S = 1.0
_EVERY = Rhythm(seconds=_EVERY_S)
_WORKERS, _QUICK_WORKERS = 4, 2
_KILLS, _QUICK_KILLS = 10, 1
_LIMIT_S = 60.0
_START_LIMIT_S = 120.0
_LOOK_EVERY_S = 0.02
_ENDLESS = 1_000_000
_GOAL = 0.2
_SCRIPT = Path(__file__).parent / "scripts" / "recovery_ddp.py"


@dataclass(frozen=True)
class Job:
    """What is trained, and where files may be put."""

    work: Workload
    folder: Path
    workers: int = _WORKERS
    limit_s: float = _LIMIT_S
    """A kill that costs more than this counts as this."""


Attempt = Callable[[Job, int, str], Sequence[Recovery]]
"""Runs a job and kills up to so many of its workers by lots of this seed: what came of each, at least of one."""


def suites(settings: Settings) -> Generator[Suite, None, None]:
    """The median of each session, then the 95th percentile of the same sessions; quick ones have one kill each."""
    kills, workers = (_QUICK_KILLS, _QUICK_WORKERS) if settings.quick else (_KILLS, _WORKERS)
    core = min(1.0, Machine.here().cores / workers)  # so much of one is each worker's
    with as_in_a_worker():
        batch = workers * calibrate(_STEP_MS * core)
    settings.say(f"A step of about {_STEP_MS:g} ms with {workers} workers: a batch of {batch}.")
    settings.say(f"Whom to kill and when is drawn with seed {_SEED}, the same for all.")
    with tempfile.TemporaryDirectory(prefix="syncline-bench-") as folder:
        job = Job(make_workload(batch, _BATCHES), Path(folder), workers)
        sessions = {
            "torchrun, DDP": Sessions(under_torchrun, job, kills, warms_up=not settings.quick),
            "syncline": Sessions(under_syncline, job, kills, warms_up=not settings.quick),
        }
        measured = {name: made.measure for name, made in sessions.items()}
        yield _suite("recovery", "the median", job, kills, measured)
        for name, made in sessions.items():
            if made.settled:
                settings.say(in_words(name, made.settled, limit_s=job.limit_s))
        if not settings.quick:
            again = {name: made.again(0.95) for name, made in sessions.items()}
            yield _suite("recovery-p95", "the 95th percentile", job, kills, again)


def session(attempt: Attempt, job: Job, kills: int, seed: str) -> list[Recovery]:
    """What came of `kills` kills, in another job whenever one did not come through."""
    settled: list[Recovery] = []
    while len(settled) < kills:
        settled += attempt(job, kills - len(settled), f"{seed} {len(settled)}")
    return settled


def seconds_of(recovery: Recovery, *, limit_s: float) -> float:
    """What this kill cost; the limit if the job did not go on within it."""
    if recovery.came != "recovered" or recovery.went_on_s is None:
        return limit_s
    return recovery.went_on_s


def in_words(name: str, settled: Sequence[Recovery], *, limit_s: float) -> str:
    """All kills of a contender in a sentence."""
    times = times_of(seconds_of(r, limit_s=limit_s) for r in settled)
    assert times is not None, "there was a kill"
    never = sum(r.came != "recovered" for r in settled)
    counted = f" (counted as {limit_s:g} s)" if never else ""
    redone = sum(r.redone for r in settled)
    return (
        f"{name}: {times_in_words(times)} from a kill to the next step; never recovered: {never}{counted}; "
        f"steps done again: {redone:,}."
    )


class Sessions:
    """One contender's sessions: each is held once, and then looked at more than once.

    The first is the warm-up of `measure`: one kill is enough for that, and nothing is made of it. A quick bench does
    without (`warms_up`).
    """

    def __init__(self, attempt: Attempt, job: Job, kills: int, *, warms_up: bool = True) -> None:
        self._attempt, self._job, self._kills, self._warms_up = attempt, job, kills, warms_up
        self._held: list[list[Recovery] | Exception] = []

    def measure(self) -> float:
        """Hold another session: the median of its times."""
        number = len(self._held)
        if number == 0 and not self._warms_up:
            self._held.append([])
            return 0.0
        try:
            found = session(self._attempt, self._job, self._kills if number else 1, f"{_SEED} {number}")
        except Exception as error:
            self._held.append(error)
            raise
        self._held.append(found)
        return self._quantile(found, 0.5)

    def again(self, fraction: float) -> Callable[[], float]:
        """The same sessions in the same order, by another quantile; one that failed fails again."""
        held = iter(self._held)

        def measure() -> float:
            found = next(held)
            if isinstance(found, Exception):
                raise found
            return self._quantile(found, fraction)

        return measure

    @property
    def settled(self) -> list[Recovery]:
        """All kills but those of the warm-up."""
        return [r for found in self._held[1:] if not isinstance(found, Exception) for r in found]

    def _quantile(self, found: Iterable[Recovery], fraction: float) -> float:
        return quantile([seconds_of(r, limit_s=self._job.limit_s) for r in found], fraction)


def _suite(name: str, which: str, job: Job, kills: int, measured: dict[str, Callable[[], float]]) -> Suite:
    what = {
        "torchrun, DDP": f"torchrun --nproc-per-node {job.workers} --max-restarts, DistributedDataParallel on gloo, a "
        "checkpoint every second: all are restarted. To their first step, even if it was done before.",
        "syncline": f"syncline train --workers {job.workers} as it is: the others go on, another takes the lost one's "
        "place. To their first step without it.",
    }
    return Suite(
        name=name,
        measures=f"Time from kill -9 of one of {job.workers} workers to the next step that is done without it: an MLP "
        f"(784-256-128-10), a batch of {job.work.batch}, one thread each; {which} of "
        f"{kills} kill{'s' * (kills > 1)} in a session.",
        unit="s",
        baseline="torchrun, DDP",
        contenders=tuple(Contender(name=n, measure=m, what=what[n]) for n, m in measured.items()),
        goals=(Goal(contender="syncline", limit=_GOAL),),
    )


# Syncline


def under_syncline(job: Job, kills: int, seed: str) -> Sequence[Recovery]:
    """A run in this process, which `chaos` attacks and keeps the score of."""
    task = Task(model="mlp", data=(job.work.inputs, job.work.targets), optimizer=sgd(lr=_LR, momentum=_MOMENTUM))
    with tempfile.TemporaryDirectory(dir=job.folder) as folder, ctrl_c_seen() as was_stopped:
        config = RunConfig(
            workers=job.workers, batch=job.work.batch, epochs=_ENDLESS, threads=1, evaluate_every=0,
            most_losses=_ENDLESS, out=folder,
        )  # fmt: skip
        with (
            closing(
                Killer(_EVERY, most=kills, seed=seed, only_whole=True, may_go_on=lambda: not was_stopped())
            ) as killer,
            closing(Limit(hang_s=job.limit_s, limit_s=_START_LIMIT_S + 2 * kills * job.limit_s)) as limit,
        ):
            teller = _UntilSettled(kills, job.limit_s)
            score, stopped = attack(task, config, teller, limit, killer, (), hang_s=job.limit_s, before=0)
        if was_stopped() or (stopped is not None and not isinstance(stopped, _Enough)):
            # Also if the run was about to be ended anyway: whoever measures must hear of it.
            raise stopped or KeyboardInterrupt
    if not score.recoveries:
        raise SynclineError(f"The run ended before anybody was killed. {score.why or ''}")
    return score.recoveries


class _Enough(Interrupted):
    """Nothing more is to be learned from this run."""


class _UntilSettled:
    """Tells nobody. Ends the run when it is known what came of `kills` kills, or nothing was settled for too long."""

    def __init__(self, kills: int, limit_s: float) -> None:
        self._left, self._limit_s = kills, limit_s
        self._deadline = time.monotonic() + _START_LIMIT_S

    def settled(self, recovery: Recovery, number: int) -> None:
        """One less to wait for."""
        del recovery, number
        self._left -= 1
        # For the others to be there again, and then for the next kill. Both have the limit.
        self._deadline = time.monotonic() + 2 * self._limit_s

    def happened(self, state: RunState, event: Event) -> None:
        """Look whether it was enough."""
        del state
        if isinstance(event, WentOn):
            return  # it is written to the events of the run only after this, and the score is made from those
        if self._left == 0 or time.monotonic() > self._deadline:
            raise _Enough


# torchrun


class Step(NamedTuple):
    """A step that some worker of a torchrun job has done."""

    time: float
    number: int
    """How many steps were done with it, those before the checkpoint included."""
    restarts: int
    """How often the job had been restarted by then."""


def under_torchrun(job: Job, kills: int, seed: str) -> Sequence[Recovery]:
    """A job of its own, which is killed from here."""
    with tempfile.TemporaryDirectory(dir=job.folder) as name, _torchrun(job, Path(name)) as process:
        folder, chance = Path(name), random.Random(seed)
        steps = folder / "steps"
        hits: list[tuple[float, Process, int]] = []
        restarts, group = _await_group(process, steps, job.workers, after=-1, limit_s=_START_LIMIT_S)
        while group and len(hits) < kills and not _ends_within(process, _EVERY_S * _EVERY.draw(chance)):
            victim = choose(group, [p.pid for p in group], servers=range(0), chance=chance)
            assert victim is not None, "all of them take part"
            now = time.time()
            if send(victim.pid, signal.SIGKILL, parent=process.pid):
                hits.append((now, victim, restarts))
            restarts, group = _await_group(process, steps, job.workers, after=restarts, limit_s=job.limit_s)
        if not hits:
            raise SynclineError(
                f"torchrun: nobody could be killed. Its last words:\n{last_lines(_log(folder).read_text())}"
            )
        otherwise: Came = "hang" if process.poll() is None else "fatal"
        done = read_steps(steps)
        return [recovery_of(*hit, done, limit_s=job.limit_s, otherwise=otherwise) for hit in hits]


def recovery_of(
    killed_at: float, victim: Process, restarts: int, steps: Sequence[Step], *, limit_s: float, otherwise: Came = "hang"
) -> Recovery:
    """What came of a kill in a job that had been restarted `restarts` times by then; `otherwise` if nothing did."""
    furthest = max((s.number for s in steps if s.restarts <= restarts), default=0)
    what = f"kill worker {victim.number}"
    blow = Blow(what=what, time=killed_at, number=victim.number, pid=victim.pid, step=furthest)
    first = min((s for s in steps if s.restarts > restarts), default=None)
    if first is None:
        return Recovery(blow=blow, came=otherwise)
    return Recovery(
        blow=blow,
        came="recovered" if first.time - killed_at <= limit_s else "hang",
        went_on_s=first.time - killed_at,
        redone=max(0, furthest - (first.number - 1)),
    )


def read_steps(folder: Path) -> list[Step]:
    """All steps that the processes of a job have written down, of each process in order."""
    found = []
    for file in folder.iterdir():
        restarts = int(file.name.partition("-")[0])
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # else it was being written when its process was killed
                at, number = line.split()
                found.append(Step(float(at), int(number), restarts))
    return found


def whole_group(folder: Path, workers: int, *, after: int) -> tuple[int, list[Process]]:
    """The newest group of `workers` processes that were restarted more than `after` times and have all done a step.

    How often they were restarted, and the processes in the order of their ranks; none if there is no such group.
    """
    groups: dict[int, list[Process]] = {}
    for file in folder.iterdir():
        restarts, rank, pid = map(int, file.name.split("-"))
        if restarts > after and file.stat().st_size:
            groups.setdefault(restarts, []).append(Process(rank, pid))
    whole = {restarts: sorted(group) for restarts, group in groups.items() if len(group) == workers}
    return max(whole.items(), default=(after, []))


def _await_group(
    process: subprocess.Popen[str], folder: Path, workers: int, *, after: int, limit_s: float
) -> tuple[int, list[Process]]:
    deadline = time.monotonic() + limit_s
    while True:
        restarts, group = whole_group(folder, workers, after=after)
        if group or time.monotonic() > deadline or _ends_within(process, _LOOK_EVERY_S):
            return restarts, group


def _ends_within(process: subprocess.Popen[str], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


@contextmanager
def _torchrun(job: Job, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A job of torchrun, of which nothing is left in the end."""
    samples, mark = job.folder / "samples.pt", uuid.uuid4().hex
    if not samples.exists():
        torch.save((job.work.inputs, job.work.targets), samples)
    (folder / "steps").mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(job.workers)]
    launcher += ["--max-restarts", str(_ENDLESS), "--log-dir", str(folder / "logs")]
    # Port 0: any that is free, so that other jobs of this machine do not clash.
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    environment = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TMPDIR": str(folder),  # torch leaves a folder for compiled code there
        # By default the restarted processes share a store with the dead ones, in which they find their addresses and
        # wait for them until all are restarted again, mostly without end (github.com/pytorch/pytorch/issues/135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with _log(folder).open("w") as log:
        process = subprocess.Popen(
            [*launcher, str(_SCRIPT), str(samples), str(job.work.batch), str(folder)],
            env={**os.environ, **environment, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is for whoever measures
        )
        try:
            yield process
        finally:
            end_all(process, mark)


def _log(folder: Path) -> Path:
    return folder / "log"
