"""Training throughput by model and number of workers, and one worker beside a hand-written loop.

Here: one, two and four workers with one thread each, on random samples of the shapes of MNIST and CIFAR-10, all sides
with the same settings (as in `training.py`). With several workers, the baseline is one process with a hand-written
loop, so that a ratio is a speedup; do not expect one on a machine with fewer cores than workers. Workers without
communication show the speedup that the machine allows. Not here: the processes and loops (`worker_groups.py`).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack

from syncline.lab.bench.harness import BenchSettings, Goal, Suite
from syncline.lab.bench.training import NO_EXCHANGE, PLAIN, SAME, TUNED, Case, Side, speed_suite
from syncline.lab.bench.worker_groups import BY_HAND, BY_HAND_TUNED, TrainingWorkload
from syncline.models import zoo

_MNIST, _CIFAR = (1, 28, 28), (3, 32, 32)
_OF_BY_HAND = 0.98
"""Goal: this share of the throughput of a hand-written loop."""
_TUNED_BY_HAND = Side("by hand, tuned", BY_HAND_TUNED, "A hand-written loop, with channels last and a fused optimizer.")
_BY_HAND = Side("by hand", BY_HAND, "A hand-written loop as in PyTorch's tutorial.")
_ONE_PROCESS = Side("one process", BY_HAND_TUNED, "A hand-written loop, with channels last and a fused optimizer.")


def suites(settings: BenchSettings) -> Generator[Suite, None, None]:
    """Every model with every number of workers."""
    for case in cases(quick=settings.quick):
        if case.workload.model not in zoo.names():
            settings.say(f"The model {case.workload.model!r} is not available and is skipped.")
            continue
        for workers in (1, 2) if settings.quick else (1, 2, 4):
            with ExitStack() as stack:
                yield _suite(stack, case, workers, quick=settings.quick)


def cases(*, quick: bool) -> list[Case]:
    """The models; a measurement takes about two seconds on one core."""
    steps = 8 if quick else 40
    found = [
        _case("LeNet", "lenet", _MNIST, 64, warm_up=2, steps=steps),
        _case("an LSTM on rows of images", "lstm", _MNIST, 64, warm_up=2, steps=steps),
    ]
    if not quick:
        found += [
            _case("an autoencoder", "autoencoder", _MNIST, 64, warm_up=2, steps=40),
            _case("AlexNet", "alexnet", _CIFAR, 16, samples=256, warm_up=1, steps=4),
            _case("ResNet-18", "resnet18", _CIFAR, 16, samples=256, warm_up=1, steps=4),
            _case("ResNet-50", "resnet50", _CIFAR, 8, samples=128, warm_up=1, steps=3),
        ]
    return found


def _case(
    title: str, model: str, shape: tuple[int, ...], batch: int, *, samples: int = 2048, warm_up: int, steps: int
) -> Case:
    workload = TrainingWorkload(model=model, shape=shape, batch=batch, samples=samples)
    return Case(title=title, workload=workload, warm_up=warm_up, steps=steps)


def _suite(stack: ExitStack, case: Case, workers: int, *, quick: bool) -> Suite:
    """A quick bench skips the untuned contenders."""
    name = f"scaling-{case.workload.model}-{workers}"
    if workers == 1:
        sides = (_TUNED_BY_HAND, *(() if quick else (_BY_HAND,)), SAME)
        goal = Goal(contender=SAME.name, limit=_OF_BY_HAND, bound="at least")
        return speed_suite(stack, case, sides, workers=1, name=name, about="with different methods", goals=(goal,))
    return speed_suite(
        stack,
        case,
        (NO_EXCHANGE, *(() if quick else (PLAIN,)), TUNED, SAME),
        workers=workers,
        name=name,
        about="with different methods",
        alone=(_ONE_PROCESS,),
    )
