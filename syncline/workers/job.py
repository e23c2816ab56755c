"""A task being trained by one worker, for the built-in loop.

Here: `Job`: building data, model and optimizer from a task, forward and backward, the end of an epoch, and what
follows from a loss that is not finite (noticed by `update.py`, which leaves model and optimizer unchanged). `loop.py`
calls its methods. Not here: the order of a step (`stepper.py`), evaluating (`evaluate.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from syncline import task_file
from syncline.compute.batch_norm import has_global_batch_norm, take_part_without_samples
from syncline.compute.dropout import Dropouts
from syncline.compute.recompute import recompute_activations
from syncline.compute.tuning import Tuning
from syncline.data.assignment import Position
from syncline.data.augmented import untransformed
from syncline.data.order import SampleOrder, Share, hold_out
from syncline.data.prefetch import Fetched, InlineFetcher, Prefetcher, prefetched
from syncline.data.source import DatasetSource
from syncline.errors import NonFiniteLoss, PeerFailed
from syncline.layouts.spread import ModelSpread
from syncline.layouts.stage_runner import MicroBatch, StageRunner
from syncline.planning.plan import Plan
from syncline.task import Task
from syncline.telemetry.events import WarningMessage
from syncline.workers.build import (
    BringsOptimizer,
    build_loss,
    build_model,
    build_optimizer,
    build_schedule,
    build_sources,
)
from syncline.workers.calibrate import CalibrationTrial, find_tuning
from syncline.workers.evaluate import Evaluator
from syncline.workers.forward import (
    check_trainable,
    checked_loss,
    inputs_and_target,
    loss_of,
    pieces,
    samples_in,
    to_device,
)
from syncline.workers.graph_division import GraphDivision
from syncline.workers.loss_tally import Local, LossTally
from syncline.workers.micro_batches import MicroBatches
from syncline.workers.session import Session
from syncline.workers.spreading import Spreader, pipeline_micro_batches
from syncline.workers.stages import Stages
from syncline.workers.stepper import Stepper
from syncline.workers.train_state import Parts, TrainState
from syncline.workers.tuning import computing_in, lay_out, planned, settle
from syncline.workers.update import Outcome

_ACCURACY_EVERY = 4
"""In which steps the training accuracy is computed: it is only displayed, and costs as much as an update."""

_FEW_SAMPLES = 8
"""With how many samples tuning is measured if memory is limited."""

_TRIAL_STEP = -1
"""The step of the dropout masks in trials."""


class Job:
    """A task being trained by one worker."""

    def __init__(self, task: Task, session: Session) -> None:
        """Build everything that does not depend on the other workers."""
        plan = session.plan
        self.session = session
        self.recorder, self.device = session.recorder, session.device
        self.train_source, self._test = build_sources(task, plan.seed)
        kept, held_out = hold_out(plan.seed, len(self.train_source), plan.held_out) if plan.held_out else (None, None)
        order = SampleOrder(
            seed=plan.seed,
            count=len(self.train_source) - plan.held_out,
            batch=plan.batch,
            kept=kept,
            groups=getattr(self.train_source, "group_sizes", None),
            window=getattr(self.train_source, "window", 1),
        )
        self.stepper = Stepper(session, order, epochs=plan.epochs, after_update=self.after_update)
        self._dropouts = Dropouts(plan.seed, session.warn)
        self._micro_batches = MicroBatches(session, self._dry_run)
        self._stages = Stages(plan.total_steps)
        self._held_out = held_out
        self._spread: ModelSpread | None = None
        partitioned = session.layout.partitioned
        self._division = GraphDivision(session, partitioned) if partitioned is not None else None
        self._has_built = False
        self._take(task)
        self.state = TrainState(self._build)

    def _take(self, task: Task) -> None:
        session = self.session
        self._task = task
        self._loss = build_loss(task.loss)  # type: ignore[arg-type]  # Task.with_defaults has filled it in
        self._evaluator = Evaluator(task, session, self._loss, self._test, self._stages, self._micro_batches)
        self._spreader = Spreader(session, self._loss)

    def _build(self) -> Parts:
        """Model, optimizer and schedule before the first step."""
        if self._has_built and self.session.link is not None:
            # The run starts over. The model may have been given as an object, which has been trained since, and the
            # loss may refer to it.
            self._take(task_file.read(Path(self.session.link.files.task_path)))
        self._has_built = True
        plan, task = self.plan, self._task
        # Competing models start from different weights.
        seed = plan.seed + (self.session.worker_id if plan.held_out else 0)
        model = build_model(task, self.train_source, seed).to(self.device)
        check_trainable(model)
        model.train()
        self._brings_optimizer = model if isinstance(model, BringsOptimizer) else None
        if plan.checkpoint_activations and not recompute_activations(model):
            self.session.warn("checkpoint_activations saves no memory: this model has no blocks to recompute.")
        # Servers update slices of parameters: only the unfused update gives the same bits for every slicing.
        optimizer = build_optimizer(task, model, may_fuse=not plan.servers)
        self._schedule = build_schedule(
            task.schedule,  # type: ignore[arg-type]  # Task.with_defaults has filled it in
            optimizer,
            total_steps=plan.total_steps,
            epochs=plan.epochs,
        )
        return Parts(model, optimizer, [self._schedule.scheduler] if self._schedule is not None else [])

    def prepare(self) -> None:
        """Get ready to train in the View that the session has joined; all members call this together."""
        stepper = self.stepper
        self._dropouts.forget()  # a step that was interrupted is repeated with other samples
        score = None
        if self._held_out is not None:
            score = self._evaluator.score_on(lambda: stepper.replica.model, self.train_source, self._held_out)
        stepper.enter_view(
            self.state, clip_norm=self._task.clip_norm, score=score, tune=self._tune, spread=self._spread_out
        )
        self._micro_batches.divide(stepper.replica)
        if self._division is not None:
            self._division.enter_view(stepper)
        start = stepper.progress.start
        if self.ends_epoch(start):
            self.after_epoch(start)  # the last View ended before all workers had done so

    @property
    def plan(self) -> Plan:
        """The plan for the current View."""
        return self.session.plan

    @property
    def metrics(self) -> dict[str, float]:
        return self.state.metrics

    @property
    def tuning(self) -> Tuning:
        return self.state.tuning or planned(self.plan)

    def fetch_ahead(self) -> Prefetcher[Fetched] | InlineFetcher[Fetched]:
        """This worker's share of every step from the start of the View to the end of the run, prefetched."""
        loaders = self.plan.loaders
        if loaders is None:
            loaders = self.tuning.loaders
        if loaders is None:
            loaders = 1 if isinstance(untransformed(self.train_source), DatasetSource) else 0
        progress = self.stepper.progress
        shares = progress.order.shares_of(progress.assignment, self.session.place.share)
        samples = -(-self.plan.batch // self.session.place.grid.shares)
        return prefetched(
            self.train_source,
            shares,
            samples=samples,
            loaders=loaders,
            seed=self.plan.seed,
            warn=self.session.warn_of_worker,
        )

    def forward_and_backward(self, share: Share, batch: Any) -> Local:
        """Compute this worker's gradients into the gradient buffer, in pieces if memory is limited."""
        replica, exchange = self.stepper.replica, self.stepper.exchange
        new_stage = self._stages.before_step(replica.model, self.state.optimizer, share.position)
        if new_stage is not None and self.session.rank == 0:
            self.recorder.emit(new_stage)
        if self._brings_optimizer is not None:
            self._brings_optimizer.begin_step(share.batch)
        replica.gradients.zero_()
        if len(share.indices) == 0:
            return self._without_samples(batch)
        parts = list(pieces(batch, share.indices, self._micro_batches.of(share)))
        step = share.position.step
        tally = LossTally(with_accuracy=step % _ACCURACY_EVERY == 0)
        if self._division is not None and self._division.is_divided:
            with self._dropouts.of(step, share.indices):
                return self._division.compute(self.stepper, share, batch, self._loss, tally)
        runner = self._spread.runner if self._spread is not None else None
        if runner is not None:
            return self._run_stage(runner, step, parts, tally)
        for number, (piece, samples, part) in enumerate(parts, start=1):
            with computing_in(self.tuning.precision, self.device), self._dropouts.of(step, samples):
                loss, output, target = loss_of(replica.model, self._loss, piece)
            self.recorder.mark("forward")
            if number == len(parts):
                exchange.before_backward(share.weight)
            torch.autograd.backward(loss if part == 1.0 else loss * part)
            self.recorder.mark("backward")
            tally.add(loss, output, target, part)
        return tally.result()

    def _run_stage(
        self, runner: StageRunner, step: int, parts: list[tuple[Any, np.ndarray, float]], tally: LossTally
    ) -> Local:
        """Compute this worker's stage of the pipeline; only the last one knows the loss."""
        model = self.stepper.replica.model
        split = [inputs_and_target(piece) for piece, _, _ in parts]

        def loss(number: int, output: Any) -> torch.Tensor:
            target = split[number][1]
            value = checked_loss(self._loss(output, target), model)
            tally.add(value, output, target, parts[number][2])
            return value

        @contextmanager
        def computing(number: int) -> Iterator[None]:
            dropout = self._dropouts.of(step, parts[number][1], runner.first_dropout)
            with computing_in(self.tuning.precision, self.device), dropout:
                yield

        micro_batches = [MicroBatch(inputs, part) for (inputs, _), (_, _, part) in zip(split, parts, strict=True)]
        runner.run(micro_batches, loss, computing=computing, mark=self.recorder.mark)
        if runner.is_last:
            return tally.result()
        has_accuracy = tally.with_accuracy and self._spread is not None and self._spread.has_accuracy
        return Local(0.0, 0.0 if has_accuracy else None)

    def after_update(self, share: Share, outcome: Outcome, loss: float | None) -> None:
        """Apply the NaN policy, remember the loss, advance the schedule."""
        if not outcome.is_finite:
            _handle_non_finite(self.session, share, loss or 0.0, self.state.lr)
            return
        if outcome.loss is not None:
            self.metrics["train/loss"] = outcome.loss
        makes_up = share.after.extra > share.position.extra
        if self._schedule is not None and not makes_up:
            self._schedule.after_step(share.after.step - share.after.extra)

    def ends_epoch(self, position: Position) -> bool:
        """Whether an epoch ends at `position` and `after_epoch` is due; samples to be made up for come first."""
        is_over = position.cursor == 0 and position.epoch > self.state.epochs_closed
        return is_over and not self.stepper.progress.assignment.has_requeued_after(position.step)

    def after_epoch(self, position: Position) -> None:
        """Evaluate if the plan says so, and advance the schedule."""
        self.recorder.flush(position, self.state.lr)
        every = self.plan.evaluate_every
        if every and position.epoch % every == 0:
            self.evaluate(position)
        if self._schedule is not None:
            self._schedule.after_epoch(self.metrics.get("train/loss", 0.0))
        self.state.epochs_closed = position.epoch
        self.recorder.start()

    def evaluate(self, position: Position) -> None:
        self._evaluator.evaluate(self.stepper, position)

    def _tune(self) -> None:
        """Compute as the other members do; measure what is fastest in the first View."""
        found = settle(self.session.collective, self.state.tuning, self._find_tuning)
        self.state.tuning = planned(self.plan, found)
        lay_out(self.state.model, self.state.optimizer, self.state.tuning)

    def _spread_out(self) -> ModelSpread | None:
        """How the model is spread over the members, if they do not hold it whole."""
        session, source, count = self.session, self.train_source, self.stepper.progress.order.count
        samples, pipeline = min(-(-self.plan.batch // session.place.grid.shares), count), session.layout.pipeline
        pieces = 1 if pipeline is None else pipeline_micro_batches(pipeline, samples, self.state.model)

        def example(samples: int) -> Any:
            return to_device(source.fetch(np.arange(min(max(2, samples), count))), self.device)

        self._spread = self._spreader.spread(
            self.state.model,
            example,
            micro_batch=-(-samples // pieces),
            micro_batches=pieces,
            optimizer=self.state.optimizer,
        )
        return self._spread

    def _find_tuning(self) -> Tuning:
        progress = self.stepper.progress
        first = next(progress.order.shares_of(progress.assignment, self.session.place.share or 0), None)
        if first is None:  # no step is left to tune for
            return planned(self.plan)
        if self.plan.memory_limit_bytes is not None:
            first = replace(first, indices=first.indices[:_FEW_SAMPLES])
        indices, source = first.indices, self.train_source
        trial = CalibrationTrial(
            self.state.model,
            self.state.optimizer,
            self._trial_loss,
            lambda samples: to_device(source.fetch(indices[:samples]), self.device),
            samples=len(indices),
            device=self.device,
            has_slow_data=isinstance(untransformed(source), DatasetSource),
        )
        return find_tuning(self.session, trial, batch=self.plan.batch)

    def _trial_loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """The loss outside of any step, with masks that all trials have in common."""
        self._dropouts.forget()
        with self._dropouts.of(_TRIAL_STEP, np.arange(samples_in(batch))):
            return loss_of(model, self._loss, batch)[0]

    def _dry_run(self, samples: int) -> None:
        """Forward and backward on some samples; leaves no gradients."""
        replica = self.stepper.replica
        batch = to_device(self.train_source.fetch(np.arange(samples)), self.device)
        with computing_in(self.tuning.precision, self.device):
            loss = self._trial_loss(replica.model, batch)
        torch.autograd.backward(loss)
        replica.gradients.zero_()

    def _without_samples(self, batch: Any) -> Local:
        """A share without samples adds nothing, but the other workers' batch-norm layers wait for this worker."""
        replica = self.stepper.replica
        if has_global_batch_norm(replica.model) and self.session.place.share is not None:
            with take_part_without_samples(replica.model):
                with computing_in(self.tuning.precision, self.device):
                    loss, _, _ = loss_of(replica.model, self._loss, batch)
                torch.autograd.backward(loss)
        with torch.no_grad():
            replica.gradients.zero_()
        self.recorder.mark("forward")
        return Local(0.0, 0.0)


_SHOWN = 8
"""How many samples the message names."""


def _handle_non_finite(session: Session, share: Share, loss: float, lr: float) -> None:
    """Warn and skip the step, or raise; `loss` is this worker's own, which may be finite."""
    plan, is_mine = session.plan, not math.isfinite(loss)
    is_competing = plan.held_out > 0
    if plan.on_nan == "skip" or is_competing:
        if is_mine:
            then = "Step skipped; the model will lose its next contest." if is_competing else "Step skipped."
            message = f"{_what_happened(session, share, loss)} {then}"
            session.recorder.emit(WarningMessage(worker_id=session.worker_id, message=message))
        return
    if not is_mine:
        raise PeerFailed("The loss of another worker is not finite.")
    rate = f" The learning rate was {lr:g}." if share.position.step else ""
    raise NonFiniteLoss(
        f"{_what_happened(session, share, loss)}{rate} The model was not updated. Lower the learning rate, set "
        "--clip-norm 1, inspect these samples, or skip such steps with --on-nan skip.",
        worker_id=session.worker_id,
        step=share.position.step,
        loss=loss,
        samples=[int(i) for i in share.indices[:_SHOWN]],
    )


def _what_happened(session: Session, share: Share, loss: float) -> str:
    shown = ", ".join(str(int(i)) for i in share.indices[:_SHOWN])
    more = f" and {len(share.indices) - _SHOWN} more" if len(share.indices) > _SHOWN else ""
    return (
        f"The loss became {loss} on worker {session.worker_id} at step {share.position.step} "
        f"(epoch {share.position.epoch + 1}), samples {shown}{more}."
    )
