"""Throughput and memory as a run grows: more workers, more parameters, more samples.

Here: `syncline train`'s own loop with an MLP on random samples, one thread per worker, one dimension at a time. Each
throughput suite is followed by a memory suite of the same training: the largest peak of a worker, including Python,
torch, the samples and its mappings of shared memory. Not here: other models, and DDP (`scaling.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import dataclass

from syncline.lab.bench.harness import BenchSettings, Contender, Suite
from syncline.lab.bench.worker_groups import TimedBlock, TrainingMethod, TrainingWorkload, WorkerGroup, worker_group

_SHAPE = (784,)
_BATCH = 64
_WIDTH = 256
_SAMPLES = 4096
_WORKERS = 2
_WARM_UP = 2
_METHOD = TrainingMethod(kind="syncline")


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a run."""

    workers: int = _WORKERS
    width: int = _WIDTH
    """Of the two hidden layers."""
    samples: int = _SAMPLES

    @property
    def workload(self) -> TrainingWorkload:
        options = {"hidden": (self.width, self.width)}
        return TrainingWorkload(model="mlp", shape=_SHAPE, batch=_BATCH, samples=self.samples, options=options)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.workload.make_model().parameters())


class Grown:
    """A worker group of one size, and its last block."""

    def __init__(self, measure: WorkerGroup, steps: int) -> None:
        self._measure, self._steps = measure, steps
        self._last: TimedBlock | None = None

    def speed(self) -> float:
        """Samples per second over all workers, in another block."""
        self._last = self._measure(_WARM_UP, self._steps)
        return self._last.samples / self._last.seconds

    def megabytes(self) -> float:
        """Peak memory of the largest worker by the end of that block."""
        if self._last is None:
            self.speed()
        assert self._last is not None, "there was a block"
        return self._last.peak_bytes / 1e6


def suites(settings: BenchSettings) -> Generator[Suite, None, None]:
    """Throughput, then memory, for each dimension."""
    steps = 10 if settings.quick else 50
    for what, grown in sizes(quick=settings.quick).items():
        with ExitStack() as stack:
            groups = {
                name: Grown(stack.enter_context(worker_group(size.workload, _METHOD, size.workers)), steps)
                for name, size in grown.items()
            }
            speeds = {name: one.speed for name, one in groups.items()}
            yield _suite(what, f"samples per second over all workers, over {steps} steps", "samples/s", speeds)
            memory = {name: one.megabytes for name, one in groups.items()}
            yield _suite(f"{what}-memory", "peak memory of the largest worker", "MB", memory)


def sizes(*, quick: bool) -> dict[str, dict[str, Size]]:
    """The dimensions that grow, each with its sizes by name, from small to large."""
    workers, widths, samples = ((1, 2), (256, 1024), (4_096, 65_536)) if quick else _ALL
    wide = [Size(width=width) for width in widths]
    return {
        "workers": {f"{n} worker{'s' * (n > 1)}": Size(workers=n) for n in workers},
        "parameters": {f"{size.parameters:,} parameters": size for size in wide},
        "samples": {f"{n:,} samples": Size(samples=n) for n in samples},
    }


_ALL = ((1, 2, 4), (256, 1024, 4096), (4_096, 65_536, 262_144))


def _suite(what: str, measures: str, unit: str, measured: dict[str, Callable[[], float]]) -> Suite:
    return Suite(
        name=f"growth-{what}",
        measures=f"Training an MLP, one thread and {_BATCH} samples per worker, with more and more "
        f"{what.partition('-')[0]}: {measures}.",
        unit=unit,
        baseline=next(iter(measured)),
        contenders=tuple(Contender(name=name, measure=measure) for name, measure in measured.items()),
    )
