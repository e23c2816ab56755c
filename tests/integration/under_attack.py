"""A run in a process of its own that strangers can attack while it trains: `python under_attack.py SETTINGS.json`.

Here: the run, which reveals its secrets to the test that started it, and a model that trains only as far as the test
allows. Not here: the attacks (`test_strangers.py`).
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from real_runs import my_rank, samples, small_net
from torch import nn

import syncline
from syncline.comms.control import ControlServer, Welcome

LIMIT_S = 120.0
FEW_DESCRIPTORS = 1024  # what most systems start a process with
DESCRIPTORS = 2048  # and what it may raise that to, here


class ModelUnderAttack(nn.Module):
    """Steps that take a while. Their number is in the file `steps`, and is never greater than that in `allowed`."""

    def __init__(self, net: nn.Module, folder: Path, seconds: float) -> None:
        super().__init__()
        self.net, self.folder, self.seconds = net, str(folder), seconds
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            deadline = time.monotonic() + LIMIT_S
            threading.Event().wait(self.seconds)
            while self.calls > number_in(Path(self.folder, "allowed")) and time.monotonic() < deadline:
                threading.Event().wait(0.01)
            if my_rank() == 0:
                write_number(Path(self.folder, "steps"), self.calls)
        out: torch.Tensor = self.net(x)
        return out


def number_in(path: Path) -> int:
    """0 if there is none yet."""
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return 0


def write_number(path: Path, number: int) -> None:
    """Atomically, so that no reader sees half of it."""
    new = path.with_suffix(".new")
    new.write_text(str(number))
    new.rename(path)


def train(folder: Path, seconds: float, **settings: Any) -> dict[str, Any]:
    """Train, and return the result."""
    result = syncline.train(
        model=ModelUnderAttack(small_net(), folder, seconds),
        data=samples(),
        test=samples(57, seed=2),
        loss="cross_entropy",
        optimizer=syncline.sgd(lr=0.05, momentum=0.9),
        batch=10,
        epochs=100,
        out=str(folder / "out"),
        quiet=True,
        **settings,
    )
    return {"steps": result.steps, "metrics": result.metrics, "run_dir": str(result.run_dir)}


def main() -> None:
    """With few descriptors at the start, and without keeping a secret from who started it."""
    settings = Path(sys.argv[1])
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = [n if most == resource.RLIM_INFINITY else min(most, n) for n in (FEW_DESCRIPTORS, DESCRIPTORS)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[0], limits[1]))
    _reveal_secrets(settings.parent)
    found = train(settings.parent, **json.loads(settings.read_text()))
    (settings.parent / "result.json").write_text(json.dumps(found))


def _reveal_secrets(folder: Path) -> None:
    """Write the specs and the secret of the run to a file; the test must know what strangers may not learn."""
    make_spec, send = ControlServer.launch_spec, ControlServer.send

    def spec(self: ControlServer, *arguments: Any) -> Any:
        made = make_spec(self, *arguments)
        (folder / "launch_spec.json").write_bytes(msgspec.json.encode(made))
        return made

    def reveal(self: ControlServer, worker_id: int, message: Any) -> None:
        if isinstance(message, Welcome):
            (folder / "secret").write_text(message.secret)
        send(self, worker_id, message)

    ControlServer.launch_spec, ControlServer.send = spec, reveal  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
