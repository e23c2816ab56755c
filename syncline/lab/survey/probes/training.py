"""Figures 2 and 4: speed and memory of training, by batch size."""

from __future__ import annotations

from syncline.lab.survey.catalog import BATCHES
from syncline.lab.survey.probes.memory_sampler import peak_memory
from syncline.lab.survey.probes.probe import Bench, Round, Work, run_adapter

STEPS = {16: 600, 64: 300, 256: 150}
"""Steps that are timed, by batch: fewer of the longer ones. A quick survey times half of them."""


def measure_speed(bench: Bench) -> Round:
    """Images per second, as the adapter timed them."""
    values: dict[str, float] = {}
    version = ""
    for batch in BATCHES:
        event = run_adapter(bench, Work(batch=batch, steps=STEPS[batch] // (1 + bench.is_quick)))
        values[f"batch-{batch}"] = float(event["images_per_s"])
        version = str(event["version"])
    return Round(values=values, version=version)


def measure_memory(bench: Bench) -> Round:
    """The peak of all its processes together."""
    values: dict[str, float] = {}
    version = ""
    for batch in BATCHES:
        with peak_memory() as peak:
            event = run_adapter(bench, Work(batch=batch, steps=STEPS[batch] // 2))
        values[f"batch-{batch}"] = peak.bytes / 1e6
        version = str(event["version"])
    return Round(values=values, version=version)
