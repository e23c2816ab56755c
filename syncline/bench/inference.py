"""How many samples a second a trained model answers in one process, by batch size.

Here: what a user has today, one thread, random images in memory: the model as it is, in torch's inference mode, with
channels last, traced and frozen by torch.jit, and as Syncline evaluates it (`workers/evaluate.py`, with reading the
samples, the loss and the accuracy). Not here: training (`training.py`). torch.compile is left out: it takes up to half
a minute for each batch size before it answers.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager

import torch
from torch import nn

from syncline import zoo
from syncline.bench.harness import Contender, Settings, Suite
from syncline.bench.overhead import as_in_a_worker
from syncline.comms.collective import Solo
from syncline.config.spec import Spec
from syncline.data.source import ArraySource
from syncline.workers.build import build_loss
from syncline.workers.evaluate import evaluate
from syncline.workers.metrics import MetricSet

__all__ = ["ways", "suites"]

_SHAPES = {"lenet": (1, 28, 28), "resnet18": (3, 32, 32)}
_BATCHES = (1, 8, 64, 256)
_CLASSES = 10
_SEED = 0
_BLOCKS = 8
"""So many batches are evaluated in one call: it has something to do once for all of them."""
_WHAT = {
    "eager": "model.eval() under torch.no_grad().",
    "inference mode": "The same under torch.inference_mode().",
    "channels last": "Inference mode, model and images with channels last.",
    "torch.jit": "Inference mode, traced and prepared by torch.jit.optimize_for_inference.",
    "syncline evaluate": f"As syncline train evaluates, {_BLOCKS} batches: also reads them, and computes the loss and "
    "the accuracy.",
}


def suites(settings: Settings) -> Generator[Suite, None, None]:
    """Each model with each batch size."""
    chosen = {"lenet": (1, 64)} if settings.quick else dict.fromkeys(_SHAPES, _BATCHES)
    seconds = 0.1 if settings.quick else 0.5
    with as_in_a_worker():
        for model, batches in chosen.items():
            for batch in batches:
                yield _suite(model, batch, seconds, rounds_per_repeat=1 if settings.quick else 2)


def ways(model: str, batch: int) -> dict[str, Callable[[], int]]:
    """The ways by name. Each answers some samples and tells how many."""
    torch.manual_seed(_SEED)
    shape = _SHAPES[model]
    images, targets = torch.randn(batch, *shape), torch.randint(_CLASSES, (_BLOCKS * batch,))
    plain = zoo.build(model, shape, _CLASSES).eval()
    last = zoo.build(model, shape, _CLASSES).eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    last.load_state_dict(plain.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.jit is not developed any further
        traced = torch.jit.optimize_for_inference(torch.jit.trace(plain, images))  # type: ignore[no-untyped-call]
    source = ArraySource(images.repeat(_BLOCKS, 1, 1, 1), targets)
    loss, metrics, device = build_loss(Spec("cross_entropy")), MetricSet([Spec("accuracy")]), torch.device("cpu")

    def evaluated() -> int:
        evaluate(plain, loss, metrics, source, Solo(), device, block=batch)
        return len(source)

    return {
        "eager": _answer(plain, images, torch.no_grad),
        "inference mode": _answer(plain, images, torch.inference_mode),
        "channels last": _answer(last, images.contiguous(memory_format=torch.channels_last), torch.inference_mode),
        "torch.jit": _answer(traced, images, torch.inference_mode),
        "syncline evaluate": evaluated,
    }


def _answer(
    model: nn.Module, images: torch.Tensor, mode: Callable[[], AbstractContextManager[object]]
) -> Callable[[], int]:
    def answer() -> int:
        with mode():
            model(images)
        return len(images)

    return answer


def _suite(model: str, batch: int, seconds: float, *, rounds_per_repeat: int) -> Suite:
    return Suite(
        name=f"inference-{model}-{batch}",
        measures=f"Answers of {model} to images {' x '.join(map(str, _SHAPES[model]))} in batches of {batch}, one "
        f"process, one thread: images a second, over {seconds:g} s.",
        unit="images/s",
        baseline="eager",
        contenders=tuple(
            Contender(name=name, measure=_speed(answer, seconds), what=_WHAT[name])
            for name, answer in ways(model, batch).items()
        ),
        rounds_per_repeat=rounds_per_repeat,
    )


def _speed(answer: Callable[[], int], seconds: float) -> Callable[[], float]:
    """As often as it goes in so many seconds, at least once."""

    def measure() -> float:
        gc.collect()
        answer()  # what the others have pushed out of the caches
        answered, start = 0, time.perf_counter()
        while not answered or time.perf_counter() - start < seconds:
            answered += answer()
        return answered / (time.perf_counter() - start)

    return measure
