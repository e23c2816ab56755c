"""The suites by name. A new one is a new line here and one new file.

A suite's file has a generator `suites(settings)`. It prepares, yields one `Suite` after the other, each of which is
measured before the next is requested, and cleans up at the end: a `with` around the `yield` does so in every case.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Iterable
from typing import NamedTuple

from syncline.errors import UnknownName
from syncline.lab.bench.harness import BenchSettings, Suite


class Entry(NamedTuple):
    """The module of a suite, and its summary for --help."""

    module: str
    summary: str
    is_only_by_name: bool = False
    """Only measured by name: it depends on other packages, or takes long."""


SUITES = {
    "startup": Entry("startup", "time from the command to the first training step, beside torchrun with DDP"),
    "training": Entry("training", "training throughput of two workers, beside DDP and no communication"),
    "scaling": Entry("scaling", "training throughput by model and number of workers, beside DDP"),
    "accuracy": Entry("accuracy", "time to train LeNet to 98.5% and 99% on MNIST, beside DDP"),
    "inference": Entry("inference", "inference throughput by batch size"),
    "growth": Entry("growth", "throughput and memory with more workers, parameters and samples"),
    "overhead": Entry("overhead", "overhead per step of the built-in loop, beside a hand-written one"),
    "stragglers": Entry("stragglers", "cost of slow workers, synchronous and with bounded staleness"),
    "recovery": Entry("recovery", "time from kill -9 of a worker to the next step, beside torchrun with DDP"),
    "torchrun": Entry("torchrun", "an unchanged DDP script: throughput and restart, beside torchrun"),
    "own-loop": Entry("own_loop", "a script of your own with convolutions, beside one process and DDP"),
    "layouts": Entry("layouts", "all layouts beside replicated, FSDP2 and torch's 1F1B: time per step, memory"),
    "tolerance": Entry("tolerance", "overhead of fault tolerance per step while nothing fails"),
    "allreduce": Entry("allreduce", "all-reduce on one host, beside gloo and copying memory"),
    "servers": Entry("servers", "parameter servers: round trips and updates per second, beside gloo"),
    "graphs": Entry("graphs", "PageRank: CPU time beside scipy by hand, edges read by each schedule", True),
    "blocks": Entry("blocks", "fitting by blocks: Lasso beside scikit-learn, rounds by change and at random", True),
    "serve": Entry("serve", "CPU time per request and rate of the server, beside ONNX Runtime and other servers", True),
    "serve-load": Entry("serve_load", "p99 of the server in overload and beside slow clients", True),
    "engines": Entry("engines", "overhead per step of Ray and Spark, beside local processes", True),
    "memory": Entry("memory", "peak memory by batch size, beside a hand-written loop", True),
    "saving": Entry("saving", "checkpoints of a large model: memory beside a plain loop, time of a step", True),
    "peers": Entry("peers", "training throughput, beside other installed frameworks", True),
}


def choose(names: Iterable[str]) -> list[str]:
    """These names, each once; by default all suites except those measured by name only."""
    chosen = list(dict.fromkeys(names)) or [name for name, entry in SUITES.items() if not entry.is_only_by_name]
    for name in chosen:
        if name not in SUITES:
            raise UnknownName.among("bench suite", name, SUITES)
    return chosen


def prepare(name: str, settings: BenchSettings) -> Generator[Suite, None, None]:
    """The suites of this name. Close the generator to clean up."""
    made: Generator[Suite, None, None] = importlib.import_module(f"{__package__}.{SUITES[name].module}").suites(
        settings
    )
    return made
