"""The suites by name. A new one is a new line here and one new file.

A suite's file has a generator `suites(settings)`. It gets ready, yields one `Suite` after the other, each of which is
measured before the next is asked for, and cleans up at the end: a `with` around the `yield` does that on every way out.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Iterable
from typing import NamedTuple

from syncline.bench.harness import Settings, Suite
from syncline.errors import UnknownName

__all__ = ["SUITES", "Entry", "choose", "prepare"]


class Entry(NamedTuple):
    """Where a suite is, and what it is about."""

    module: str
    summary: str
    is_only_by_name: bool = False
    """Not measured unless it is asked for: it depends on what else is installed, or takes long."""


SUITES = {
    "startup": Entry("syncline.bench.startup", "from the command to the first training step, against torchrun and DDP"),
    "training": Entry("syncline.bench.training", "training speed of two workers, against DDP and no exchange at all"),
    "scaling": Entry("syncline.bench.scaling", "training speed by model and number of workers, against DDP and loops"),
    "accuracy": Entry("syncline.bench.accuracy", "time of training LeNet to 98.5% and 99% on MNIST, against DDP"),
    "inference": Entry("syncline.bench.inference", "answers a second of a trained model, by batch size"),
    "growth": Entry("syncline.bench.growth", "speed and memory as workers, parameters and samples grow"),
    "overhead": Entry("syncline.bench.overhead", "the built-in loop's cost per step, against a loop written by hand"),
    "stragglers": Entry("syncline.bench.stragglers", "what slow workers cost, waiting for all or within a bound"),
    "recovery": Entry("syncline.bench.recovery", "from kill -9 of a worker to the next step, against torchrun and DDP"),
    "tolerance": Entry("syncline.bench.tolerance", "what fault tolerance costs per step while nothing fails"),
    "allreduce": Entry("syncline.bench.allreduce", "adding up gradients on one host, against gloo and copying memory"),
    "servers": Entry("syncline.bench.servers", "parameter servers: round trips and updates a second, against gloo"),
    "engines": Entry("syncline.bench.engines", "what Ray and Spark cost per step, against processes here", True),
    "memory": Entry("syncline.bench.memory", "peak memory by batch size, against a loop written by hand", True),
    "peers": Entry("syncline.bench.peers", "training speed, against the other frameworks installed", True),
}


def choose(names: Iterable[str]) -> list[str]:
    """The names in the order given, each once; all that need not be named if none is given."""
    chosen = list(dict.fromkeys(names)) or [name for name, entry in SUITES.items() if not entry.is_only_by_name]
    for name in chosen:
        if name not in SUITES:
            raise UnknownName.among("bench suite", name, SUITES)
    return chosen


def prepare(name: str, settings: Settings) -> Generator[Suite, None, None]:
    """The suites that `name` stands for. Close it to clean up."""
    made: Generator[Suite, None, None] = importlib.import_module(SUITES[name].module).suites(settings)
    return made
