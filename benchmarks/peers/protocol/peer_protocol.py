"""Shared by all adapters: arguments, samples, timing, and the lines they print. See ../README.md.

Only the standard library and NumPy, and compatible with Python 3.8, which some peers need.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

CLASSES = 10
PART_KINDS = ("activations", "metrics", "initializers", "losses", "layers", "optimizers", "regularizers")
LR, MOMENTUM = 0.01, 0.9
_BATCHES = 16  # distinct batches, used in turn


def arguments():
    """The options given by `syncline bench peers`. `--rank` is for adapters that start their own workers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="images per worker and step")
    parser.add_argument("--warm-up", type=int, default=50, help="steps before the measured ones")
    parser.add_argument("--steps", type=int, default=300, help="measured steps")
    parser.add_argument("--port", type=int, default=29511, help="a free port of loopback")
    parser.add_argument("--rank", type=int, default=None)
    return parser.parse_args()


def samples(rank, batch):
    """Batches of random images of MNIST's shape, with labels, in memory; different for each worker."""
    import numpy as np

    random = np.random.RandomState(rank)
    images = random.standard_normal((_BATCHES, batch, 1, 28, 28)).astype(np.float32)
    return images, random.randint(0, CLASSES, (_BATCHES, batch))


def timed(step, asked, *, rank, version, finish=lambda: None, report=None, parameters=None):
    """Call `step(number)` for the requested steps; rank 0 prints the measurement, or passes it to `report`.

    `finish` waits for asynchronous work that continues after `step` has returned. `parameters` is their number in the
    model, which shows that it is the same model.
    """
    report = report or print_event
    for number in range(asked.warm_up):
        step(number % _BATCHES)
    finish()
    if rank == 0:
        report(event="ready", version=version)
    start = time.perf_counter()
    for number in range(asked.steps):
        step(number % _BATCHES)
    finish()
    seconds = time.perf_counter() - start
    if rank == 0:
        images_per_s = asked.steps * asked.batch * asked.workers / seconds
        more = {} if parameters is None else {"parameters": parameters}
        report(event="measured", images_per_s=images_per_s, steps=asked.steps, seconds=seconds, version=version, **more)


def print_event(**event):
    """One line of JSON."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def start_ranks(workers, environment_of=None):
    """Start this script once per rank, for peers without a launcher, and exit with the largest exit code."""
    command = [sys.executable, *sys.argv]
    ranks = [
        subprocess.Popen([*command, "--rank", str(rank)], env=environment_of and environment_of(rank))
        for rank in range(workers)
    ]
    sys.exit(max(abs(process.wait()) for process in ranks))
