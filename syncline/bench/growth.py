"""What becomes of speed and memory as a run grows: more workers, more parameters, more samples.

Here: `syncline train`'s own loop with an MLP on random samples, one thread per worker, one thing grown at a time. Each
suite about speed is followed by one about memory, on the same training: the most that one of the workers has had, with
Python, torch, the samples, and what it maps of the memory that all share. Not here: other models, and DDP
(`scaling.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import dataclass

from syncline.bench.crews import Block, Crew, Way, Work, crew
from syncline.bench.harness import Contender, Settings, Suite

__all__ = ["Grown", "Size", "sizes", "suites"]

_SHAPE = (784,)
_BATCH = 64
_WIDTH = 256
_SAMPLES = 4096
_WORKERS = 2
_WARM_UP = 2
_WAY = Way(kind="syncline")


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a run is."""

    workers: int = _WORKERS
    width: int = _WIDTH
    """Of the two hidden layers."""
    samples: int = _SAMPLES

    @property
    def work(self) -> Work:
        """What is trained."""
        options = {"hidden": (self.width, self.width)}
        return Work(model="mlp", shape=_SHAPE, batch=_BATCH, samples=self.samples, options=options)

    @property
    def parameters(self) -> int:
        """How many there are."""
        return sum(p.numel() for p in self.work.make_model().parameters())


class Grown:
    """A crew of one size, and what its last block came to."""

    def __init__(self, measure: Crew, steps: int) -> None:
        self._measure, self._steps = measure, steps
        self._last: Block | None = None

    def speed(self) -> float:
        """Samples a second of all workers together, over another block."""
        self._last = self._measure(_WARM_UP, self._steps)
        return self._last.samples / self._last.seconds

    def megabytes(self) -> float:
        """What the largest worker has taken by the end of that block."""
        if self._last is None:
            self.speed()
        assert self._last is not None, "there was a block"
        return self._last.peak_bytes / 1e6


def suites(settings: Settings) -> Generator[Suite, None, None]:
    """One thing after the other: speed, then memory."""
    steps = 10 if settings.quick else 50
    for what, grown in sizes(quick=settings.quick).items():
        with ExitStack() as stack:
            crews = {
                name: Grown(stack.enter_context(crew(size.work, _WAY, size.workers)), steps)
                for name, size in grown.items()
            }
            speeds = {name: one.speed for name, one in crews.items()}
            yield _suite(what, f"samples a second of all workers together, over {steps} steps", "samples/s", speeds)
            memory = {name: one.megabytes for name, one in crews.items()}
            yield _suite(f"{what}-memory", "the most memory of one worker", "MB", memory)


def sizes(*, quick: bool) -> dict[str, dict[str, Size]]:
    """What grows, and the sizes by name, from small to large."""
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
        measures=f"Training an MLP, one thread a worker, {_BATCH} samples each, as the {what.partition('-')[0]} "
        f"grow: {measures}.",
        unit=unit,
        baseline=next(iter(measured)),
        contenders=tuple(Contender(name=name, measure=measure) for name, measure in measured.items()),
    )
