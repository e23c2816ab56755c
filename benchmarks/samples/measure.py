"""How many more samples does each strategy need than allreduce, for the same accuracy?

LeNet learns a tenth of MNIST with every preset, for several seeds; its accuracy is evaluated after every pass. The
samples to the target are interpolated between passes, and divided by those of allreduce with the same seed. Results are
printed as JSON lines; without arguments of presets, all of them. The factors in `syncline/planning/cost/samples.py` are
from here.

    python benchmarks/samples/measure.py --seeds 0,1 --out samples.jsonl [PRESET ...]
    python benchmarks/samples/measure.py --show samples.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path

import numpy as np

import syncline
from syncline.errors import NonFiniteLoss
from syncline.strategies.presets import PRESETS
from syncline.task import LocatedData, Task
from syncline.telemetry.events import Evaluated
from syncline.telemetry.run_dir import RunDir

TARGET = 0.965
PASSES = 7
TRAIN, TEST = 6_000, 2_000
WORKERS = {"hogwild": 2}


def curve(name: str, seed: int, data: tuple) -> list[float]:
    """The accuracy after each pass."""
    train, test = data
    with tempfile.TemporaryDirectory() as folder:
        result = syncline.train(
            model="lenet", data=train, test=test, strategy=name, workers=WORKERS.get(name, 4), batch=64, seed=seed,
            optimizer="SGD(lr=0.02, momentum=0.9)", schedule="ConstantLR(factor=1.0)", epochs=PASSES, threads=1,
            tune="off", out=folder, quiet=True,
        )  # fmt: skip
        events = RunDir(result.run_dir).read_events()
        return [event.metrics["test/accuracy"] for event in events if isinstance(event, Evaluated)]


def passes_to_target(accuracies: list[float]) -> float | None:
    """Interpolated in the logarithm of the error, which falls about evenly."""
    before = 0.1
    for number, accuracy in enumerate(accuracies):
        if accuracy >= TARGET:
            errors = [math.log(1 - value) for value in (before, accuracy, TARGET)]
            part = (errors[2] - errors[0]) / (errors[1] - errors[0]) if errors[1] < errors[0] else 1.0
            return number + part
        before = max(before, accuracy)
    return None


def subset() -> tuple:
    """A tenth of MNIST to train on, and as many to test on."""
    task = Task(model="lenet", data="mnist").with_defaults().located(None, None)
    assert isinstance(task.data, LocatedData)
    from syncline.workers.build import build_sources

    sources = build_sources(task, 0)
    found = []
    for source, count in zip(sources, (TRAIN, TEST), strict=True):
        order = np.random.default_rng(0).permutation(len(source))[:count]
        inputs, targets = source.fetch(order)
        found.append((np.asarray(inputs), np.asarray(targets)))
    return tuple(found)


def show(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    passes = {(row["strategy"], row["seed"]): row["passes"] for row in rows}
    seeds = sorted({seed for _, seed in passes})
    for name in dict.fromkeys(row["strategy"] for row in rows):
        pairs = [(passes.get((name, seed)), passes.get(("allreduce", seed))) for seed in seeds]
        ratios = [mine / base for mine, base in pairs if mine and base]
        missed = sum(mine is None for (mine, _), seed in zip(pairs, seeds, strict=True) if (name, seed) in passes)
        shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"{name:17} {statistics.median(ratios) if ratios else math.nan:.2f}  ({shown}) missed {missed}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("presets", nargs="*")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=Path)
    given = parser.parse_args()
    if given.show:
        show(given.show)
        return
    data = subset()
    for seed in map(int, given.seeds.split(",")):
        for name in given.presets or [preset.name for preset in PRESETS.values()]:
            try:
                accuracies = curve(name, seed, data)
            except NonFiniteLoss:  # it diverges with this rate
                accuracies = []
            row = {"strategy": name, "seed": seed, "passes": passes_to_target(accuracies), "accuracies": accuracies}
            print(json.dumps(row), flush=True)
            if given.out:
                with given.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
