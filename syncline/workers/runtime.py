"""What a worker process has, whichever loop runs in it: its place in the plan, its line to the others, its checkpoints.

Here: `Runtime`, and how it is made for a worker of a run (`connected`) and for a script that runs alone (`alone`). Not
here: the loops (`loop.py` with `job.py`, `own_loop.py`), going on with other workers (`course.py`).
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from syncline.checkpoint import store
from syncline.checkpoint.writer import CheckpointWriter
from syncline.comms.collective import Collective, Solo
from syncline.comms.control import LedgerLine, ViewOf
from syncline.comms.segment import Segment
from syncline.comms.shared_memory import SharedMemory, SharedMemoryFull
from syncline.data.ledger import Line, RecentLines
from syncline.data.order import Position, step_seed
from syncline.errors import CheckpointError, PeerLost
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
from syncline.workers.device import device_here
from syncline.workers.link import Link
from syncline.workers.memory import Peak, optimizer_slots
from syncline.workers.step import RIDERS

if TYPE_CHECKING:
    from syncline.comms.parameter_server.client import ParameterServers

__all__ = ["Runtime", "packed", "unpacked"]


_STRANDED_S = 1.0
"""How long a worker that has lost the others waits to be told why, before it asks."""


class Runtime:
    """A worker's place in a run."""

    def __init__(self, plan: Plan, number: int, recorder: Recorder) -> None:
        self.plan, self.rank, self.number = plan, number, number
        """The plan for the present View, this worker's rank in it, and its number in the run."""
        self._plan_at_start = plan
        self.view = 0
        """The number of the View in which this worker takes part."""
        self.device = device_here(plan.workers[number % plan.size].device)
        self.collective: Collective = Solo()
        self.recorder = recorder
        self._memory = Peak(self.device)
        self._peaks: dict[str, int] = {}
        self._has_been_member = self._has_trained = False
        self.members = [number]
        """The numbers of all members of the View, in the order of their ranks."""
        self.noticed_at = time.monotonic()
        """When this worker noticed that there would be another View."""
        self.bytes_of_state = 0
        """How much live state travelled when this View was entered."""
        self.in_flight: tuple[int, np.ndarray] = (0, np.empty(0, np.int64))
        self.run_dir: RunDir | None = None
        self.checkpoint_path: Path | None = None
        self._strategy = read_strategy(plan.strategy)
        # Workers that train by themselves between exchanges do not wait for each other in the middle of a forward pass.
        self.has_global_batch_norm = plan.batch_norm == "global" and is_synchronous_gradients(self._strategy)
        self._link: Link | None = None
        self._lines = RecentLines("")
        self._writer: CheckpointWriter | None = None
        self._last_save_s = time.monotonic()
        self._last_saved_step = 0
        self._exchange: Exchange | None = None
        self._servers: ParameterServers | None = None

    @classmethod
    def connected(cls, link: Link) -> Runtime:
        """A worker of a run, as the coordinator's welcome says."""
        plan = Plan.from_dict(link.welcome.plan)
        torch.set_num_threads(plan.workers[link.rank % plan.size].threads)
        runtime = cls(plan, link.rank, link.recorder)
        runtime._link = link
        runtime._lines = RecentLines(f"{link.welcome.session}.{link.rank}.{link.life}")
        runtime.run_dir = RunDir(Path(link.files.run_dir))
        runtime.checkpoint_path = Path(link.files.checkpoint_path) if link.files.checkpoint_path else None
        return runtime

    @classmethod
    def alone(cls) -> Runtime:
        """One worker that nobody started: the user's script, run as it is."""
        worker = WorkerPlan(rank=0, host="localhost", device="cpu", threads=torch.get_num_threads())
        return cls(_plan_of_one(worker), 0, Recorder(0))

    @property
    def is_late(self) -> bool:
        """Whether this worker was started when the others were under way."""
        return self._link is not None and self._link.welcome.view is None

    @property
    def is_outdated(self) -> bool:
        """Whether there is a View after the one in which this worker takes part."""
        return self._link is not None and self._link.is_outdated(self.view)

    def enter_view(self) -> bool:
        """Take part in the newest View, if need be when there is one. False if this worker is no member of it.

        Raises `PeerLost` if there is none after a while, or because the run has failed.
        """
        link = self._link
        if link is None:
            return True
        self.noticed_at = time.monotonic()
        if self.is_late and self.view == 0:
            link.say_ready()
        while True:
            view = self._next_view(link)
            if view is None:
                raise PeerLost("The run has failed elsewhere." if link.is_aborted else "Nobody told how to go on.")
            self._leave_view()
            self.view, self.bytes_of_state = view.number, 0
            if self.number not in view.members:
                if self._has_been_member:
                    return False
                continue  # the others' business; this worker's turn comes
            self.plan = self._plan_at_start.with_members(view.members)
            self.rank, self.members = view.members.index(self.number), list(view.members)
            try:
                self.collective = _open_collective(self.plan, link, view, self.rank)
                break
            except PeerLost:
                continue  # there is another View by now
        link.guard(self.collective, view.number)
        self._has_been_member = True
        if self.rank == 0 and self._writer is None:
            assert self.run_dir is not None, "set where the link is"
            self._writer = CheckpointWriter(
                self.run_dir.checkpoints,
                keep=self.plan.keep_checkpoints,
                on_saved=self._report_saved,
                on_failed=self._report_not_saved,
            )
        return True

    def _next_view(self, link: Link) -> ViewOf | None:
        """The next View; if there is none after a moment, one is asked for: perhaps only a line broke."""
        deadline = time.monotonic() + self.plan.exchange_timeout_s
        while time.monotonic() < deadline and not link.is_aborted:
            view = link.next_view(self.view, _STRANDED_S)
            if view is not None:
                return view
            if self._has_been_member:
                link.say_stranded(self.view)
        return None

    def look_up(self) -> None:
        """`PeerLost` if there is another View: for workers that would not wait for each other and so not notice."""
        if self._link is not None and self._link.is_outdated(self.view):
            raise PeerLost("Somebody was lost, joins or leaves.")

    def load_newest(self) -> tuple[Position, dict[str, Any] | None]:
        """Where to go on, and the state to go on with if there is a checkpoint; all workers ask together.

        The first worker decides which. Those who have the same file read it; if somebody has not, because hosts share
        no files, the first one reads it to all.
        """
        mine = self._newest_here() if self.rank == 0 else None
        told = self.collective.gather(mine.sha256.encode() if mine is not None else b"")[0].decode()
        if not told:
            return Position(), None
        if mine is None and self.run_dir is not None:
            mine = next((c for c in store.checkpoints_in(self.run_dir.checkpoints) if c.sha256 == told), None)
        all_have = all(self.collective.gather(b"yes" if mine is not None else b""))
        if all_have:
            assert mine is not None, "this worker is one of all"
            state = store.load(mine)
        else:
            state = store.load(mine) if self.rank == 0 and mine is not None else {}
            state = unpacked(self.collective.gather(packed(state) if self.rank == 0 else b"")[0])
        self._last_saved_step = state["position"]["step"]
        return Position(**state["position"]), state

    def _newest_here(self) -> store.Checkpoint | None:
        """The checkpoint to go on from, as the first worker sees it."""
        path = self.checkpoint_path
        if self.view > 1 and self.run_dir is not None:
            with contextlib.suppress(CheckpointError):
                path = store.newest_sound(self.run_dir.checkpoints)[0].path
        if path is None:
            return None
        found = next((c for c in store.checkpoints_in(path.parent) if c.path == path), None)
        if found is None:
            raise CheckpointError(f"The checkpoint {path} is gone.")
        return found

    def replicate(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        private: dict[str, Any] | None,
        *,
        step: int,
        steps_per_epoch: int,
        clip_norm: float | None = None,
        score: Callable[[], tuple[float, float]] | None = None,
    ) -> tuple[Replica, Exchange]:
        """Make `model` and `optimizer` this worker's replica, after `step` steps.

        The model is on its device already. `private` is what this worker held for itself, if anything. Without
        room in shared memory for the gradients, all workers fall back to torch.distributed together.
        """
        is_flat = self.plan.size > 1 or self.plan.servers > 0
        try:
            gradients = GradientBuffer(model.parameters(), self.collective, RIDERS, is_flat=is_flat)
        except SharedMemoryFull as error:
            self.warn(f"Too little shared memory ({error}): exchanging through torch.distributed, which is slower.")
            self.collective = self._open_process_group()
            gradients = GradientBuffer(model.parameters(), self.collective, RIDERS, is_flat=is_flat)
        if self.has_global_batch_norm:
            synchronise_batch_norm(model, self.collective)
        log = StrategyRecorder(self.recorder, step)
        log.count_bytes(lambda: self.collective.bytes_sent)
        self.recorder.count_waiting = lambda: self.collective.waited_s
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
        if private is not None:
            exchange.load_private_state(private)
        if step:
            self.collective.barrier()  # what one worker gives back to a server all others may then fetch
        log.start()
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
        self.recorder.emit(
            WorkerReady(
                rank=self.number,
                pid=os.getpid(),
                parameters=sum(p.numel() for p in model.parameters()),
                collective=type(self.collective).__name__,
                expected_bytes_per_step=expected_bytes_per_step(
                    self._strategy, shapes, workers=self.plan.size, optimizer_slots=optimizer_slots(optimizer)
                ),
            )
        )
        if not self._has_trained:
            self._memory.reset()  # what it took to get ready does not count
            self._has_trained = True
        self._exchange = exchange
        return replica, exchange

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
            self._link.call_meeting(self.view, number)

    def meeting_called(self, number: int) -> bool:
        """Whether somebody has called meeting `number`; a worker alone is always met."""
        return self._link is None or self._link.last_meeting >= (self.view, number)

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
        progress: dict[str, Any],
        *,
        is_last: bool,
    ) -> None:
        """Make a checkpoint of everything that is needed to go on as if nothing had happened.

        `progress` is what is to be saved besides position, model and optimiser.

        All workers call this at the same step. What they hold in common is taken from the first one; what each holds
        for itself is gathered there.
        """
        with exchange.shared(), replica.log.outside():
            mine = {"private": exchange.private_state(), "ledger": self._lines.texts(time.monotonic())}
            parts = [unpacked(part) for part in self.collective.gather(packed(mine))]
            self._last_save_s, self._last_saved_step = time.monotonic(), position.step
            if self._writer is None:
                return
            state = {
                "position": asdict(position),
                "model": replica.model.state_dict(),
                "optimizer": replica.optimizer.state_dict(),
                **progress,
                "private": [part["private"] for part in parts if part["private"] is not None],
                "ledger": [text for part in parts for text in part["ledger"]],
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
            "peak_memory_bytes": self._peaks,
        }

    def tell_peak_memory(self) -> None:
        """Let all workers know how much memory each of them has needed."""
        told = self.collective.gather(str(self._memory.read()).encode())
        self._peaks = {str(number): int(peak) for number, peak in zip(self.members, told, strict=True)}

    def note(self, line: Line) -> None:
        """Write a line into the run's ledger."""
        if self._link is not None:
            self._link.send(LedgerLine(self.number, self._lines.add(line, time.monotonic())))

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

    def _leave_view(self) -> None:
        """Nobody is waited for, and nothing is finished: those who would have to take part may be gone."""
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
        if self._servers is not None:
            self._servers.close(goodbye=False)
            self._servers = None
        self.collective.close()
        self.finish_writing()
        self._writer = None

    def _open_process_group(self) -> Collective:
        assert self._link is not None, "a worker alone has ordinary memory, which does not run out this way"
        collective = _process_group(self.plan, self._link, self.view, self.rank)
        self._link.guard(collective, self.view)
        return collective

    def _open_servers(self) -> ParameterServers:
        """The line to the servers, the same for all strategies of a run."""
        from syncline.comms.parameter_server.client import ParameterServers

        link = self._link
        assert link is not None, "a script that runs alone has a plan without servers"
        if self._servers is None:
            addresses = link.request_servers(self.view)
            self._servers = ParameterServers(
                addresses,
                bytes.fromhex(link.welcome.secret),
                rank=self.rank,
                size=self.plan.size,
                view=self.view,
                timeout_s=self.plan.exchange_timeout_s,
                share_memory=all(a.rpartition(":")[0].strip("[]") == link.host for a in addresses),
                should_stop=lambda: self.is_outdated,
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


def packed(state: dict[str, Any]) -> bytes:
    """A state as bytes, for another worker."""
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def unpacked(data: bytes) -> dict[str, Any]:
    """What `packed` made; nothing in it is executed."""
    state: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    return state


def _open_collective(plan: Plan, link: Link, view: ViewOf, rank: int) -> Collective:
    if plan.size == 1:
        return Solo()
    if view.control_segment is None:
        return _process_group(plan, link, view.number, rank)
    try:
        control = Segment.attach(view.control_segment)
    except OSError as error:  # there is another View by now
        raise PeerLost(f"The memory of View {view.number} is gone: {error}.") from None
    return SharedMemory(
        control,
        rank=rank,
        size=plan.size,
        timeout_s=plan.exchange_timeout_s,
        limit_bytes=plan.shared_memory_bytes,
    )


def _process_group(plan: Plan, link: Link, view: int, rank: int) -> Collective:
    # torch.distributed is loaded only where it is used.
    from syncline.comms.process_group import ProcessGroup
    from syncline.comms.store import connect_store

    address = link.request_store()
    device = device_here(plan.workers[rank].device)
    store_ = connect_store(
        address.host,
        address.port,
        f"view-{view}",
        plan.exchange_timeout_s,
        bytes.fromhex(link.welcome.secret),
        should_stop=lambda: link.is_outdated(view),
    )
    return ProcessGroup(
        store_,
        rank=rank,
        size=plan.size,
        device=device,
        timeout_s=plan.exchange_timeout_s,
        host=link.host,
        should_stop=lambda: link.is_outdated(view),
        memory_bytes=plan.shared_memory_bytes if plan.shares_memory_on_hosts else 0,
    )


def _plan_of_one(worker: WorkerPlan) -> Plan:
    from syncline.config.run import RunConfig
    from syncline.plan.machine import Machine
    from syncline.plan.planner import TaskFacts, make_plan

    facts = TaskFacts(kind="own-loop", model="script", data="script", fingerprint="")
    plan = make_plan(facts, RunConfig(workers=1), Machine.here(), "cpu")
    return replace(plan, workers=(worker,))
