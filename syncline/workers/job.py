"""Everything that the training loop uses, built once from a task and a runtime.

Here: `Job`. Its methods are the moments that `loop.py` puts in order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple

import torch

from syncline.algorithms.partition import share as share_of
from syncline.data.ledger import Closed, Opened, Tally, Used
from syncline.data.order import Position, SampleOrder, Share, hold_out
from syncline.data.prefetch import Ahead, Fetched, InLine, ahead_of
from syncline.data.source import DatasetSource
from syncline.data.stint import Range, Stint, total
from syncline.errors import NonFiniteLoss, PeerLost
from syncline.strategies.exchange import Exchange, Replica
from syncline.task import Task
from syncline.telemetry.events import Evaluated, Warned, WentOn
from syncline.testing import faults
from syncline.workers.batch_norm import has_global_batch_norm, take_part_without_samples
from syncline.workers.build import build_loss, build_model, build_optimizer, build_schedule, build_sources
from syncline.workers.compute import correct_fraction, loss_of, pieces, to_device
from syncline.workers.evaluate import evaluate, mean_loss_and_accuracy
from syncline.workers.metrics import MetricSet
from syncline.workers.rejoin import Agreement, Standing, agree, decode, encode
from syncline.workers.runtime import Runtime, packed, unpacked
from syncline.workers.step import Outcome, Update

__all__ = ["Job", "Local"]

_ACCURACY_EVERY = 4
"""In which steps the accuracy on the training data is looked at: it is for the eye, and takes as long as an update."""


_TELL_EVERY_S = 1.0
"""How often a worker says which samples it has used."""


class Local(NamedTuple):
    """What this worker's share came to."""

    loss: float
    correct: float | None


class Job:
    """A task being trained by one worker."""

    def __init__(self, task: Task, runtime: Runtime) -> None:
        """Build everything that concerns nobody else."""
        plan = runtime.plan
        self.runtime, self.plan = runtime, plan
        self.recorder, self.device = runtime.recorder, runtime.device
        self._task = task
        self.train_source, self._test = build_sources(task)
        kept, held = hold_out(plan.seed, len(self.train_source), plan.held_out) if plan.held_out else (None, None)
        self._held = held
        self.order = SampleOrder(
            seed=plan.seed, count=len(self.train_source) - plan.held_out, batch=plan.batch, kept=kept
        )
        self._loss = build_loss(task.loss)  # type: ignore[arg-type]  # Task.with_defaults has filled it in
        self._metrics = MetricSet(task.metrics)  # type: ignore[arg-type]  # likewise
        self.position = Position()
        self.stint = Stint(self.position, plan.size, self.order.count, plan.batch, plan.epochs)
        self._tally, self._told_at = Tally(), time.monotonic()
        self._view = self._view_of_tally = 0
        self.replica: Replica
        self.exchange: Exchange
        self._earlier: Exchange | None = None  # the exchange of the last View
        self._build()

    def _build(self) -> None:
        """Model, optimiser and schedule as they are before the first step."""
        plan, task = self.plan, self._task
        # Models that compete start from different weights.
        seed = plan.seed + (self.runtime.number if plan.held_out else 0)
        self.model = build_model(task, self.train_source, seed).to(self.device)
        self.model.train()
        self.optimizer = build_optimizer(task, self.model.parameters())
        self._schedule = build_schedule(
            task.schedule,  # type: ignore[arg-type]  # Task.with_defaults has filled it in
            self.optimizer,
            total_steps=plan.total_steps,
            epochs=plan.epochs,
        )
        self.metrics: dict[str, float] = {}
        self._buffers = [b for b in self.model.buffers() if b.is_floating_point()]
        self._buffers_before: list[torch.Tensor] = []
        self._evaluated_at = -1
        self._epochs_closed = 0
        self._is_pristine = True

    def enter_view(self) -> None:
        """Find out together with the other members from where to go on, and get ready for it."""
        self.tell_used()
        self.recorder.waits = True
        runtime = self.runtime
        self.plan = plan = runtime.plan
        low, high = share_of(plan.held_out, plan.size, runtime.rank)  # every worker has a part to judge models by
        self._held_out = None if self._held is None else self._held[low:high]
        mine, before = Standing(runtime.number), self.position.step
        if (exchange := self._earlier) is not None:
            way, effects = exchange.recovery, exchange.effects() if exchange.recovery == "merge" else None
            if way == "merge" and effects is None:
                way = "saved"
            # A worker that was stopped after its own update, while exchanging, has done that step.
            step = max(self.position.step, (effects or {}).get(self.replica.collective.rank, 0))
            mine = Standing.of(runtime.number, self._view, step, self.stint, way, effects or {})
            if step > self.position.step:
                self._buffers_before = []
        standings = [decode(data) for data in runtime.collective.gather(encode(mine))]
        agreed = agree(standings, count=self.order.count, batch=plan.batch, epochs=plan.epochs)
        self._forget_step_in_flight()
        private = self._load_saved(runtime.newest_checkpoint()) if agreed is None else self._share_state(agreed)
        self.position = self.start = self.stint.start
        self.replica, self.exchange = runtime.replicate(
            self.model,
            self.optimizer,
            private,
            step=self.start.step,
            steps_per_epoch=plan.steps_per_epoch,
            clip_norm=self._task.clip_norm,
            score=self._score if self._held_out is not None else None,
        )
        self._earlier = self.exchange
        self._update = Update(self.replica, self.exchange, self.recorder, calls=runtime, clip_norm=self._task.clip_norm)
        self._view_of_tally = runtime.view
        runtime.note(
            Opened(
                view=runtime.view,
                members=runtime.members,
                start=astuple(self.start),
                count=self.order.count,
                batch=plan.batch,
                epochs=plan.epochs,
                makeup=list(self.stint.makeup),
                went_back=agreed is None,
            )
        )
        self._went_on = self._account_of_view(before if agreed is None else 0) if runtime.view > 1 else None
        if self.ends_epoch(self.start):
            self.after_epoch(self.start)  # somebody was lost in the middle of it

    @property
    def lr(self) -> float:
        """The learning rate now."""
        return float(self.replica.optimizer.param_groups[0]["lr"])

    def fetch_ahead(self, start: Position) -> Ahead[Fetched] | InLine[Fetched]:
        """This worker's share of every step from `start` to the end, read ahead of time."""
        loaders = self.plan.loaders
        if loaders is None:
            loaders = 1 if isinstance(self.train_source, DatasetSource) else 0
        assert self.stint.start == start, "all start where the View does"
        shares = self.order.shares_of(self.stint, self.runtime.rank)
        samples = -(-self.plan.batch // self.plan.size)
        return ahead_of(self.train_source, shares, samples=samples, loaders=loaders, seed=self.plan.seed)

    def to_device(self, batch: Any) -> Any:
        """The batch where the model is."""
        return to_device(batch, self.device)

    def look_up(self) -> None:
        """Leave the loop if the workers are others from now on; suffer a fault if one is scripted for this step."""
        self.runtime.look_up()
        if self.runtime.run_dir is not None:
            faults.at_step(self.runtime.number, self.position.step, self.runtime.run_dir.path)

    def seed_step(self, position: Position) -> None:
        """Make what is random in the step depend on nothing but where it is."""
        self.runtime.seed_step(position.step)

    def forward_and_backward(self, share: Share, batch: Any) -> Local:
        """This worker's gradients, into the flat buffer; in pieces if memory demands."""
        self.runtime.in_flight = (share.position.step, share.indices)
        self._is_pristine = self.recorder.waits = False
        self._makes_up = share.after.extra > share.position.extra
        # A forward pass changes running statistics; if the step comes to nothing, that must, too.
        self._buffers_before = [b.clone() for b in self._buffers]
        self.replica.gradients.zero_()
        if len(share.indices) == 0:
            return self._without_samples(batch)
        total_loss, total_correct = 0.0, 0.0
        fraction: float | None = None
        for piece, part in pieces(batch, len(share.indices), self.plan.accumulate):
            loss, output, target = loss_of(self.replica.model, self._loss, piece)
            self.recorder.mark("forward")
            torch.autograd.backward(loss if part == 1.0 else loss * part)
            self.recorder.mark("backward")
            total_loss += float(loss.detach()) * part
            if share.position.step % _ACCURACY_EVERY == 0:  # the same steps on all workers, or the sum would be wrong
                fraction = correct_fraction(output, target)
                total_correct += (fraction or 0.0) * part
        return Local(total_loss, None if fraction is None else total_correct)

    def update(self, share: Share, local: Local) -> Outcome:
        """Exchange and update."""
        is_together = share.after.cursor == 0 or self.is_complete(share.after)
        outcome = self._update(share.weight, local.loss, local.correct, step=share.after.step, is_together=is_together)
        self.position, self._buffers_before = share.after, []
        self._tally.add(share.ranges, share.after.step)
        if time.monotonic() - self._told_at > _TELL_EVERY_S:
            self.tell_used()
        return outcome

    def after_update(self, outcome: Outcome) -> None:
        """Advance the schedule and remember the loss."""
        if outcome.is_finite and outcome.loss is not None:
            self.metrics["train/loss"] = outcome.loss
        if self._schedule is not None and outcome.is_finite and not self._makes_up:
            self._schedule.after_step(self.position.step - self.position.extra)
        if self._went_on is not None:
            if self.runtime.rank == 0:
                self.recorder.emit(self._went_on(self.position.step))
            self._went_on = None

    def on_non_finite(self, share: Share, loss: float, position: Position) -> None:
        """The loss is NaN or infinite somewhere; all workers know it. Nothing was updated."""
        mine = not math.isfinite(loss)
        is_rival = self.plan.held_out > 0
        if self.plan.on_nan == "skip" or is_rival:
            if mine:
                then = "Step skipped; the model will lose its next contest." if is_rival else "Step skipped."
                self.recorder.emit(Warned(rank=self.runtime.rank, message=f"{self._where(share, loss)} {then}"))
            return
        if not mine:
            raise PeerLost("Another worker's loss is not finite.")
        rate = f" The learning rate was {self.lr:g}." if position.step else ""
        raise NonFiniteLoss(
            f"{self._where(share, loss)}{rate} Nothing was updated with it. Lower the learning rate, set "
            "--clip-norm 1, look at these samples, or go on without such steps with --on-nan skip."
        )

    def after_epoch(self, position: Position) -> None:
        """Evaluate, if the plan says so."""
        self.recorder.flush(position, self.lr)
        every = self.plan.evaluate_every
        if every and position.epoch % every == 0:
            self.evaluate(position)
        if self._schedule is not None:
            self._schedule.after_epoch(self.metrics.get("train/loss", 0.0))
        self._epochs_closed = position.epoch
        self.recorder.start()

    def evaluate(self, position: Position) -> None:
        """Evaluate on the test data, unless that was done at this very step."""
        if self._test is None or len(self._test) == 0 or self._evaluated_at == position.step:
            return
        self.recorder.waits = True
        start = time.perf_counter()
        with self.exchange.shared(), self.replica.log.outside():
            if not self.runtime.has_global_batch_norm and not self.plan.held_out:
                for buffer in self.replica.model.buffers():
                    self.runtime.collective.broadcast_(buffer)  # rank 0's statistics are the run's
            result = evaluate(
                self.replica.model, self._loss, self._metrics, self._test, self.runtime.collective, self.device
            )
        self.metrics.update(result)
        self._evaluated_at = position.step
        if self.runtime.rank == 0:
            seconds = time.perf_counter() - start
            self.recorder.emit(Evaluated(epoch=position.epoch, step=position.step, metrics=result, seconds=seconds))

    def is_complete(self, position: Position) -> bool:
        """Whether the plan is fulfilled."""
        is_through = position.step - position.extra >= self.plan.total_steps or position.epoch >= self.plan.epochs
        return is_through and not self.stint.makes_up_after(position.step)

    def ends_epoch(self, position: Position) -> bool:
        """Whether an epoch is over that was not seen off yet. What is to be made up for comes first."""
        is_over = position.cursor == 0 and position.epoch > self._epochs_closed
        return is_over and not self.stint.makes_up_after(position.step)

    def tell_used(self) -> None:
        """Write into the ledger which samples this worker has used since the last time."""
        self._told_at = time.monotonic()
        if runs := self._tally.take():
            self.runtime.note(Used(self._view_of_tally, self.runtime.number, self._tally.steps, runs))

    def close_ledger(self, position: Position) -> None:
        """All is saved."""
        self.tell_used()
        if self.runtime.rank == 0:
            self.runtime.note(Closed(astuple(position), list(self._left_after(position))))

    def _left_after(self, position: Position) -> tuple[Range, ...]:
        """What is still to be made up for then."""
        return self.stint.next(self.plan.size, dict.fromkeys(range(self.plan.size), position.step)).makeup

    def save(self, position: Position, *, is_last: bool = False) -> None:
        """Make a checkpoint, in the background unless it is the last one. All workers call this together."""
        self.recorder.waits = True
        self.tell_used()
        left = self._left_after(position)
        self.runtime.save(
            position, self.replica, self.exchange, self._schedulers_state(), self.metrics, makeup=left, is_last=is_last
        )

    def _account_of_view(self, step_before: int) -> Callable[[int], WentOn]:
        """What will be told when the first step in this View is done."""
        runtime, start = self.runtime, self.start.step
        return lambda step: WentOn(
            view=runtime.view,
            members=runtime.members,
            step=step,
            redone=max(0, step_before - start),
            made_up=total(self.stint.makeup),
            seconds=time.monotonic() - runtime.noticed_at,
            bytes_of_state=runtime.bytes_of_state,
        )

    def _forget_step_in_flight(self) -> None:
        """A step that came to nothing leaves nothing behind."""
        if self._buffers_before:
            with torch.no_grad():
                for buffer, before in zip(self._buffers, self._buffers_before, strict=True):
                    buffer.copy_(before)
            self._buffers_before = []

    def _share_state(self, agreed: Agreement) -> dict[str, Any] | None:
        """Go on in place. What this worker holds for itself from now on."""
        runtime, exchange = self.runtime, self._earlier
        is_holder, is_needy = runtime.rank in agreed.holders, runtime.rank in agreed.needy
        if agreed.merges:
            with closing(runtime.collective.split(int(is_holder))) as survivors:
                if is_holder and exchange is not None:
                    exchange.merge(survivors)
        given = self._give_state(agreed)
        # Not before: if that had failed, this worker would stand where it stood.
        self.stint, self._view = agreed.stint, runtime.view
        if given:
            taken = unpacked(given)
            self._take_schedule(taken)
            if is_needy:
                self._load(taken)
                private: dict[str, Any] | None = taken["private"]
                return private
        return exchange.carried_state() if exchange is not None else None

    def _give_state(self, agreed: Agreement) -> bytes:
        """The giver's state: whole if somebody needs it, otherwise only what the furthest knows of the schedule."""
        runtime, exchange = self.runtime, self._earlier
        if not agreed.needy and not agreed.merges:
            return b""
        state = b""
        if runtime.rank == agreed.giver and exchange is not None:
            whole = {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "private": exchange.newcomers_state(),
            }
            schedule = {
                "schedulers": self._schedulers_state(),
                "lrs": [group["lr"] for group in self.optimizer.param_groups],
                "metrics": self.metrics,
                "epochs_closed": self._epochs_closed,
                "evaluated_at": self._evaluated_at,
            }
            state = packed({**schedule, **whole} if agreed.needy else schedule)
        given = runtime.collective.gather(state)[agreed.giver]
        runtime.bytes_of_state = len(given) if agreed.needy else 0
        return given

    def _take_schedule(self, state: dict[str, Any]) -> None:
        """Go on as far in the schedule as the furthest is."""
        if self._schedule is not None:
            self._schedule.scheduler.load_state_dict(state["schedulers"][0])
        for group, lr in zip(self.optimizer.param_groups, state["lrs"], strict=True):
            group["lr"] = lr
        self.metrics = dict(state["metrics"])
        self._epochs_closed, self._evaluated_at = state["epochs_closed"], state["evaluated_at"]

    def _load_saved(self, path: Path | None) -> dict[str, Any] | None:
        """Go on from a checkpoint, or from the beginning. What this worker held for itself then."""
        position, state = self.runtime.load_checkpoint(path)
        if state is None:
            if not self._is_pristine:
                self._build()
        else:
            self._load(state)
            self._epochs_closed, self._evaluated_at = position.epoch, -1
        makeup = tuple((e, low, high) for e, low, high in state.get("makeup", ())) if state is not None else ()
        self.stint = Stint(position, self.plan.size, self.order.count, self.plan.batch, self.plan.epochs, makeup)
        self._view = self.runtime.view
        private: list[dict[str, Any]] = state["private"] if state is not None else []
        return private[self.runtime.rank] if self.runtime.rank < len(private) else None

    def _load(self, state: dict[str, Any]) -> None:
        self._is_pristine = False
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self._schedule is not None:
            self._schedule.scheduler.load_state_dict(state["schedulers"][0])
        self.metrics = dict(state["metrics"])

    def _schedulers_state(self) -> list[dict[str, Any]]:
        return [self._schedule.scheduler.state_dict()] if self._schedule is not None else []

    def _score(self) -> tuple[float, float]:
        assert self._held_out is not None, "asked for in tournaments only"
        return mean_loss_and_accuracy(self.replica.model, self._loss, self.train_source, self._held_out, self.device)

    def _without_samples(self, batch: Any) -> Local:
        """A share without samples adds nothing, but batch-norm layers of the others wait for this worker."""
        if has_global_batch_norm(self.replica.model):
            with take_part_without_samples(self.replica.model):
                loss, _, _ = loss_of(self.replica.model, self._loss, batch)
                torch.autograd.backward(loss)
        with torch.no_grad():
            self.replica.gradients.zero_()
        self.recorder.mark("forward")
        return Local(0.0, 0.0)

    def _where(self, share: Share, loss: float) -> str:
        shown = ", ".join(str(int(i)) for i in share.indices[:8])
        more = f" and {len(share.indices) - 8} more" if len(share.indices) > 8 else ""
        return (
            f"The loss became {loss} on worker {self.runtime.rank} at step {share.position.step} "
            f"(epoch {share.position.epoch + 1}), samples {shown}{more}."
        )
