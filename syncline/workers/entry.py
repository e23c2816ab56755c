"""Where a worker process starts, on every engine: join the run, do its part, say how it went.

Here: `run_worker`. Not here: how the process came to be (`engines/`).
"""

from __future__ import annotations

import copy
import faulthandler
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from syncline import payload
from syncline.checkpoint import store
from syncline.comms.control import Finished, Ticket, Welcome
from syncline.errors import ConfigError, PeerLost
from syncline.plan.plan import Plan
from syncline.task import Script, Task
from syncline.telemetry.run_dir import RunDir
from syncline.workers import own_loop
from syncline.workers.allocator import keep_memory
from syncline.workers.build import build_model, build_sources, parameter_shapes
from syncline.workers.course import Course
from syncline.workers.failure import describe_failure
from syncline.workers.job import Job
from syncline.workers.link import Link
from syncline.workers.loop import train
from syncline.workers.runtime import Runtime
from syncline.workers.serve import run_server

__all__ = ["load_trained_model", "parameter_shapes", "run_worker"]

_SAMPLES_SHOWN = 8
"""How many of the samples in flight a failure names: enough to look at, and to see what they have in common."""


def run_worker(ticket: Ticket) -> int:
    """Take part in the run that `ticket` names; the process's exit code is returned."""
    link = Link(ticket, os.getpid())
    runtime: Runtime | None = None
    try:
        keep_memory()
        faulthandler.enable(all_threads=False)  # a crash in native code leaves in the log where Python was
        # Ctrl-C is the driver's to handle; a polite request to end means: save and stop at the next step.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: link.on_terminate())
        _be_where_the_driver_is(link.welcome, is_elsewhere=ticket.is_elsewhere)
        plan = Plan.from_dict(link.welcome.plan)
        if plan.is_server(link.rank):
            run_server(link, plan)
            link.send(Finished(link.rank, stopped_early=False, summary={}))
            return 0
        runtime = Runtime.connected(link)
        what = payload.read(Path(link.files.payload_path))
        stopped_early, summary = _run_script(what, runtime) if isinstance(what, Script) else _run_task(what, runtime)
        link.send(Finished(link.rank, stopped_early, summary))
        return 0
    except BaseException as error:
        step, samples = runtime.in_flight if runtime else (0, None)
        shown = [int(s) for s in samples[:_SAMPLES_SHOWN]] if samples is not None else []
        if runtime is not None:
            runtime.collective.abort()  # nobody should wait for this worker any more
            runtime.finish_writing()
        is_first_step = runtime is None or not runtime.recorder.last_step
        link.send(
            describe_failure(
                error, rank=link.rank, life=link.life, step=step, samples=shown, is_first_step=is_first_step
            )
        )
        return 1
    finally:
        link.close()


def _be_where_the_driver_is(welcome: Welcome, *, is_elsewhere: bool) -> None:
    """Find the same modules and files as the driver; on another machine, as far as they are there."""
    if not is_elsewhere:
        sys.path[:] = welcome.python_path
        os.chdir(welcome.working_dir)
        return
    sys.path += [path for path in welcome.python_path if path not in sys.path and os.path.exists(path)]
    if os.path.isdir(welcome.working_dir):
        os.chdir(welcome.working_dir)


def _run_task(task: Task, runtime: Runtime) -> tuple[bool, dict[str, Any]]:
    job = Job(task, runtime)
    while runtime.enter_view():
        try:
            job.enter_view()
            position = train(job)
            stopped_early = not job.is_complete(position)
            if not stopped_early and job.plan.evaluate_every:
                job.evaluate(position)
            _end(job.course, runtime, stopped_early=stopped_early)
        except PeerLost:
            continue  # who is lost is the coordinator's to say, and how to go on
        runtime.close()
        return stopped_early, runtime.summary(position, job.metrics)
    return False, {}  # this worker was asked to leave


def _run_script(script: Script, runtime: Runtime) -> tuple[bool, dict[str, Any]]:
    sys.argv = [script.path, *script.arguments]
    sys.path.insert(0, str(Path(script.path).parent))
    worker: own_loop.Worker | None = None
    while runtime.enter_view():
        worker = own_loop.connect(runtime, worker)
        try:
            stopped_early = _execute(script)
            worker.end_loop()
            _end(worker.course, runtime, stopped_early=stopped_early)
        except (PeerLost, own_loop.LoopBegunAgain):
            continue  # the script goes on from where the workers are, as when a run is resumed
        runtime.close()
        return stopped_early, runtime.summary(worker.course.position, worker.metrics)
    return False, {}


def _execute(script: Script) -> bool:
    """Run the user's script to its end. Whether it was stopped before."""
    try:
        runpy.run_path(script.path, run_name="__main__")
    except own_loop.LoopBegunAgain:
        raise
    except own_loop.LoopStopped:
        return True
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise RuntimeError(f"The script ended with exit code {leaving.code}.") from None
    return False


def _end(course: Course, runtime: Runtime, *, stopped_early: bool) -> None:
    course.save(is_last=True)
    runtime.tell_peak_memory()
    runtime.collective.barrier()  # whoever leaves knows that all is saved
    course.close_ledger(stopped_early=stopped_early)


def load_trained_model(what: Task | Script, run_dir: RunDir) -> torch.nn.Module:
    """The model of a run with the weights of its last checkpoint, in evaluation mode."""
    if isinstance(what, Script):
        raise ConfigError(
            "A script's model is its own: build it as the script does, and load the checkpoint's 'model' into it."
        )
    _, state, _ = store.newest_sound(run_dir.checkpoints)
    train_source, _ = build_sources(what)
    model = copy.deepcopy(build_model(what, train_source, seed=0))
    model.load_state_dict(state["model"])
    return model.eval()
