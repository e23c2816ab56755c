"""Inference throughput of a model in one process, by batch size.

Here: one thread, random images in memory: eager, in torch's inference mode, with channels last, traced and frozen by
torch.jit, and as Syncline evaluates (`workers/evaluate.py`, including data loading, loss and accuracy). Not here:
training (`training.py`). torch.compile is not measured: it compiles for up to half a minute per batch size.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager

import torch
from torch import nn

from syncline.comms.collective import Solo
from syncline.config.spec import Spec
from syncline.data.source import ArraySource
from syncline.lab.bench.harness import BenchSettings, Contender, Suite
from syncline.lab.bench.overhead import as_in_a_worker
from syncline.models import zoo
from syncline.workers.build import build_loss
from syncline.workers.evaluate import evaluate
from syncline.workers.metrics import MetricSet

_SHAPES = {"lenet": (1, 28, 28), "resnet18": (3, 32, 32)}
_BATCHES = (1, 8, 64, 256)
_CLASSES = 10
_SEED = 0
_BLOCKS = 8
"""Batches per evaluation call, which has a fixed cost."""
_WHAT = {
    "eager": "model.eval() under torch.no_grad().",
    "inference mode": "The same under torch.inference_mode().",
    "channels last": "Inference mode, model and images with channels last.",
    "torch.jit": "Inference mode, traced and prepared by torch.jit.optimize_for_inference.",
    "syncline evaluate": f"As syncline train evaluates, {_BLOCKS} batches, including data loading, loss and accuracy.",
}


def suites(settings: BenchSettings) -> Generator[Suite, None, None]:
    """Each model with each batch size."""
    chosen = {"lenet": (1, 64)} if settings.quick else dict.fromkeys(_SHAPES, _BATCHES)
    seconds = 0.1 if settings.quick else 0.5
    with as_in_a_worker():
        for model, batches in chosen.items():
            for batch in batches:
                yield _suite(model, batch, seconds, rounds_per_repeat=1 if settings.quick else 2)


def methods(model: str, batch: int) -> dict[str, Callable[[], int]]:
    """The methods by name. Each call predicts some samples and returns their number."""
    torch.manual_seed(_SEED)
    shape = _SHAPES[model]
    images, targets = torch.randn(batch, *shape), torch.randint(_CLASSES, (_BLOCKS * batch,))
    plain = zoo.build(model, shape, _CLASSES).eval()
    last = zoo.build(model, shape, _CLASSES).eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    last.load_state_dict(plain.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the deprecation of torch.jit
        traced = torch.jit.optimize_for_inference(torch.jit.trace(plain, images))  # type: ignore[no-untyped-call]
    source = ArraySource(images.repeat(_BLOCKS, 1, 1, 1), targets)
    loss, metrics, device = build_loss(Spec("cross_entropy")), MetricSet([Spec("accuracy")]), torch.device("cpu")

    def evaluated() -> int:
        evaluate(plain, loss, metrics, source, Solo(), device, block=batch)
        return len(source)

    return {
        "eager": _predict(plain, images, torch.no_grad),
        "inference mode": _predict(plain, images, torch.inference_mode),
        "channels last": _predict(last, images.contiguous(memory_format=torch.channels_last), torch.inference_mode),
        "torch.jit": _predict(traced, images, torch.inference_mode),
        "syncline evaluate": evaluated,
    }


def _predict(
    model: nn.Module, images: torch.Tensor, mode: Callable[[], AbstractContextManager[object]]
) -> Callable[[], int]:
    def predict() -> int:
        with mode():
            model(images)
        return len(images)

    return predict


def _suite(model: str, batch: int, seconds: float, *, rounds_per_repeat: int) -> Suite:
    return Suite(
        name=f"inference-{model}-{batch}",
        measures=f"Inference with {model} on images {' x '.join(map(str, _SHAPES[model]))}, batch {batch}, one "
        f"process, one thread: images per second, over {seconds:g} s.",
        unit="images/s",
        baseline="eager",
        contenders=tuple(
            Contender(name=name, measure=_speed(predict, seconds), what=_WHAT[name])
            for name, predict in methods(model, batch).items()
        ),
        rounds_per_repeat=rounds_per_repeat,
    )


def _speed(predict: Callable[[], int], seconds: float) -> Callable[[], float]:
    """Predict repeatedly for this many seconds, at least once."""

    def measure() -> float:
        gc.collect()
        predict()  # refills the caches
        predicted, start = 0, time.perf_counter()
        while not predicted or time.perf_counter() - start < seconds:
            predicted += predict()
        return predicted / (time.perf_counter() - start)

    return measure
