"""Refactoring changes no bit: parameters after 20 steps have the recorded SHA-256 digests.

`same_bits.json` holds the digests. They were recorded before the package was reorganized and only change together
with a change that is meant to alter results; then `python tests/integration/test_same_bits.py` records them again.
The math libraries are restricted to instructions that every x86-64 processor has, because vectorized kernels round
differently from one processor to the next and the digests must hold on all of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from real_runs import InterruptAt, SignalAt, environment, final_state
from real_runs import syncline as command
from torch import nn
from zygote_maker import ForkedZygote

import syncline
from syncline import Async, Gradients, Server, Strategy
from syncline.config.spec import Spec
from syncline.engines import local

RECORDED = Path(__file__).with_name("same_bits.json")
PORTABLE_MATH = {
    "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41", "OMP_NUM_THREADS": "1",
}  # fmt: skip
STEPS = 20
# The presets whose result does not depend on which worker is faster. Periods are short enough for several exchanges.
DETERMINISTIC = {
    "allreduce": "allreduce", "server-sync": "server-sync", "sparknet": "sparknet(tau=4)",
    "iterative-reduce": "iterative-reduce(steps=4)", "onebit": "onebit", "bmuf": "bmuf(steps=4)", "gossip": "gossip",
    "diloco": "diloco(steps=4)",
}  # fmt: skip
ADAGRAD = Spec("Adagrad", {"lr": 0.01, "initial_accumulator_value": 0.01, "fused": True})
DOWNPOUR = Strategy(what=Gradients(), when=Async(2, 2), whom=Server(1, optimizer=ADAGRAD))
ONE_WORKER = {"server-async": "server-async", "downpour": DOWNPOUR, "easgd": "easgd(tau=4)", "nexus": "nexus"}
"""Deterministic only where no other worker's update can come first."""
SEVERAL_WORKERS = {"ltfb": "ltfb(steps=4)"}


def lenet() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def batch_norm_net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(676, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10),
    )  # fmt: skip


def images() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(105, 1, 28, 28, generator=generator), torch.randint(0, 10, (105,), generator=generator)


NETS = {"lenet": lenet, "batch norm": batch_norm_net}
# How to run is spelled in one place, so that a renamed setting is followed here once.
ALWAYS = {"batch": 12, "max_steps": STEPS, "epochs": 4, "tune": "off", "quiet": True, "device": "cpu"}
WAIT_FOR_REPLACEMENTS = {"on_worker_failure": "replace-only"}
OWN_LOOP = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
import torch, syncline
from test_same_bits import batch_norm_net, images
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(5)
loader = DataLoader(TensorDataset(*images()), batch_size=12, shuffle=True)
model = batch_norm_net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
model, optimizer, batches = syncline.worker().prepare(model, optimizer, loader)
for epoch in range(2):
    for x, y in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


def train(out: Path, model: nn.Module, workers: int, strategy: str | Strategy = "allreduce", **changes: object) -> str:
    optimizer = syncline.sgd(lr=0.05, momentum=0.9)
    settings = {**ALWAYS, "workers": workers, "strategy": strategy, "optimizer": optimizer, "out": str(out), **changes}
    return digest(syncline.train(model=model, data=images(), **settings).run_dir)  # type: ignore[arg-type]


def interrupted_and_resumed(out: Path, workers: int) -> str:
    with pytest.raises(syncline.Interrupted):
        train(out, InterruptAt(batch_norm_net(), step=7, flag=out / "flag"), workers)
    (run_dir,) = (path.parent for path in out.glob("*/plan.json"))
    return digest(syncline.resume(run_dir, quiet=True).run_dir)


def killed_and_replaced(out: Path, workers: int) -> str:
    model = SignalAt(batch_norm_net(), [(6, workers - 1), (13, 0)], out / "killed")
    return train(out, model, workers, **WAIT_FOR_REPLACEMENTS)


def own_loop(out: Path, workers: int) -> str:
    (out / "loop.py").write_text(OWN_LOOP)
    done = command("run", "loop.py", "--workers", str(workers), "--name", "own", cwd=out)
    assert done.code == 0, done.err
    return digest(out / "runs" / "own")


def digest(run_dir: Path) -> str:
    """SHA-256 of the model's state in the last checkpoint; a wrapper's prefix of the names does not count."""
    total = hashlib.sha256()
    for name, tensor in sorted(final_state(run_dir)["model"].items()):
        total.update(name.removeprefix("net.").encode() + tensor.contiguous().numpy().tobytes())
    return total.hexdigest()


def cases() -> dict[str, object]:
    """Each case by its name, as a function of a folder for its run."""
    found: dict[str, object] = {}
    for workers in (1, 3):
        for name, strategy in {**DETERMINISTIC, **(ONE_WORKER if workers == 1 else SEVERAL_WORKERS)}.items():
            for net, make in NETS.items():
                found[f"{name}, {net}, {workers}"] = lambda out, make=make, workers=workers, strategy=strategy: train(
                    out, make(), workers, strategy
                )
        for way in (interrupted_and_resumed, killed_and_replaced, own_loop):
            found[f"{way.__name__.replace('_', ' ')}, {workers}"] = lambda out, way=way, workers=workers: way(
                out, workers
            )
    return found


def digests(folder: Path, names: list[str]) -> dict[str, str]:
    """Run the cases in this process."""
    found = {}
    for number, name in enumerate(names):
        out = folder / str(number)
        out.mkdir()
        try:
            found[name] = cases()[name](out)  # type: ignore[operator]
        except (syncline.SynclineError, AssertionError) as error:
            found[name] = f"failed: {error}"
    return found


def digests_in_own_process(names: list[str]) -> dict[str, str]:
    """The libraries read their environment once, so the cases run in a process that starts with it."""
    env = environment(PORTABLE_MATH)
    env["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[1])
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, __file__, folder, *names], capture_output=True, text=True, env=env, timeout=600
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def batches(size: int = 8) -> list[list[str]]:
    """The cases, cut so that no test takes long."""
    names = list(cases())
    return [names[start : start + size] for start in range(0, len(names), size)]


@pytest.mark.parametrize("names", batches(), ids=lambda names: f"{names[0]} to {names[-1]}")
def test_parameters_have_the_recorded_digests(names):
    recorded = json.loads(RECORDED.read_text())
    assert digests_in_own_process(names) == {name: recorded[name] for name in names}


def test_interruptions_and_failures_leave_the_digest_of_an_undisturbed_run():
    recorded = json.loads(RECORDED.read_text())
    for workers in (1, 3):
        undisturbed = recorded[f"allreduce, batch norm, {workers}"]
        assert recorded[f"interrupted and resumed, {workers}"] == undisturbed
        assert recorded[f"killed and replaced, {workers}"] == undisturbed


if __name__ == "__main__":
    local.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": ForkedZygote})  # type: ignore[assignment]
    if len(sys.argv) > 1:
        print(json.dumps(digests(Path(sys.argv[1]), sys.argv[2:])))
    else:
        with tempfile.TemporaryDirectory() as cache:
            os.environ.setdefault("XDG_CACHE_HOME", cache)
            RECORDED.write_text(json.dumps(digests_in_own_process(list(cases())), indent=1) + "\n")
