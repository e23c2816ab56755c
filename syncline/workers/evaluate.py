"""Evaluating a model on the test data, exactly, by all workers together.

Here: `evaluate`, and `Evaluator`, which runs it for a job and reports the result. The test data is cut into blocks of a
fixed size, and the blocks are divided among the workers; the results are gathered and summed in block order. So every
sample counts once, and the result does not depend on the number of workers. Not here: metrics (`metrics.py`), and which
samples were misclassified (`predictions.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from syncline.comms.collective import Collective
from syncline.comms.serialize import dump_state, load_state
from syncline.compute.partition import share, split
from syncline.data.assignment import Position
from syncline.data.source import Source
from syncline.models.destin.network import DestinNetwork
from syncline.task import Task
from syncline.telemetry.centroids import write_centroids
from syncline.telemetry.events import Evaluated
from syncline.telemetry.predictions import write_predictions
from syncline.workers.build import Loss, class_names
from syncline.workers.forward import correct_fraction, loss_of, to_device
from syncline.workers.metrics import MetricSet
from syncline.workers.micro_batches import BLOCK, MicroBatches
from syncline.workers.predictions import PredictionTally, centroids_of
from syncline.workers.session import Session
from syncline.workers.stages import Stages
from syncline.workers.stepper import Stepper

_WRITE_PREDICTIONS_EVERY_S = 2.0
"""predictions.json is written at most this often, except at the end of the run."""


class Evaluator:
    """Evaluates one job's model on its test data."""

    def __init__(
        self,
        task: Task,
        session: Session,
        loss: Loss,
        test: Source | None,
        stages: Stages,
        micro_batches: MicroBatches,
    ) -> None:
        self._task, self._session, self._loss, self._test = task, session, loss, test
        self._stages, self._micro_batches = stages, micro_batches
        self._metrics = MetricSet(task.metrics)  # type: ignore[arg-type]  # Task.with_defaults has filled it in
        self._written_at = -math.inf

    def evaluate(self, stepper: Stepper, position: Position) -> None:
        """Evaluate on the test data, unless that was done at this very step."""
        session, state, replica = self._session, stepper.state, stepper.replica
        if self._test is None or len(self._test) == 0 or state.evaluated_at == position.step:
            return
        session.recorder.waits = True
        start = time.perf_counter()
        stage = self._stages.before_evaluation(replica.model, position)
        with stepper.exchange.shared(), replica.log.outside():
            if not session.has_global_batch_norm and not session.plan.held_out:
                for buffer in replica.model.buffers():
                    session.collective.broadcast_(buffer)  # rank 0's running statistics are the run's
            result, predictions = evaluate(
                replica.model, self._loss, self._metrics, self._test, session.collective, session.device,
                self._micro_batches.at_once,
            )  # fmt: skip
        if stage is not None:
            result[f"test/loss_{stage}"] = result["test/loss"]
        state.metrics.update(result)
        state.evaluated_at = position.step
        if session.rank == 0:
            seconds = time.perf_counter() - start
            session.recorder.emit(Evaluated(epoch=position.epoch, step=position.step, metrics=result, seconds=seconds))
            self._write(predictions, position, is_last=stepper.progress.is_complete(position))
            self._write_centroids(replica.model, position)

    def score_on(
        self, model: Callable[[], torch.nn.Module], source: Source, indices: np.ndarray
    ) -> Callable[[], tuple[float, float]]:
        """A function for this worker's (loss, accuracy) on its part of the held-out samples `indices` of `source`."""
        low, high = share(len(indices), self._session.plan.size, self._session.rank)
        return lambda: mean_loss_and_accuracy(
            model(), self._loss, source, indices[low:high], self._session.device, self._micro_batches.at_once
        )

    def _write_centroids(self, model: torch.nn.Module, position: Position) -> None:
        if not isinstance(model, DestinNetwork) or self._session.run_dir is None:
            return
        try:
            write_centroids(self._session.run_dir, centroids_of(model, position.step))
        except OSError as error:
            self._session.warn(f"centroids.json could not be written: {error.strerror}. Training continues.")

    def _write(self, predictions: PredictionTally, position: Position, *, is_last: bool) -> None:
        """Write predictions.json; where evaluations are frequent, not every time."""
        is_due = is_last or time.monotonic() - self._written_at >= _WRITE_PREDICTIONS_EVERY_S
        run_dir, test = self._session.run_dir, self._test
        if not is_due or run_dir is None or test is None:
            return
        self._written_at = time.monotonic()
        found = predictions.summarize(
            test, epoch=position.epoch, step=position.step, class_names=class_names(self._task)
        )
        try:
            if found is not None:
                write_predictions(run_dir, found)
        except OSError as error:
            self._session.warn(f"predictions.json could not be written: {error.strerror}. Training continues.")


def evaluate(
    model: torch.nn.Module,
    loss: Loss,
    metrics: MetricSet,
    test: Source,
    collective: Collective,
    device: torch.device,
    block: int = BLOCK,
) -> tuple[dict[str, float], PredictionTally]:
    """The loss and the metrics over all test samples, under `test/...`, and the predictions.

    Both are the same on every worker.
    """
    was_training = model.training
    model.eval()
    blocks = split(len(test), -(-len(test) // block))
    first, last = share(len(blocks), collective.size, collective.rank)
    results: list[tuple[int, float, dict[str, Any]]] = []
    predictions = PredictionTally()
    with torch.inference_mode():
        for low, high in blocks[first:last]:
            batch = to_device(test.fetch(np.arange(low, high)), device)
            value, output, target = loss_of(model, loss, batch)
            states = metrics.states(output, target) if isinstance(target, torch.Tensor) else {}
            results.append((high - low, float(value), states))
            predictions.add(output, target, low)
    model.train(was_training)
    gathered = [load_state(data) for data in collective.all_gather(dump_state((results, predictions.state())))]
    everything = [block for blocks, _ in gathered for block in blocks]
    mean_loss = sum(count * value for count, value, _ in everything) / len(test)
    if not results:  # a worker without a block has not built its metrics yet
        _build_metrics(model, metrics, test, device)
    computed = metrics.compute([states for _, _, states in everything])
    metrics_by_name = {"test/loss": mean_loss, **{f"test/{name}": value for name, value in computed.items()}}
    return metrics_by_name, PredictionTally.merged([state for _, state in gathered])


def mean_loss_and_accuracy(
    model: torch.nn.Module,
    loss: Loss,
    source: Source,
    indices: np.ndarray,
    device: torch.device,
    block: int = BLOCK,
) -> tuple[float, float]:
    """Over these samples of `source`, on this worker alone; the accuracy is NaN if this is not a classification."""
    was_training = model.training
    model.eval()
    total_loss, total_correct = 0.0, 0.0
    with torch.inference_mode():
        for low, high in split(len(indices), max(1, -(-len(indices) // block))):
            batch = to_device(source.fetch(indices[low:high]), device)
            value, output, target = loss_of(model, loss, batch)
            fraction = correct_fraction(output, target)
            total_loss += float(value) * (high - low)
            total_correct += (math.nan if fraction is None else fraction) * (high - low)
    model.train(was_training)
    return total_loss / len(indices), total_correct / len(indices)


def _build_metrics(model: torch.nn.Module, metrics: MetricSet, test: Source, device: torch.device) -> None:
    batch = to_device(test.fetch([0]), device)
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        _, output, target = loss_of(model, lambda o, _t: o.sum(), batch)
        metrics.states(output, target)
    model.train(was_training)
