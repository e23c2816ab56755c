"""Evaluating a model on the test data, exactly, by all workers together.

The test data is cut into blocks of a fixed size, and the blocks are dealt to the workers; what each block came to is
gathered and added up in block order. So no sample is left out or counted twice, and the result does not depend on the
number of workers.
"""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import torch

from syncline.algorithms.partition import share, split
from syncline.comms.collective import Collective
from syncline.data.source import Source
from syncline.workers.build import Loss
from syncline.workers.compute import correct_fraction, loss_of, to_device
from syncline.workers.metrics import MetricSet
from syncline.workers.predicting import Predicting

__all__ = ["BLOCK", "evaluate", "mean_loss_and_accuracy"]

BLOCK = 256
"""How many samples are evaluated at once, if memory allows."""


def evaluate(
    model: torch.nn.Module,
    loss: Loss,
    metrics: MetricSet,
    test: Source,
    collective: Collective,
    device: torch.device,
    block: int = BLOCK,
) -> tuple[dict[str, float], Predicting]:
    """The loss and the metrics over all test samples, under `test/...`, and what was predicted.

    Both are the same on every worker.
    """
    was_training = model.training
    model.eval()
    blocks = split(len(test), -(-len(test) // block))
    first, last = share(len(blocks), collective.size, collective.rank)
    results: list[tuple[int, float, dict[str, Any]]] = []
    predicting = Predicting()
    with torch.inference_mode():
        for low, high in blocks[first:last]:
            batch = to_device(test.fetch(np.arange(low, high)), device)
            value, output, target = loss_of(model, loss, batch)
            states = metrics.states(output, target) if isinstance(target, torch.Tensor) else {}
            results.append((high - low, float(value), states))
            predicting.add(output, target, low)
    model.train(was_training)
    stream = io.BytesIO()
    torch.save((results, predicting.state()), stream)
    told = [torch.load(io.BytesIO(payload), weights_only=True) for payload in collective.gather(stream.getvalue())]
    everything = [block for blocks, _ in told for block in blocks]
    mean_loss = sum(count * value for count, value, _ in everything) / len(test)
    if not results:  # a worker without a block of its own still has to know its metrics
        _learn_outputs(model, metrics, test, device)
    computed = metrics.compute([states for _, _, states in everything])
    metrics_by_name = {"test/loss": mean_loss, **{f"test/{name}": value for name, value in computed.items()}}
    return metrics_by_name, Predicting.merged([state for _, state in told])


def mean_loss_and_accuracy(
    model: torch.nn.Module,
    loss: Loss,
    source: Source,
    indices: np.ndarray,
    device: torch.device,
    block: int = BLOCK,
) -> tuple[float, float]:
    """Over these samples of `source`, on this worker alone; the accuracy is NaN where there is no such thing."""
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


def _learn_outputs(model: torch.nn.Module, metrics: MetricSet, test: Source, device: torch.device) -> None:
    batch = to_device(test.fetch([0]), device)
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        _, output, target = loss_of(model, lambda o, _t: o.sum(), batch)
        metrics.states(output, target)
    model.train(was_training)
