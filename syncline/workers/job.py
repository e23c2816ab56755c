"""Everything that the training loop uses, built once from a task and a runtime.

Here: `Job`. Its methods are the moments that `loop.py` puts in order. Not here: where the run is in its data, and going
on with other workers (`course.py`).
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from syncline.algorithms.partition import share as share_of
from syncline.data.augmented import untransformed
from syncline.data.order import Position, SampleOrder, Share, hold_out
from syncline.data.prefetch import Ahead, Fetched, InLine, ahead_of
from syncline.data.source import DatasetSource
from syncline.errors import NonFiniteLoss, PeerLost
from syncline.plan.plan import Plan
from syncline.plan.tuning import Tuning
from syncline.strategies.exchange import Exchange, Replica
from syncline.task import Task
from syncline.telemetry.events import Evaluated, Warned
from syncline.telemetry.predictions import write_predictions
from syncline.workers.batch_norm import has_global_batch_norm, take_part_without_samples
from syncline.workers.build import (
    build_loss,
    build_model,
    build_optimizer,
    build_schedule,
    build_sources,
    class_names,
)
from syncline.workers.calibrate import find_tuning
from syncline.workers.compute import correct_fraction, loss_of, pieces, to_device
from syncline.workers.course import Course
from syncline.workers.evaluate import evaluate, mean_loss_and_accuracy
from syncline.workers.metrics import MetricSet
from syncline.workers.micro_batches import MicroBatches
from syncline.workers.predicting import Predicting
from syncline.workers.recompute import recompute_activations
from syncline.workers.runtime import Runtime
from syncline.workers.stages import Stages
from syncline.workers.step import Outcome, Update
from syncline.workers.trained import Parts, Trained
from syncline.workers.tuning import computing_in, lay_out, planned, settle

__all__ = ["Job", "Local"]

_ACCURACY_EVERY = 4
"""In which steps the accuracy on the training data is looked at: it is for the eye, and takes as long as an update."""

_FEW_SAMPLES = 8
"""With so many is tried out what is fastest, if memory is short."""

_KEEP_PREDICTIONS_S = 2.0
"""How often what was predicted is written at most, but for the last time."""

_NOTHING = np.empty(0, np.int64)


class Local(NamedTuple):
    """What this worker's share came to."""

    loss: float
    correct: float | None


class Job:
    """A task being trained by one worker."""

    def __init__(self, task: Task, runtime: Runtime) -> None:
        """Build everything that concerns nobody else."""
        plan = runtime.plan
        self.runtime = runtime
        self.recorder, self.device = runtime.recorder, runtime.device
        self._task = task
        self.train_source, self._test = build_sources(task, plan.seed)
        kept, held = hold_out(plan.seed, len(self.train_source), plan.held_out) if plan.held_out else (None, None)
        self._held = held
        order = SampleOrder(
            seed=plan.seed,
            count=len(self.train_source) - plan.held_out,
            batch=plan.batch,
            kept=kept,
            groups=getattr(self.train_source, "group_sizes", None),
            window=getattr(self.train_source, "window", 1),
        )
        self.course = Course(runtime, order, epochs=plan.epochs)
        self._loss = build_loss(task.loss)  # type: ignore[arg-type]  # Task.with_defaults has filled it in
        self._metrics = MetricSet(task.metrics)  # type: ignore[arg-type]  # likewise
        self._micro_batches = MicroBatches(runtime, self._try_out)
        self._stages = Stages(plan.total_steps)
        self.trained = Trained(self._build)
        self._predictions_kept_at = -math.inf

    def _build(self) -> Parts:
        """Model, optimiser and schedule as they are before the first step."""
        plan, task = self.plan, self._task
        # Models that compete start from different weights.
        seed = plan.seed + (self.runtime.number if plan.held_out else 0)
        model = build_model(task, self.train_source, seed).to(self.device)
        model.train()
        if plan.checkpoint_activations and not recompute_activations(model):
            self.runtime.warn("checkpoint_activations saves nothing: this model has no blocks to be computed twice.")
        # Servers step with parts of parameters, not all at a time: the plain step gives the same bits for any part.
        optimizer = build_optimizer(task, model, may_fuse=not plan.servers)
        self._schedule = build_schedule(
            task.schedule,  # type: ignore[arg-type]  # Task.with_defaults has filled it in
            optimizer,
            total_steps=plan.total_steps,
            epochs=plan.epochs,
        )
        return Parts(model, optimizer, [self._schedule.scheduler] if self._schedule is not None else [])

    def enter_view(self) -> None:
        """Go on with the present members."""
        runtime, plan = self.runtime, self.plan
        low, high = share_of(plan.held_out, plan.size, runtime.rank)  # every worker has a part to judge models by
        self._held_out = None if self._held is None else self._held[low:high]
        score = self._score if self._held_out is not None else None
        self.course.enter_view(self.trained, clip_norm=self._task.clip_norm, score=score, settle=self._settle)
        runtime.in_flight = (self.course.start.step, _NOTHING)
        self._update = Update(self.replica, self.exchange, self.recorder, calls=runtime, clip_norm=self._task.clip_norm)
        self._micro_batches.enter_view(self.replica)
        if self.ends_epoch(self.course.start):
            self.after_epoch(self.course.start)  # somebody was lost in the middle of it

    @property
    def plan(self) -> Plan:
        """The plan for the present View."""
        return self.runtime.plan

    @property
    def replica(self) -> Replica:
        """This worker's replica in the present View."""
        return self.course.replica

    @property
    def exchange(self) -> Exchange:
        """The exchange in the present View."""
        return self.course.exchange

    @property
    def metrics(self) -> dict[str, float]:
        """The latest numbers."""
        return self.trained.metrics

    @property
    def tuning(self) -> Tuning:
        """How this run computes."""
        return self.trained.tuning or planned(self.plan)

    def fetch_ahead(self) -> Ahead[Fetched] | InLine[Fetched]:
        """This worker's share of every step from the start of the View to the end, read ahead of time."""
        loaders = self.plan.loaders
        if loaders is None:
            loaders = self.tuning.loaders
        if loaders is None:
            loaders = 1 if isinstance(untransformed(self.train_source), DatasetSource) else 0
        shares = self.course.order.shares_of(self.course.stint, self.runtime.rank)
        samples = -(-self.plan.batch // self.plan.size)
        return ahead_of(self.train_source, shares, samples=samples, loaders=loaders, seed=self.plan.seed)

    def to_device(self, batch: Any) -> Any:
        """The batch where the model is."""
        return to_device(batch, self.device)

    def seed_step(self, position: Position) -> None:
        """Make what is random in the step depend on nothing but where it is."""
        self.runtime.seed_step(position.step)

    def forward_and_backward(self, share: Share, batch: Any) -> Local:
        """This worker's gradients, into the flat buffer; in pieces if memory demands."""
        self.runtime.in_flight = (share.position.step, share.indices)
        self.recorder.waits = False
        self.trained.begin_step(may_fail=self.course.can_be_interrupted)
        new_stage = self._stages.before_step(self.replica.model, self.trained.optimizer, share.position)
        if new_stage is not None and self.runtime.rank == 0:
            self.recorder.emit(new_stage)
        self.replica.gradients.zero_()
        if len(share.indices) == 0:
            return self._without_samples(batch)
        total_loss, total_correct = 0.0, 0.0
        fraction: float | None = None
        parts = list(pieces(batch, len(share.indices), self._micro_batches.of(share)))
        for number, (piece, part) in enumerate(parts, start=1):
            with computing_in(self.tuning.precision, self.device):
                loss, output, target = loss_of(self.replica.model, self._loss, piece)
            self.recorder.mark("forward")
            if number == len(parts):
                self.exchange.before_backward(share.weight)
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
        self.trained.end_step()
        self.course.advance(share)
        self.runtime.in_flight = (share.after.step, _NOTHING)  # what is yet to be read for it is not known here
        return outcome

    def after_update(self, share: Share, outcome: Outcome) -> None:
        """Advance the schedule and remember the loss."""
        if outcome.is_finite and outcome.loss is not None:
            self.metrics["train/loss"] = outcome.loss
        makes_up = share.after.extra > share.position.extra
        if self._schedule is not None and outcome.is_finite and not makes_up:
            self._schedule.after_step(share.after.step - share.after.extra)
        self.course.tell_how_it_went_on()

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
        rate = f" The learning rate was {self.trained.lr:g}." if position.step else ""
        raise NonFiniteLoss(
            f"{self._where(share, loss)}{rate} Nothing was updated with it. Lower the learning rate, set "
            "--clip-norm 1, look at these samples, or go on without such steps with --on-nan skip."
        )

    def after_epoch(self, position: Position) -> None:
        """Evaluate, if the plan says so."""
        self.recorder.flush(position, self.trained.lr)
        every = self.plan.evaluate_every
        if every and position.epoch % every == 0:
            self.evaluate(position)
        if self._schedule is not None:
            self._schedule.after_epoch(self.metrics.get("train/loss", 0.0))
        self.trained.epochs_closed = position.epoch
        self.recorder.start()

    def evaluate(self, position: Position) -> None:
        """Evaluate on the test data, unless that was done at this very step."""
        if self._test is None or len(self._test) == 0 or self.trained.evaluated_at == position.step:
            return
        self.recorder.waits = True
        start = time.perf_counter()
        stage = self._stages.before_evaluation(self.replica.model, position)
        with self.exchange.shared(), self.replica.log.outside():
            if not self.runtime.has_global_batch_norm and not self.plan.held_out:
                for buffer in self.replica.model.buffers():
                    self.runtime.collective.broadcast_(buffer)  # rank 0's statistics are the run's
            result, predicting = evaluate(
                self.replica.model, self._loss, self._metrics, self._test, self.runtime.collective, self.device,
                self._micro_batches.at_once,
            )  # fmt: skip
        if stage is not None:
            result[f"test/loss_{stage}"] = result["test/loss"]
        self.metrics.update(result)
        self.trained.evaluated_at = position.step
        if self.runtime.rank == 0:
            seconds = time.perf_counter() - start
            self.recorder.emit(Evaluated(epoch=position.epoch, step=position.step, metrics=result, seconds=seconds))
            self._keep(predicting, position)

    def _keep(self, predicting: Predicting, position: Position) -> None:
        """Leave what was predicted in the run directory; where evaluations are frequent, not each time."""
        is_due = time.monotonic() - self._predictions_kept_at >= _KEEP_PREDICTIONS_S or self.is_complete(position)
        run_dir, test = self.runtime.run_dir, self._test
        if not is_due or run_dir is None or test is None:
            return
        self._predictions_kept_at = time.monotonic()
        found = predicting.told(test, epoch=position.epoch, step=position.step, class_names=class_names(self._task))
        try:
            if found is not None:
                write_predictions(run_dir, found)
        except OSError as error:
            self.runtime.warn(f"predictions.json could not be written: {error.strerror}. Training goes on.")

    def is_complete(self, position: Position) -> bool:
        """Whether the plan is fulfilled."""
        is_through = position.step - position.extra >= self.plan.total_steps or position.epoch >= self.plan.epochs
        return is_through and not self.course.stint.makes_up_after(position.step)

    def ends_epoch(self, position: Position) -> bool:
        """Whether an epoch is over that was not seen off yet. What is to be made up for comes first."""
        is_over = position.cursor == 0 and position.epoch > self.trained.epochs_closed
        return is_over and not self.course.stint.makes_up_after(position.step)

    def _settle(self) -> None:
        """Compute as the others do; find out how in the first View."""
        found = settle(self.runtime.collective, self.trained.tuning, self._find_tuning)
        self.trained.tuning = planned(self.plan, found)
        lay_out(self.trained.model, self.trained.optimizer, self.trained.tuning)

    def _find_tuning(self) -> Tuning:
        model, optimizer = self.trained.model, self.trained.optimizer
        first = next(self.course.order.shares_of(self.course.stint, self.runtime.rank), None)
        if first is None:  # all is done; only the end is left
            return planned(self.plan)
        if self.plan.memory_limit_bytes is not None:
            first = replace(first, indices=first.indices[:_FEW_SAMPLES])
        return find_tuning(self.runtime, model, optimizer, self._loss, self.train_source, first)

    def _score(self) -> tuple[float, float]:
        assert self._held_out is not None, "asked for in tournaments only"
        return mean_loss_and_accuracy(
            self.replica.model, self._loss, self.train_source, self._held_out, self.device, self._micro_batches.at_once
        )

    def _try_out(self, samples: int) -> None:
        """Forward and backward of some samples, of which nothing remains."""
        batch = self.to_device(self.train_source.fetch(np.arange(samples)))
        with computing_in(self.tuning.precision, self.device):
            loss, _, _ = loss_of(self.replica.model, self._loss, batch)
        torch.autograd.backward(loss)
        self.replica.gradients.zero_()

    def _without_samples(self, batch: Any) -> Local:
        """A share without samples adds nothing, but batch-norm layers of the others wait for this worker."""
        if has_global_batch_norm(self.replica.model):
            with take_part_without_samples(self.replica.model):
                with computing_in(self.tuning.precision, self.device):
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
