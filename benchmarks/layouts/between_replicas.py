"""Do strategies between spread replicas train as well as between plain workers?

Each strategy trains LeNet on MNIST with two replicas: of one worker each (`replicated`), and of two workers each
(`pipeline(2)`, `sharded(2)`). Everything else is the same, and each is repeated with other seeds.

    python benchmarks/layouts/between_replicas.py --seeds 3 --steps 200

Prints a Markdown table: mean and standard deviation of the test loss over the seeds, and the distance to `replicated`
in standard errors of the difference. Ends with code 1 if one is further away than `--limit`, or if a ledger is not
clean. Take the first seeds as they come: a strategy whose seeds hardly differ is compared with `--floor` instead.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import statistics
import sys
import tempfile
from pathlib import Path

import syncline
from syncline.data.audit import audit_file
from syncline.telemetry.run_dir import RunDir

STRATEGIES = ("allreduce", "sparknet(tau=10)", "diloco(steps=20)", "ssp(bound=3)", "gossip")
LAYOUTS = ("pipeline(2)", "sharded(2)")


def final_loss(strategy: str, layout: str, seed: int, arguments: argparse.Namespace, folder: str) -> float:
    workers = 2 if layout == "replicated" else 4
    with contextlib.redirect_stdout(io.StringIO()):  # the run's summary
        result = syncline.train(
            model=arguments.model, data=arguments.data, strategy=strategy, layout=layout, workers=workers, seed=seed,
            batch=64, max_steps=arguments.steps, epochs=1000, threads=1, tune="off", quiet=True, out=folder,
            evaluate_every=1000,  # only at the end
        )  # fmt: skip
    audit = audit_file(RunDir(result.run_dir).ledger)
    if not audit.is_clean:
        sys.exit(f"{strategy} with {layout}, seed {seed}: samples were lost or repeated.")
    return float(result.metrics["test/loss"])


def distance(plain: list[float], spread: list[float], floor: float) -> float:
    """The difference of the means in its standard errors."""
    noise = math.sqrt((statistics.variance(plain) + statistics.variance(spread)) / len(plain))
    return abs(statistics.mean(spread) - statistics.mean(plain)) / max(noise, floor)


def text(losses: list[float]) -> str:
    return f"{statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare strategies between spread replicas with plain workers.")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--limit", type=float, default=3.0, help="in standard errors of the difference")
    parser.add_argument("--floor", type=float, default=0.002, help="the least standard error, in units of the loss")
    parser.add_argument("--only", nargs="*", default=STRATEGIES)
    arguments = parser.parse_args()
    furthest = 0.0
    print("| strategy | replicated | " + " | ".join(LAYOUTS) + " | distance |")
    print("|---|---|" + "---|" * len(LAYOUTS) + "---|")
    with tempfile.TemporaryDirectory(prefix="syncline-between-") as folder:
        for strategy in arguments.only:
            losses = {
                layout: [
                    final_loss(strategy, layout, seed, arguments, str(Path(folder) / "runs"))
                    for seed in range(arguments.seeds)
                ]
                for layout in ("replicated", *LAYOUTS)
            }
            distances = [distance(losses["replicated"], losses[layout], arguments.floor) for layout in LAYOUTS]
            furthest = max(furthest, *distances)
            cells = " | ".join(text(each) for each in losses.values())
            print(f"| `{strategy}` | {cells} | {', '.join(f'{d:.1f}' for d in distances)} |", flush=True)
    sys.exit(f"The furthest is {furthest:.1f} standard errors away." if furthest > arguments.limit else 0)


if __name__ == "__main__":
    main()
