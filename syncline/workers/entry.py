"""Where a worker process starts, on every engine: join the run, train or serve, report the result.

Here: `run_worker`. Not here: starting the process (`engines/`), training (`loop.py`), and the parameter server itself
(`comms/parameter_server/`).
"""

from __future__ import annotations

import copy
import faulthandler
import os
import runpy
import signal
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from syncline import task_file
from syncline.blocks.fit_task import BlockFit
from syncline.checkpoint import store
from syncline.checkpoint.schema import CheckpointState
from syncline.comms.control import Finished, LaunchSpec, ServerReady, Welcome
from syncline.comms.parameter_server.server import serve
from syncline.compute.allocator import keep_memory
from syncline.compute.processes import PEER_FAILED
from syncline.data.source import Source
from syncline.errors import ConfigError, PeerFailed
from syncline.graphs.work import VertexWork
from syncline.planning.plan import Plan
from syncline.task import Script, Task
from syncline.telemetry.run_dir import RunDir
from syncline.telemetry.run_lock import lock_as_worker
from syncline.workers import own_loop
from syncline.workers.block_worker import run_fit
from syncline.workers.build import build_model, build_sources, parameter_shapes
from syncline.workers.failure import describe_failure
from syncline.workers.job import Job
from syncline.workers.layout_facts import settle_layout
from syncline.workers.link import Link
from syncline.workers.loop import train
from syncline.workers.session import Session
from syncline.workers.spreading import describe_spread
from syncline.workers.stepper import Stepper
from syncline.workers.torchrun import TorchrunScript
from syncline.workers.train_state import load_model
from syncline.workers.vertex_job import VertexJob

__all__ = ["describe_spread", "load_trained_model", "parameter_shapes", "rebuild_model", "run_worker", "settle_layout"]

_SAMPLES_SHOWN = 8
"""How many of the samples in flight a failure report names."""


def run_worker(spec: LaunchSpec) -> int:
    """Take part in the run that `spec` names. The exit code of the process."""
    link = Link(spec, os.getpid())
    session: Session | None = None
    try:
        keep_memory()
        faulthandler.enable(all_threads=False)  # a crash in native code logs the Python stack
        # The driver handles Ctrl-C. SIGTERM means: save and stop at the next step.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the run continues when its terminal is closed
        signal.signal(signal.SIGTERM, lambda *_: link.on_terminate())
        signal.signal(PEER_FAILED, lambda *_: link.on_peer_failed())
        lock_as_worker(Path(link.files.run_dir))
        _adopt_driver_paths(link.welcome, is_remote=spec.is_remote)
        plan = Plan.from_dict(link.welcome.plan)
        if plan.is_server(link.worker_id):
            _run_server(link, plan)
            link.send(Finished(link.worker_id, stopped_early=False, summary={}))
            return 0
        session = Session.connected(link)
        what = task_file.read(Path(link.files.task_path))
        stopped_early, summary = _run(what, session)
        link.send(Finished(link.worker_id, stopped_early, summary, link.life))
        return 0
    except BaseException as error:
        step, samples = session.in_flight if session else (0, None)
        shown = [int(s) for s in samples[:_SAMPLES_SHOWN]] if samples is not None else []
        if session is not None:
            session.after_report.callback(session.collective.abort)  # so that no other worker waits for this one
            session.checkpoints.finish_writing()
        is_first_step = session is None or not (session.recorder.last_step or session.has_own_group)
        link.send(
            describe_failure(
                error, worker_id=link.worker_id, life=link.life, step=step, samples=shown, is_first_step=is_first_step
            )
        )
        return 1
    finally:
        link.close()
        if session is not None:
            session.after_report.close()


def _run(what: Task | Script | BlockFit | VertexWork, session: Session) -> tuple[bool, dict[str, Any]]:
    if isinstance(what, BlockFit):
        return run_fit(what, session)
    if isinstance(what, VertexWork):
        return _run_vertices(what, session)
    return _run_script(what, session) if isinstance(what, Script) else _run_task(what, session)


def _adopt_driver_paths(welcome: Welcome, *, is_remote: bool) -> None:
    """Use the driver's module path and working directory; on another machine, the parts that exist there."""
    if not is_remote:
        sys.path[:] = welcome.python_path
        os.chdir(welcome.working_dir)
        return
    sys.path += [path for path in welcome.python_path if path not in sys.path and os.path.exists(path)]
    if os.path.isdir(welcome.working_dir):
        os.chdir(welcome.working_dir)


def _run_vertices(work: VertexWork, session: Session) -> tuple[bool, dict[str, Any]]:
    job = VertexJob(work, session)
    while session.join_view():
        try:
            stopped_early, summary = job.run()
        except PeerFailed:
            continue  # the coordinator decides how to continue, and announces a new View
        session.close()
        return stopped_early, summary
    return False, {}  # this worker is no longer a member


def _run_task(task: Task, session: Session) -> tuple[bool, dict[str, Any]]:
    job = Job(task, session)
    while session.join_view():
        try:
            job.prepare()
            position = train(job)
            stopped_early = not job.stepper.progress.is_complete(position)
            if not stopped_early and job.plan.evaluate_every:
                job.evaluate(position)
            peak_memory = job.stepper.finish(stopped_early=stopped_early)
        except PeerFailed:
            continue  # the coordinator decides how to continue, and announces a new View
        session.close()
        return stopped_early, _summary(job.stepper, job.metrics, peak_memory)
    return False, {}  # this worker is no longer a member


def _run_script(script: Script, session: Session) -> tuple[bool, dict[str, Any]]:
    sys.argv = [script.path, *script.arguments]
    sys.path.insert(0, str(Path(script.path).parent))
    worker: own_loop.Worker | None = None
    assert session.link is not None, "the coordinator has started this worker"
    if session.link.welcome.restarts_together and not session.join_view():
        return False, {}  # this worker is no longer a member
    while True:
        worker = own_loop.connect(session, worker)
        distributed = TorchrunScript(session, session.link)
        try:
            stopped_early = distributed.run(lambda: _execute(script, session))
            if distributed.has_group:
                session.close()
                return stopped_early, distributed.summary()
            peak_memory = own_loop.finish(worker, stopped_early=stopped_early)
        except own_loop.LoopRestarted:
            continue  # from the last checkpoint, as in a resumed run
        except own_loop.LoopLeft:
            return False, {}  # this worker is no longer a member
        except (ConfigError, PeerFailed) as error:
            own_loop.save_if_out_of_step(worker, error)
            raise
        session.close()
        stepper, steps = own_loop.progress_of(worker)
        return stopped_early, {**_summary(stepper, own_loop.metrics_of(worker), peak_memory), "steps": steps}


def _summary(stepper: Stepper, metrics: dict[str, float], peak_memory: dict[str, int]) -> dict[str, Any]:
    """What the driver shows at the end."""
    session, position = stepper.session, stepper.progress.position
    samples = session.plan.train_samples
    return {
        "metrics": metrics,
        "steps": position.step,
        "epochs": position.epoch + (position.cursor / samples if samples else 0.0),
        "samples": session.recorder.total_samples,
        "seconds": session.recorder.total_seconds,
        "peak_memory_bytes": peak_memory,
    }


def _execute(script: Script, session: Session) -> bool:
    """Run the user's script to its end. True if it was stopped early."""
    printed = own_loop.Printed()
    try:
        runpy.run_path(script.path, run_name="__main__")
    except (own_loop.LoopRestarted, own_loop.LoopLeft):
        raise
    except own_loop.LoopStopped:
        return True
    except SystemExit as leaving:
        if leaving.code == 2 and not session.recorder.last_step:
            raise own_loop.refused_arguments(printed) from None
        if leaving.code not in (None, 0):
            raise own_loop.script_failed(leaving.code) from None
    return False


def load_trained_model(what: Task | Script, run_dir: RunDir) -> torch.nn.Module:
    """The model of a run with the weights of its last checkpoint, in evaluation mode."""
    if isinstance(what, Script):
        raise ConfigError(
            "The model of a script cannot be rebuilt here: build it as the script does, and load the checkpoint's "
            "'model' into it.",
            code="script-model",
        )
    found, state, problems = store.newest_sound(run_dir.checkpoints, run_dir.read_plan().get("run_id"))
    if problems:
        warnings.warn(f"{' '.join(problems)} Using the checkpoint of step {found.step} instead.", stacklevel=3)
    train_source, _ = build_sources(what)
    return rebuild_model(what, train_source, CheckpointState.from_dict(state).model)


def rebuild_model(task: Task, train: Source, saved: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """The model of a task with the weights of a checkpoint, in evaluation mode; the task is not changed."""
    model = copy.deepcopy(build_model(task, train, seed=0))
    load_model(model, saved)
    return model.eval()


def _run_server(link: Link, plan: Plan) -> None:
    """Serve until every worker has said goodbye."""
    torch.set_num_threads(1)  # its recorder reports from the start that it waits, which is normal for a server
    serve(
        link.host,
        bytes.fromhex(link.welcome.secret),
        shard_index=link.worker_id - plan.size,
        shards=plan.servers,
        size=plan.size,
        on_ready=lambda address: link.send(ServerReady(link.worker_id, address, link.life)),
        # Without a driver, workers need their servers to save; when one of them has failed, none can.
        should_stop=lambda: link.is_aborted or link.is_released or link.is_orphaned,
    )
    if link.is_aborted:
        raise PeerFailed("The run has failed on another worker.", code="run-failed")
