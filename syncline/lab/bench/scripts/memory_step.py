"""One training step of ResNet-50 on images of CIFAR-10's shape, in a separate process; prints its peak memory in MB.

python -m syncline.lab.bench.scripts.memory_step BATCH plain
python -m syncline.lab.bench.scripts.memory_step BATCH '{"memory_limit": "1500MB"}'      the settings of a run
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn

from syncline.compute.memory import Peak
from syncline.models import zoo

_SHAPE, _CLASSES = (3, 32, 32), 10
_LR, _MOMENTUM = 0.01, 0.9


def by_hand(batch: int) -> int:
    """The peak of a hand-written step, in bytes."""
    inputs, targets = _samples(batch)
    model = zoo.build("resnet50", _SHAPE, _CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR, momentum=_MOMENTUM)
    peak = Peak(torch.device("cpu"))
    peak.reset()
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    optimizer.step()
    return peak.read()


def built_in(batch: int, settings: dict[str, Any]) -> int:
    """The peak of a step of Syncline's worker loop, one worker, in bytes."""
    from syncline.config.run import RunConfig
    from syncline.planning.machine import Machine
    from syncline.planning.planner import make_plan
    from syncline.task import Task, sgd
    from syncline.telemetry.recorder import Recorder
    from syncline.workers.job import Job
    from syncline.workers.loop import train
    from syncline.workers.quick_start import without_compiler
    from syncline.workers.session import Session

    without_compiler()
    task = Task(model="resnet50", data=_samples(batch), optimizer=sgd(lr=_LR, momentum=_MOMENTUM)).with_defaults()
    config = RunConfig(workers=1, epochs=1, batch=batch, evaluate_every=0, tune="off", **settings)
    session = Session(make_plan(task.facts(), config.replace(device="cpu"), Machine.here()), 0, Recorder(0))
    job = Job(task, session)
    job.prepare()
    train(job)
    peak = session.gather_peak_memory()["0"]
    session.close()
    return peak


def _samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    targets = torch.arange(count) % _CLASSES
    return torch.randn(count, *_SHAPE), targets


def main() -> None:
    batch, method = int(sys.argv[1]), sys.argv[2]
    peak = by_hand(batch) if method == "plain" else built_in(batch, json.loads(method))
    sys.stdout.write(f"{peak / 1e6:.1f}\n")


if __name__ == "__main__":
    main()
