"""What fault tolerance costs per step while nothing fails.

Here: one run of the built-in loop in which it is switched off and on again every few steps. What is switched: running
statistics kept until the step counts; the account of used samples and its way into the ledger; a look for another View,
and for scripted faults, in each step. The signs of life cannot be switched: they come from threads of their own, and
the time that these take from the processor is added to the steps that are on. The coordinator is there, in a process of
its own. Not in the comparison: checkpoints, which every careful loop makes.

Steps that stand side by side in one run differ by what was switched, and little by what else the machine does: cases
that are measured one after the other differ by several percent on a machine that others use, too.
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

from syncline.bench.harness import Contender, Goal, Settings, Suite
from syncline.bench.overhead import Workload, as_in_a_worker, calibrate, make_workload
from syncline.comms.control import Finished, Ticket
from syncline.config.run import RunConfig
from syncline.data.order import SampleOrder, Share
from syncline.plan.machine import Machine
from syncline.plan.plan import Plan
from syncline.plan.planner import make_plan
from syncline.task import Task, sgd
from syncline.workers.course import Course
from syncline.workers.job import Job
from syncline.workers.link import Link
from syncline.workers.loop import train
from syncline.workers.runtime import Runtime

__all__ = ["CASES", "Costs", "SwitchedCourse", "run", "suites"]

CASES = ("off", "on", "off, again")
"""What the steps are in turn. One of them twice: how far it is from itself shows what can be told apart."""

_STEP_MS = 10.0
_STEPS = 300
_WARM_UP_STEPS = 6
_SLOWEST = 0.1
"""So much of each case is left out: those steps in which the machine did something else."""
_GOAL = 1.01
_LIMIT_S = 30.0
_NO_CHECKPOINT_S = 1e9


@dataclass(frozen=True)
class Costs:
    """What one run came to."""

    step_s: dict[str, float]
    """The time of a step in each case."""
    threads_s: float
    """What the threads that give signs of life took from the processor, for each step."""

    def of(self, case: str) -> float:
        """The time of a step, with everything that belongs to the case."""
        return self.step_s[case] + (self.threads_s if case == "on" else 0.0)


class SwitchedCourse(Course):
    """A worker's way through a run, of which every third step is taken as if somebody could be lost."""

    def __init__(self, runtime: Runtime, order: SampleOrder) -> None:
        super().__init__(runtime, order, epochs=1)
        self.step_ends: list[float] = []

    @property
    def case(self) -> str:
        """What the present step is."""
        return CASES[self.position.step % len(CASES)]

    @property
    def can_be_interrupted(self) -> bool:
        """As among others, though this worker is alone here; or never."""
        return self.case == "on"

    def look_up(self) -> None:
        """For another View, if there could be one."""
        if self.case == "on":
            super().look_up()

    def advance(self, share: Share) -> None:
        """Go on, with an account or without."""
        if self.case == "on":
            super().advance(share)
        else:
            self.position = share.after

    def tell_how_it_went_on(self) -> None:
        """The last thing that is done in a step."""
        super().tell_how_it_went_on()
        self.step_ends.append(time.perf_counter())


def suites(settings: Settings) -> Generator[Suite, None, None]:
    """A step of 10 ms."""
    with as_in_a_worker(), tempfile.TemporaryDirectory(prefix="syncline-bench-") as folder:
        batch = calibrate(_STEP_MS)
        settings.say(f"A step of about {_STEP_MS:g} ms: a batch of {batch}.")
        work, runs = make_workload(batch, _STEPS), list[Costs]()
        yield Suite(
            name="tolerance",
            measures=f"Time per step of an MLP with batch norm on a batch of {batch}, one worker, one thread, in one "
            f"run of {_STEPS} steps that are off and on in turn.",
            unit="ms",
            baseline="off",
            contenders=(
                Contender(
                    name="off",
                    measure=lambda: _measured(work, Path(folder), runs),
                    what="As if nobody could be lost.",
                ),
                Contender(
                    name="on",
                    measure=lambda: 1e3 * runs[-1].of("on"),
                    what="As it is: signs of life, ledger, what is needed to take a step back.",
                ),
                Contender(
                    name="off, again",
                    measure=lambda: 1e3 * runs[-1].of("off, again"),
                    what="The same as the first: shows the noise.",
                ),
            ),
            goals=(Goal(contender="on", limit=_GOAL),),
            rounds_per_repeat=1 if settings.quick else 4,
        )
        if runs:
            share = sum(r.threads_s for r in runs) / sum(r.step_s["off"] for r in runs)
            settings.say(f"Of it, the threads that give signs of life: {100 * share:.2f}% of a step.")


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
    plan = make_plan(task.facts(), config, Machine.here(), "cpu")
    with _coordinator(plan, run_dir) as ticket, closing(Link(ticket, os.getpid())) as link:
        runtime = Runtime.connected(link)
        runtime.enter_view()
        job = Job(task, runtime)
        job.course = course = SwitchedCourse(runtime, job.course.order)
        job.enter_view()
        before = _seconds_of_threads()
        train(job)
        threads_s = (_seconds_of_threads() - before) / work.steps
        course.tell_used()
        runtime.close()
        link.send(Finished(0, stopped_early=False, summary={}))
    return Costs(_mean_by_case(course.step_ends), threads_s)


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
    """What the threads that keep the line to the coordinator have taken from the processor: the link's and ZeroMQ's."""
    links = {str(t.native_id) for t in threading.enumerate() if t.name == "syncline-link"}
    taken = 0
    for task in Path("/proc/self/task").iterdir():
        if task.name in links or (task / "comm").read_text().startswith("ZMQ"):
            taken += int((task / "schedstat").read_text().split()[0])
    return taken / 1e9


@contextmanager
def _coordinator(plan: Plan, run_dir: Path) -> Iterator[Ticket]:
    """A coordinator in a process of its own, and the ticket of its one worker."""
    process = subprocess.Popen(
        [sys.executable, "-m", "syncline.bench.scripts.tolerance_coordinator", str(run_dir)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None, "asked for"
    assert process.stdout is not None, "asked for"
    try:
        process.stdin.write(json.dumps(plan.to_dict()) + "\n")
        process.stdin.flush()
        yield msgspec.json.decode(process.stdout.readline(), type=Ticket)
        process.wait(_LIMIT_S)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
