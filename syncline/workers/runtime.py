"""What a worker process has, whichever loop runs in it: its place in the plan, its line to the others, its checkpoints.

Here: `Runtime`, and how it is made for a worker of a run (`connected`) and for a script that runs alone (`alone`). Not
here: the loops (`loop.py` with `job.py`, `own_loop.py`).
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from syncline.checkpoint import store
from syncline.checkpoint.writer import CheckpointWriter
from syncline.comms.collective import Collective, Solo
from syncline.comms.segment import Segment
from syncline.comms.shared_memory import SharedMemory, SharedMemoryFull
from syncline.data.order import Position, step_seed
from syncline.errors import CheckpointError
from syncline.plan.plan import Plan, WorkerPlan
from syncline.strategies.carry_out import make_exchange
from syncline.strategies.exchange import Exchange, Replica
from syncline.strategies.feasible import is_synchronous_gradients
from syncline.strategies.gradients import GradientBuffer
from syncline.strategies.reading import read_strategy
from syncline.strategies.words import expected_bytes_per_step
from syncline.telemetry.events import CheckpointSaved, Warned, WorkerReady
from syncline.telemetry.recorder import Recorder
from syncline.telemetry.run_dir import RunDir
from syncline.telemetry.strategy_log import StrategyRecorder
from syncline.workers.batch_norm import synchronise_batch_norm
from syncline.workers.link import Link
from syncline.workers.step import RIDERS

if TYPE_CHECKING:
    from syncline.comms.parameter_server.client import ParameterServers

__all__ = ["Runtime"]

_STORE_PREFIX = "view-0"


class Runtime:
    """A worker's place in a run."""

    def __init__(self, plan: Plan, rank: int, collective: Collective, recorder: Recorder) -> None:
        self.plan, self.rank = plan, rank
        self.device = torch.device(plan.workers[rank].device)
        self.collective = collective
        self.recorder = recorder
        self.in_flight: tuple[int, np.ndarray] = (0, np.empty(0, np.int64))
        self.run_dir: RunDir | None = None
        self.checkpoint_path: Path | None = None
        self._strategy = read_strategy(plan.strategy)
        # Workers that train by themselves between exchanges do not wait for each other in the middle of a forward pass.
        self.has_global_batch_norm = plan.batch_norm == "global" and is_synchronous_gradients(self._strategy)
        self._link: Link | None = None
        self._writer: CheckpointWriter | None = None
        self._last_save_s = time.monotonic()
        self._last_saved_step = 0
        self._exchange: Exchange | None = None
        self._servers: ParameterServers | None = None

    @classmethod
    def connected(cls, link: Link) -> Runtime:
        """A worker of a run, as the coordinator's welcome says."""
        plan = Plan.from_dict(link.welcome.plan)
        torch.set_num_threads(plan.workers[link.rank].threads)
        runtime = cls(plan, link.rank, _open_collective(plan, link), link.recorder)
        link.guard(runtime.collective)
        runtime._link = link
        runtime.run_dir = RunDir(Path(link.welcome.run_dir))
        runtime.checkpoint_path = Path(link.welcome.checkpoint_path) if link.welcome.checkpoint_path else None
        if runtime.rank == 0:
            runtime._writer = CheckpointWriter(
                runtime.run_dir.checkpoints,
                keep=plan.keep_checkpoints,
                on_saved=runtime._report_saved,
                on_failed=runtime._report_not_saved,
            )
        return runtime

    @classmethod
    def alone(cls) -> Runtime:
        """One worker that nobody started: the user's script, run as it is."""
        worker = WorkerPlan(rank=0, host="localhost", device="cpu", threads=torch.get_num_threads())
        return cls(_plan_of_one(worker), 0, Solo(), Recorder(0))

    def replicate(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any] | None,
        *,
        steps_per_epoch: int,
        clip_norm: float | None = None,
        score: Callable[[], tuple[float, float]] | None = None,
    ) -> tuple[Replica, Exchange]:
        """Make `model` and `optimizer` this worker's replica, from a checkpoint's `state` if there is one.

        The model is on its device already. Without room in shared memory for the gradients, all workers fall back to
        torch.distributed together.
        """
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        is_flat = self.plan.size > 1 or self.plan.servers > 0
        try:
            gradients = GradientBuffer(model.parameters(), self.collective, RIDERS, is_flat=is_flat)
        except SharedMemoryFull as error:
            self.warn(f"Too little shared memory ({error}): exchanging through torch.distributed, which is slower.")
            self.collective = self._open_process_group()
            gradients = GradientBuffer(model.parameters(), self.collective, RIDERS, is_flat=is_flat)
        if self.has_global_batch_norm:
            synchronise_batch_norm(model, self.collective)
        step = state["position"]["step"] if state is not None else 0
        log = StrategyRecorder(self.recorder, step)
        log.count_bytes(lambda: self.collective.bytes_sent)
        replica = Replica(
            model,
            optimizer,
            gradients,
            self.collective,
            seed=self.plan.seed,
            step=step,
            steps_per_epoch=steps_per_epoch,
            clip_norm=clip_norm,
            score=score,
            open_servers=self._open_servers if self.plan.servers else None,
            log=log,
        )
        exchange = make_exchange(self._strategy, replica)
        exchange.begin()
        if state is not None:
            if self.rank < len(state["private"]):
                exchange.load_private_state(state["private"][self.rank])
            self.collective.barrier()  # what one worker gives back to a server all others may then fetch
        log.start()
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
        self.recorder.emit(
            WorkerReady(
                rank=self.rank,
                pid=os.getpid(),
                parameters=sum(p.numel() for p in model.parameters()),
                collective=type(self.collective).__name__,
                expected_bytes_per_step=expected_bytes_per_step(
                    self._strategy, shapes, workers=self.plan.size, optimizer_slots=_slots(optimizer)
                ),
            )
        )
        self._exchange = exchange
        return replica, exchange

    def load_checkpoint(self) -> tuple[Position, dict[str, Any] | None]:
        """Where to start, and the state to start from if this run goes on with an earlier one."""
        if self.checkpoint_path is None:
            return Position(), None
        wanted = [c for c in store.checkpoints_in(self.checkpoint_path.parent) if c.path == self.checkpoint_path]
        if not wanted:
            raise CheckpointError(f"The checkpoint {self.checkpoint_path} is gone.")
        state = store.load(wanted[0])
        self._last_saved_step = state["position"]["step"]
        return Position(**state["position"]), state

    def seed_step(self, step: int) -> None:
        """Make everything random in this step a function of (seed, step, rank) alone."""
        seed = step_seed(self.plan.seed, step, self.rank)
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        elif self.device.type == "mps":
            torch.mps.manual_seed(seed)

    def stop_wanted(self) -> bool:
        """Whether the user, or the engine, wants the run to end."""
        return self._link is not None and self._link.stop_wanted

    def call_meeting(self, number: int) -> None:
        """Let all workers know that there is something to agree on."""
        if self._link is not None:
            self._link.call_meeting(number)

    def meeting_called(self, number: int) -> bool:
        """Whether somebody has called meeting `number`; a worker alone is always met."""
        return self._link is None or self._link.last_meeting >= number

    def save_wanted(self) -> bool:
        """Whether it is time for a checkpoint. Only the first worker says so, and only if it could write one now."""
        if self._writer is None or not self._writer.is_idle:
            return False
        every = self.plan.checkpoint_every_steps
        steps = self.in_flight[0] + 1 - self._last_saved_step
        return (every is not None and steps >= every) or (
            time.monotonic() - self._last_save_s >= self.plan.checkpoint_every_s
        )

    def save(
        self,
        position: Position,
        replica: Replica,
        exchange: Exchange,
        schedulers: Sequence[Any],
        metrics: dict[str, float],
        *,
        is_last: bool,
    ) -> None:
        """Make a checkpoint of everything that is needed to go on as if nothing had happened.

        All workers call this at the same step. What they hold in common is taken from the first one; what each holds
        for itself is gathered there.
        """
        with exchange.shared(), replica.log.outside():
            private = exchange.private_state()
            parts = self.collective.gather(_packed(private)) if private is not None else []
            self._last_save_s, self._last_saved_step = time.monotonic(), position.step
            if self._writer is None:
                return
            state = {
                "position": {"epoch": position.epoch, "cursor": position.cursor, "step": position.step},
                "model": replica.model.state_dict(),
                "optimizer": replica.optimizer.state_dict(),
                "schedulers": [s.state_dict() for s in schedulers],
                "private": [_unpacked(part) for part in parts],
                "metrics": dict(metrics),
            }
            if is_last:
                self._writer.save_last(position.step, state)
            else:
                self._writer.save_if_idle(position.step, state)

    def summary(self, position: Position, metrics: dict[str, float]) -> dict[str, Any]:
        """What the driver tells at the end."""
        return {
            "metrics": metrics,
            "steps": position.step,
            "epochs": position.epoch + (position.cursor / self.plan.train_samples if self.plan.train_samples else 0.0),
            "samples": self.recorder.total_samples,
            "seconds": self.recorder.total_seconds,
        }

    def warn(self, message: str) -> None:
        """Tell the user, once for all workers."""
        if self.rank == 0:
            self.recorder.emit(Warned(message=message))

    def finish_writing(self) -> None:
        """See the checkpoint that is being written, if any, to its end: it may be all that is left of the run."""
        if self._writer is not None:
            self._writer.close()

    def close(self) -> None:
        """Finish the checkpoint being written and leave the others."""
        self.finish_writing()
        if self._exchange is not None:
            self._exchange.close()
        if self.plan.servers:
            self._open_servers().close()  # also if nothing was ever kept there: a server ends with the last goodbye
        self.collective.close()

    def _open_process_group(self) -> Collective:
        assert self._link is not None, "a worker alone has ordinary memory, which does not run out this way"
        collective = _process_group(self.plan, self._link)
        self._link.guard(collective)
        return collective

    def _open_servers(self) -> ParameterServers:
        """The line to the servers, the same for all strategies of a run."""
        from syncline.comms.parameter_server.client import ParameterServers

        link = self._link
        assert link is not None, "a script that runs alone has a plan without servers"
        if self._servers is None:
            self._servers = ParameterServers(
                link.request_servers(),
                bytes.fromhex(link.welcome.secret),
                rank=self.rank,
                size=self.plan.size,
                timeout_s=self.plan.exchange_timeout_s,
                should_stop=lambda: link.is_aborted,
            )
        return self._servers

    def _report_saved(self, checkpoint: store.Checkpoint, seconds: float) -> None:
        self.recorder.emit(
            CheckpointSaved(
                step=checkpoint.step, path=str(checkpoint.path), bytes=checkpoint.size_bytes, seconds=seconds
            )
        )

    def _report_not_saved(self, error: CheckpointError) -> None:
        self.recorder.emit(Warned(message=f"{error} Training goes on."))


def _slots(optimizer: torch.optim.Optimizer) -> int:
    """How many numbers the optimiser keeps for each parameter."""
    settings = optimizer.param_groups[0]
    if "betas" in settings:
        return 2
    return 1 if settings.get("momentum") or "lr_decay" in settings else 0


def _packed(state: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def _unpacked(data: bytes) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    return state


def _open_collective(plan: Plan, link: Link) -> Collective:
    if plan.collective == "solo":
        return Solo()
    if plan.collective == "process-group":
        return _process_group(plan, link)
    assert link.welcome.control_segment is not None, "the coordinator made a control segment for this plan"
    return SharedMemory(
        Segment.attach(link.welcome.control_segment),
        rank=link.rank,
        size=plan.size,
        timeout_s=plan.exchange_timeout_s,
        limit_bytes=plan.shared_memory_bytes,
    )


def _process_group(plan: Plan, link: Link) -> Collective:
    # torch.distributed is loaded only where it is used.
    from syncline.comms.process_group import ProcessGroup
    from syncline.comms.store import connect_store

    address = link.request_store()
    device = torch.device(plan.workers[link.rank].device)
    store_ = connect_store(address.host, address.port, _STORE_PREFIX, plan.exchange_timeout_s)
    return ProcessGroup(store_, rank=link.rank, size=plan.size, device=device, timeout_s=plan.exchange_timeout_s)


def _plan_of_one(worker: WorkerPlan) -> Plan:
    from syncline.config.run import RunConfig
    from syncline.plan.machine import Machine
    from syncline.plan.planner import TaskFacts, make_plan

    facts = TaskFacts(kind="own-loop", model="script", data="script", fingerprint="")
    plan = make_plan(facts, RunConfig(workers=1), Machine.here(), "cpu")
    return replace(plan, workers=(worker,))
