"""How training speed grows with the number of workers, model by model, and what one worker has left of a hand-written
loop's speed.

Here: one, two and four workers with one thread each, on random samples of the shapes of MNIST and CIFAR-10, all sides
with the same settings (as in `training.py`). With several workers the baseline is one process with a loop written by
hand, so that a ratio is a speed-up; on a machine with fewer cores than workers none is to be expected. Workers that
exchange nothing show how much of it the machine allows. Not here: the processes and the loops (`crews.py`).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack

from syncline import zoo
from syncline.bench.crews import BY_HAND, BY_HAND_TUNED, Work
from syncline.bench.harness import Goal, Settings, Suite
from syncline.bench.training import NO_EXCHANGE, PLAIN, SAME, TUNED, Case, Side, speed_suite

__all__ = ["cases", "suites"]

_MNIST, _CIFAR = (1, 28, 28), (3, 32, 32)
_OF_BY_HAND = 0.98
"""So much of the speed of a loop written by hand one worker is to have."""
_TUNED_BY_HAND = Side(
    "by hand, tuned", BY_HAND_TUNED, "A loop as the tutorial writes it, with channels last and a fused optimiser."
)
_BY_HAND = Side("by hand", BY_HAND, "A loop as the tutorial writes it.")
_ONE_PROCESS = Side("one process", BY_HAND_TUNED, "A loop written by hand, with channels last and a fused optimiser.")


def suites(settings: Settings) -> Generator[Suite, None, None]:
    """Every model with every number of workers."""
    for case in cases(quick=settings.quick):
        if case.work.model not in zoo.names():
            settings.say(f"There is no model {case.work.model!r} here: it is left out.")
            continue
        for workers in (1, 2) if settings.quick else (1, 2, 4):
            with ExitStack() as stack:
                yield _suite(stack, case, workers, quick=settings.quick)


def cases(*, quick: bool) -> list[Case]:
    """The models, with batches and steps by which a measurement takes about two seconds on one core."""
    found = [
        Case(title="LeNet", work=Work(model="lenet", shape=_MNIST, batch=64), warm_up=2, steps=8 if quick else 40),
        Case(
            title="an LSTM on rows of images",
            work=Work(model="lstm", shape=_MNIST, batch=64),
            warm_up=2,
            steps=8 if quick else 40,
        ),
    ]
    if not quick:
        found += [
            Case(title="an autoencoder", work=Work(model="autoencoder", shape=_MNIST, batch=64), warm_up=2, steps=40),
            Case(title="AlexNet", work=Work(model="alexnet", shape=_CIFAR, batch=16, samples=256), warm_up=1, steps=4),
            Case(
                title="ResNet-18", work=Work(model="resnet18", shape=_CIFAR, batch=16, samples=256), warm_up=1, steps=4
            ),
            Case(
                title="ResNet-50", work=Work(model="resnet50", shape=_CIFAR, batch=8, samples=128), warm_up=1, steps=3
            ),
        ]
    return found


def _suite(stack: ExitStack, case: Case, workers: int, *, quick: bool) -> Suite:
    """A quick one leaves out what is not tuned."""
    name = f"scaling-{case.work.model}-{workers}"
    if workers == 1:
        sides = (_TUNED_BY_HAND, *(() if quick else (_BY_HAND,)), SAME)
        goal = Goal(contender=SAME.name, limit=_OF_BY_HAND, bound="at least")
        return speed_suite(stack, case, sides, workers=1, name=name, about="in different ways", goals=(goal,))
    return speed_suite(
        stack,
        case,
        (NO_EXCHANGE, *(() if quick else (PLAIN,)), TUNED, SAME),
        workers=workers,
        name=name,
        about="in different ways",
        alone=(_ONE_PROCESS,),
    )
