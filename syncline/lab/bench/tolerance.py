"""Overhead of fault tolerance per step while nothing fails.

Here: one run of the built-in loop in which fault tolerance is switched off and on from step to step. Switched are: the
copy of running statistics until the step is committed; recording used samples for the ledger; the membership check, and
the check for scripted faults, in each step. Heartbeats cannot be switched: their threads run all the time, and the CPU
time of these threads is added to the steps that are on. The coordinator runs in a separate process. Not measured:
checkpoints, which every careful loop writes.

Adjacent steps of one run differ by what was switched, and little by the state of the machine. Separate runs would
differ by several percent on a shared machine.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch import nn

from syncline.comms.control import Finished, LaunchSpec
from syncline.config.run import RunConfig
from syncline.data.order import SampleOrder, Share
from syncline.lab.bench.harness import BenchSettings, Contender, Goal, Suite
from syncline.lab.bench.overhead import Workload, as_in_a_worker, calibrate, make_workload
from syncline.planning.machine import Machine
from syncline.planning.plan import Plan
from syncline.planning.planner import make_plan
from syncline.task import Task, sgd
from syncline.workers.data_progress import DataProgress
from syncline.workers.job import Job
from syncline.workers.link import Link
from syncline.workers.loop import train
from syncline.workers.session import Session
from syncline.workers.stepper import AfterUpdate, Stepper
from syncline.workers.update import Outcome

CASES = ("off", "on", "off, again")
"""The cases of the steps, in turn. One of them is there twice: its distance from itself is the noise."""

_STEP_MS = 10.0
_STEPS = 300
_WARM_UP_STEPS = 6
_SLOWEST = 0.1
"""This share of each case is dropped: the slowest steps, in which the machine did something else."""
_GOAL = 1.01
_LIMIT_S = 30.0
_NO_CHECKPOINT_S = 1e9


@dataclass(frozen=True)
class Costs:
    """The measurements of one run."""

    step_s: dict[str, float]
    """The time of a step in each case."""
    threads_s: float
    """CPU time of the heartbeat threads per step."""

    def of(self, case: str) -> float:
        """The time of a step in this case, including the heartbeat threads if it is on."""
        return self.step_s[case] + (self.threads_s if case == "on" else 0.0)


class SwitchedStepper(Stepper):
    """Takes every third step as if another worker could fail."""

    def __init__(self, session: Session, order: SampleOrder, after_update: AfterUpdate) -> None:
        super().__init__(session, order, epochs=1, after_update=after_update)
        self.progress.advance = self._advance  # type: ignore[method-assign]  # that is what is switched
        self.step_ends: list[float] = []

    @property
    def case(self) -> str:
        """The case of the current step."""
        return CASES[self.progress.position.step % len(CASES)]

    @property
    def can_be_interrupted(self) -> bool:
        """True in one case, as with several workers, although this one is alone."""
        return self.case == "on"

    def check_membership(self, step: int, *, continues: bool = False) -> None:
        """Skipped where no worker could fail."""
        if self.case == "on":
            super().check_membership(step, continues=continues)

    def _advance(self, share: Share, *, is_skipped: bool = False) -> None:
        """Advance with a ledger entry or without."""
        del is_skipped
        if self.case == "on":
            DataProgress.advance(self.progress, share)
        else:
            self.progress.position = share.after

    def update(self, share: Share, loss: float | None = None, correct: float | None = None) -> Outcome:
        """The last part of a step."""
        outcome = super().update(share, loss, correct)
        self.step_ends.append(time.perf_counter())
        return outcome


def suites(settings: BenchSettings) -> Generator[Suite, None, None]:
    """One suite, with a step of 10 ms."""
    with as_in_a_worker(), tempfile.TemporaryDirectory(prefix="syncline-bench-") as folder:
        batch = calibrate(_STEP_MS)
        settings.say(f"Batch {batch}: a step takes about {_STEP_MS:g} ms.")
        work, runs = make_workload(batch, _STEPS), list[Costs]()
        yield Suite(
            name="tolerance",
            measures=f"Time per step of an MLP with batch norm, batch {batch}, one worker, one thread, in one run of "
            f"{_STEPS} steps with fault tolerance off and on in turn.",
            unit="ms",
            baseline="off",
            contenders=(
                Contender(
                    name="off",
                    measure=lambda: _measured(work, Path(folder), runs),
                    what="Without fault tolerance.",
                ),
                Contender(
                    name="on",
                    measure=lambda: 1e3 * runs[-1].of("on"),
                    what="With defaults: heartbeats, ledger, and the state needed to repeat a step.",
                ),
                Contender(
                    name="off, again",
                    measure=lambda: 1e3 * runs[-1].of("off, again"),
                    what="The same as the first, to show the noise.",
                ),
            ),
            goals=(Goal(contender="on", limit=_GOAL),),
            rounds_per_repeat=1 if settings.quick else 4,
        )
        if runs:
            share = sum(r.threads_s for r in runs) / sum(r.step_s["off"] for r in runs)
            settings.say(f"Of that, heartbeat threads: {100 * share:.2f}% of a step.")


def _measured(work: Workload, folder: Path, runs: list[Costs]) -> float:
    gc.collect()
    with tempfile.TemporaryDirectory(dir=folder) as run_dir:
        runs.append(run(work, Path(run_dir)))
    return 1e3 * runs[-1].of("off")


def run(work: Workload, run_dir: Path) -> Costs:
    """One run of the built-in loop; its ledger is in `run_dir`."""
    task = Task(model=_Net, data=(work.inputs, work.targets), optimizer=sgd(lr=0.01, momentum=0.9)).with_defaults()
    config = RunConfig(
        workers=1, epochs=1, batch=work.batch, seed=0, threads=1, evaluate_every=0, checkpoint_every_s=_NO_CHECKPOINT_S
    )
    plan = make_plan(task.facts(), config.replace(device="cpu"), Machine.here())
    with _coordinator(plan, run_dir) as spec, closing(Link(spec, os.getpid())) as link:
        session = Session.connected(link)
        session.join_view()
        job = Job(task, session)
        job.stepper = stepper = SwitchedStepper(session, job.stepper.progress.order, job.after_update)
        job.prepare()
        before = _seconds_of_threads()
        train(job)
        threads_s = (_seconds_of_threads() - before) / work.steps
        stepper.progress.report_used()
        session.close()
        link.send(Finished(0, stopped_early=False, summary={}))
    return Costs(_mean_by_case(stepper.step_ends), threads_s)


class _Net(nn.Sequential):
    """An MLP with batch norm, whose running statistics a step changes."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(784, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 128), nn.BatchNorm1d(128), nn.ReLU(),
            nn.Linear(128, 10),
        )  # fmt: skip


def _mean_by_case(step_ends: list[float]) -> dict[str, float]:
    """The mean time of a step in each case, without the first steps and the slowest."""
    times: dict[str, list[float]] = {case: [] for case in CASES}
    for step in range(max(1, _WARM_UP_STEPS), len(step_ends)):
        times[CASES[step % len(CASES)]].append(step_ends[step] - step_ends[step - 1])
    kept = {case: sorted(found)[: max(1, round(len(found) * (1 - _SLOWEST)))] for case, found in times.items()}
    return {case: sum(found) / len(found) for case, found in kept.items()}


def _seconds_of_threads() -> float:
    """CPU time so far of the threads that talk to the coordinator: the link's and ZeroMQ's."""
    links = {str(t.native_id) for t in threading.enumerate() if t.name == "syncline-link"}
    taken = 0
    for task in Path("/proc/self/task").iterdir():
        if task.name in links or (task / "comm").read_text().startswith("ZMQ"):
            taken += int((task / "schedstat").read_text().split()[0])
    return taken / 1e9


@contextmanager
def _coordinator(plan: Plan, run_dir: Path) -> Iterator[LaunchSpec]:
    """A coordinator in a separate process, and the launch spec of its only worker."""
    process = subprocess.Popen(
        [sys.executable, "-m", "syncline.lab.bench.scripts.tolerance_coordinator", str(run_dir)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None, "PIPE"
    assert process.stdout is not None, "PIPE"
    try:
        process.stdin.write(json.dumps(plan.to_dict()) + "\n")
        process.stdin.flush()
        yield msgspec.json.decode(process.stdout.readline(), type=LaunchSpec)
        process.wait(_LIMIT_S)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
