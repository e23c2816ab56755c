"""Training throughput of two workers: Syncline beside DistributedDataParallel and workers without communication.

Here: LeNet on random images of MNIST's shape and ResNet-18 on those of CIFAR-10's, in memory, one thread per worker.
Each model is measured twice. With the same settings on all sides (channels last, float32, a fused optimizer, local
batch norm), only the exchange, the loop and the convolution algorithms differ. Workers without communication are the
upper bound with torch's kernels; with a barrier per step, they are the upper bound of synchronous training. With
defaults on all sides, it is what a user gets out of the box. Not here: the processes and loops (`worker_groups.py`),
more models and workers (`scaling.py`).

All sides index batches in memory, which is faster than a tutorial's DataLoader.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from syncline.lab.bench.harness import BenchSettings, Contender, Goal, Suite
from syncline.lab.bench.worker_groups import (
    BY_HAND_IN_STEP,
    BY_HAND_TUNED,
    PLAIN_DDP,
    SAME_KERNELS,
    SAME_SETTINGS,
    TUNED_DDP,
    TrainingMethod,
    TrainingWorkload,
    samples_per_second,
    worker_group,
)

_WORKERS = 2
_OF_LIMIT = 0.97
"""Goal: this share of the throughput without communication."""
_BF16 = ("avx512_bf16", "amx_bf16", "bf16")
"""torch's names of bf16 instruction sets."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, the number of measured steps, and the goals relative to DDP."""

    title: str
    workload: TrainingWorkload
    warm_up: int
    steps: int
    over_tuned_ddp: float | None = None
    over_plain_ddp: float | None = None
    over_plain_ddp_by_auto: float | None = None


@dataclass(frozen=True)
class Side:
    """A contender: its name, its method, and a description."""

    name: str
    method: TrainingMethod
    what: str


NO_EXCHANGE = Side("no communication", BY_HAND_TUNED, "Independent workers with a hand-written loop: the upper bound.")
IN_STEP = Side(
    "no communication, in step",
    BY_HAND_IN_STEP,
    "The same with a barrier after every step: the upper bound of synchronous training. If cores are not equally "
    "fast at all times, the slowest one counts.",
)
PLAIN = Side("plain DDP", PLAIN_DDP, "DistributedDataParallel on gloo, as in PyTorch's tutorial.")
TUNED = Side(
    "tuned DDP",
    TUNED_DDP,
    "DistributedDataParallel on gloo with gradient_as_bucket_view and static_graph, channels last, fused SGD.",
)
SAME = Side(
    "syncline",
    SAME_SETTINGS,
    "Syncline's worker loop and shared memory: channels last, fused SGD, local batch norm; each convolution with "
    "the algorithm that --tune finds fastest.",
)
_TORCHS_KERNELS = Side("syncline, torch's kernels", SAME_KERNELS, "The same with torch's convolutions only.")
_DEFAULTS = Side(
    "syncline", TrainingMethod(kind="syncline"), "syncline train with defaults: tuned convolutions, global batch norm."
)
_AUTO = Side(
    "syncline --precision auto",
    TrainingMethod(kind="syncline", settings={"precision": "auto"}),
    "The same, in bf16 where that is faster on this machine.",
)


def suites(settings: BenchSettings) -> Generator[Suite, None, None]:
    """Each model with the same settings, then with defaults."""
    has_auto = bf16_is_fast() or not settings.quick  # without bf16 it falls back to float32, measured already
    if not bf16_is_fast():
        settings.say(
            "This processor has no bf16 instructions, so --precision auto falls back to float32: bf16 is not measured."
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
                    name=f"training-{case.workload.model}-{name}",
                    about=f"{name.replace('-', ' ')} on all sides",
                    goals=goals,
                )


def cases(*, quick: bool) -> list[Case]:
    """The models. A quick bench trains a narrow ResNet-18: a step of the full one takes a second or two."""
    options = {"width": 16} if quick else {}
    return [
        Case(
            title="LeNet",
            workload=TrainingWorkload(model="lenet", shape=(1, 28, 28), batch=64),
            warm_up=2,
            steps=10 if quick else 60,
            over_tuned_ddp=1.25,
            over_plain_ddp=2.0,
            over_plain_ddp_by_auto=2.8,
        ),
        Case(
            title="a ResNet-18 of width 16" if quick else "ResNet-18",
            workload=TrainingWorkload(model="resnet18", shape=(3, 32, 32), batch=32, samples=512, options=options),
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
    """The sides as groups of `workers` workers, those in `alone` as single workers; the first is the baseline.

    The groups live as long as `stack`.
    """
    contenders = []
    for side in (*alone, *sides):
        measure = stack.enter_context(worker_group(case.workload, side.method, 1 if side in alone else workers))
        speed = samples_per_second(measure, case.warm_up, case.steps)
        contenders.append(Contender(name=side.name, measure=speed, what=side.what))
    number = f"{workers} workers with one thread each" if workers > 1 else "one process with one thread"
    return Suite(
        name=name,
        measures=f"Training {case.title}, {number}, {case.workload.batch} random images per worker, {about}: images "
        f"per second over all workers, over {case.steps} steps.",
        unit="images/s",
        contenders=tuple(contenders),
        baseline=contenders[0].name,
        goals=goals,
    )


def bf16_is_fast() -> bool:
    """Whether the processor has bf16 instructions; emulated bf16 is slower than float32."""
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
