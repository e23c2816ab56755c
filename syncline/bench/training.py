"""How fast two workers train: Syncline, against DistributedDataParallel and against workers that exchange nothing.

Here: LeNet on images of MNIST's shape and ResNet-18 on images of CIFAR-10's, random, in memory, one thread per worker.
Each model twice. With the same settings on both sides (channels last, float32, a fused optimiser, batch norm over each
worker's own share) what differs is the exchange, the loop, and how convolutions are computed. Workers that exchange
nothing show what is possible with torch's, and those that only wait for each other, what of it is left to whoever
trains in step. With defaults on both sides it is what a user gets who writes what the tutorial says. Not here: the
processes and the loops (`crews.py`), more models and workers (`scaling.py`).

All sides take their batches from memory by index, which is faster than the DataLoader of a tutorial.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from syncline.bench.crews import (
    BY_HAND_IN_STEP,
    BY_HAND_TUNED,
    PLAIN_DDP,
    SAME_KERNELS,
    SAME_SETTINGS,
    TUNED_DDP,
    Way,
    Work,
    crew,
    samples_a_second,
)
from syncline.bench.harness import Contender, Goal, Settings, Suite

__all__ = [
    "NO_EXCHANGE", "PLAIN", "SAME", "TUNED", "Case", "Side", "bf16_is_fast", "cases", "speed_suite", "suites",
]  # fmt: skip

_WORKERS = 2
_OF_LIMIT = 0.97
"""So much of the speed without any exchange is to be left with it."""
_BF16 = ("avx512_bf16", "amx_bf16", "bf16")
"""What torch calls the instructions for it, on different processors."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, how many of its steps are measured, and how much faster than DDP it is to be trained."""

    title: str
    work: Work
    warm_up: int
    steps: int
    over_tuned_ddp: float | None = None
    over_plain_ddp: float | None = None
    over_plain_ddp_by_auto: float | None = None


@dataclass(frozen=True)
class Side:
    """A contender: what it is called, how it trains, and a sentence about it."""

    name: str
    way: Way
    what: str


NO_EXCHANGE = Side("no communication", BY_HAND_TUNED, "Each worker by itself, a loop written by hand: the limit.")
IN_STEP = Side(
    "no communication, in step",
    BY_HAND_IN_STEP,
    "The same, but nobody begins a step before all have done the last one. What is lost by that is lost to whoever "
    "trains synchronously: on a machine whose cores are not equally fast all the time, the slower one counts.",
)
PLAIN = Side("plain DDP", PLAIN_DDP, "DistributedDataParallel on gloo as the tutorial writes it.")
TUNED = Side(
    "tuned DDP",
    TUNED_DDP,
    "DistributedDataParallel on gloo with gradient_as_bucket_view and static_graph, channels last, fused SGD.",
)
SAME = Side(
    "syncline",
    SAME_SETTINGS,
    "The worker's own loop and shared memory: channels last, fused SGD, local batch norm; each convolution in the way "
    "that --tune finds to be fastest.",
)
_TORCHS_KERNELS = Side("syncline, torch's kernels", SAME_KERNELS, "The same, but convolutions are all torch's own.")
_DEFAULTS = Side(
    "syncline", Way(kind="syncline"), "syncline train as it is: what --tune finds, batch norm over the global batch."
)
_AUTO = Side(
    "syncline --precision auto",
    Way(kind="syncline", settings={"precision": "auto"}),
    "The same, in bf16 where that is faster here.",
)


def suites(settings: Settings) -> Generator[Suite, None, None]:
    """Each model with the same settings, then with defaults."""
    has_auto = bf16_is_fast() or not settings.quick  # without bf16 it ends in float32, which need not be measured twice
    if not bf16_is_fast():
        settings.say(
            "This processor has no instructions for bf16, so --precision auto stays with float32 here: how fast it is "
            "in bf16 is not measured."
        )
    for case in cases(quick=settings.quick):
        for name, sides, goals in (
            ("same-settings", (TUNED, NO_EXCHANGE, IN_STEP, _TORCHS_KERNELS, SAME), _same_settings_goals(case)),
            ("defaults", (PLAIN, _DEFAULTS, *((_AUTO,) if has_auto else ())), _default_goals(case, has_auto)),
        ):
            with ExitStack() as stack:
                yield speed_suite(
                    stack,
                    case,
                    sides,
                    workers=_WORKERS,
                    name=f"training-{case.work.model}-{name}",
                    about=f"{name.replace('-', ' ')} on all sides",
                    goals=goals,
                )


def cases(*, quick: bool) -> list[Case]:
    """The models. A quick bench trains a narrow ResNet-18: a step of the real one takes a second or two."""
    options = {"width": 16} if quick else {}
    return [
        Case(
            title="LeNet",
            work=Work(model="lenet", shape=(1, 28, 28), batch=64),
            warm_up=2,
            steps=10 if quick else 60,
            over_tuned_ddp=1.25,
            over_plain_ddp=2.0,
            over_plain_ddp_by_auto=2.8,
        ),
        Case(
            title="a ResNet-18 of width 16" if quick else "ResNet-18",
            work=Work(model="resnet18", shape=(3, 32, 32), batch=32, samples=512, options=options),
            warm_up=0 if quick else 1,
            steps=2 if quick else 4,
            over_plain_ddp=1.05,
            over_plain_ddp_by_auto=1.8,
        ),
    ]


def speed_suite(
    stack: ExitStack,
    case: Case,
    sides: Sequence[Side],
    *,
    workers: int,
    name: str,
    about: str,
    goals: tuple[Goal, ...] = (),
    alone: Sequence[Side] = (),
) -> Suite:
    """The sides as crews of so many workers, those `alone` as crews of one; the first of all is the baseline.

    They live as long as `stack`.
    """
    contenders = []
    for side in (*alone, *sides):
        measure = stack.enter_context(crew(case.work, side.way, 1 if side in alone else workers))
        speed = samples_a_second(measure, case.warm_up, case.steps)
        contenders.append(Contender(name=side.name, measure=speed, what=side.what))
    number = f"{workers} workers with one thread each" if workers > 1 else "one process with one thread"
    return Suite(
        name=name,
        measures=f"Training {case.title}, {number}, {case.work.batch} random images a worker, {about}: images a "
        f"second of all together, over {case.steps} steps.",
        unit="images/s",
        contenders=tuple(contenders),
        baseline=contenders[0].name,
        goals=goals,
    )


def bf16_is_fast() -> bool:
    """Whether the processor computes in bf16 by itself; one that imitates it is slower than with float32."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in _BF16)


def _same_settings_goals(case: Case) -> tuple[Goal, ...]:
    limit = Goal(contender=SAME.name, limit=_OF_LIMIT, bound="at least", against=NO_EXCHANGE.name)
    return (*_at_least(SAME, case.over_tuned_ddp), limit)


def _default_goals(case: Case, has_auto: bool) -> tuple[Goal, ...]:
    by_auto = _at_least(_AUTO, case.over_plain_ddp_by_auto) if has_auto else ()
    return (*_at_least(_DEFAULTS, case.over_plain_ddp), *by_auto)


def _at_least(side: Side, limit: float | None) -> tuple[Goal, ...]:
    return () if limit is None else (Goal(contender=side.name, limit=limit, bound="at least"),)
