"""A user's own loop with schedulers when workers fail, under every kind of strategy, and when it is resumed."""

from __future__ import annotations

import re

import pytest
import torch
from real_runs import same_bits
from real_runs import syncline as command
from script_runs import assert_clean, run, state

LOOP = """
import torch, syncline
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(103, 12)
targets = (inputs[:, :5].sum(1) > 0).long()
loader = DataLoader(TensorDataset(inputs, targets), batch_size=10, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
by_step = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
worker = syncline.worker()
model, optimizer, batches, by_step = worker.prepare(model, optimizer, loader, by_step)

for epoch in range(3):
    for x, y in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        by_step.step()
    print(f"epoch {epoch} is over after {by_step.last_epoch} steps", flush=True)
"""
BY_EPOCH = LOOP.replace("        by_step.step()\n", "").replace("    print(", "    by_step.step()\n    print(")


@pytest.mark.parametrize("loop", [LOOP, BY_EPOCH], ids=["schedule by step", "schedule by epoch"])
def test_with_replacements_the_result_is_the_same_to_the_bit_schedulers_included(tmp_path, loop):
    (tmp_path / "loop.py").write_text(loop)
    run(tmp_path, None, "whole")
    faults = "kill worker 1 at step 5; kill worker 0 at step 14; kill worker 2 at step 22; kill worker 1 at step 32"
    done = run(tmp_path, None, "killed", "--on-worker-failure", "replace-only", faults=faults)
    assert done.out.count("was killed by SIGKILL") == 4
    assert_clean(tmp_path, "killed", epochs=3)
    whole, killed = state(tmp_path, "whole"), state(tmp_path, "killed")
    assert same_bits(whole["model"], killed["model"])
    assert whole["schedulers"] == killed["schedulers"]


@pytest.mark.parametrize("strategy", ["allreduce", "sparknet(tau=4)", "ssp", "gossip"])
def test_under_any_strategy_the_others_go_on_and_no_sample_is_lost(tmp_path, strategy):
    (tmp_path / "loop.py").write_text(LOOP.replace("BatchNorm1d(16)", "ReLU()"))
    faults = "kill worker 1 at step 13; kill worker 0 at step 32"
    done = run(tmp_path, None, "killed", "--strategy", strategy, faults=faults)
    assert "worker 1 was killed by SIGKILL" in done.out
    assert_clean(tmp_path, "killed", epochs=3)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_replacement_that_starts_at_the_end_of_an_epoch_takes_its_part_of_what_is_made_up_for(tmp_path, workers):
    """The position of the run is in the next epoch by then, which the script has none of."""
    slow = "        optimizer.step()\n        import time; time.sleep(0.4 if worker.step > 31 else 0.0)\n"
    script = LOOP.replace("BatchNorm1d(16)", "ReLU()").replace("        optimizer.step()\n", slow)
    run(tmp_path, script, "killed", "--strategy", "sparknet(tau=4)", workers=workers, faults="kill worker 0 at step 32")
    assert_clean(tmp_path, "killed", epochs=3)


def test_a_schedule_with_an_end_stays_there_in_the_steps_that_make_up_for_samples(tmp_path):
    """OneCycleLR raised in the first step after its last one."""
    one_cycle = "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=33)"
    script = LOOP.replace("torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))", one_cycle)
    assert one_cycle in script
    run(tmp_path, script, "killed", faults="kill worker 1 at step 13")
    assert_clean(tmp_path, "killed", epochs=3)
    assert state(tmp_path, "killed")["schedulers"][0]["last_epoch"] == 33
    too_many = script.replace("range(3)", "range(4)")
    assert "total" in run(tmp_path, too_many, "whole", workers=2, code=1).err, "as in one process"


@pytest.mark.parametrize(
    ("loop", "every", "killed_at"),
    [(LOOP, 6, 13), (BY_EPOCH, 6, 13), (BY_EPOCH, 11, 23)],
    ids=["schedule by step", "schedule by epoch", "from the end of an epoch"],
)
def test_a_loop_that_failed_resumes_with_its_schedulers_where_they_were(tmp_path, loop, every, killed_at):
    (tmp_path / "loop.py").write_text(loop)
    run(tmp_path, None, "whole")
    settings = ("--on-worker-failure", "stop", "--checkpoint-every-steps", str(every))
    run(tmp_path, None, "stopped", *settings, faults=f"kill worker 1 at step {killed_at}", code=1)
    done = command("resume", "runs/stopped", cwd=tmp_path)
    assert done.code == 0, done.err
    assert_clean(tmp_path, "stopped", epochs=3)
    whole, resumed = state(tmp_path, "whole"), state(tmp_path, "stopped")
    assert same_bits(whole["model"], resumed["model"])
    assert whole["schedulers"] == resumed["schedulers"]


LEFT_ALONE = """
import os, signal, time, torch, syncline
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset

def wait_until(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)

class Die(torch.nn.Module):
    def forward(self, x):
        if self.training and worker.rank == 1 and worker.step == DIES_AT and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return x

is_replacement = Path("died").exists()
if is_replacement:
    wait_until(Path("over").exists)  # the other worker has ended its loop alone
torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(40, 6), torch.randint(2, (40,))), batch_size=10, shuffle=True)
layers = torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), Die(), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
worker = syncline.worker()
model, optimizer, batches = worker.prepare(model, optimizer, loader)
for x, y in batches:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
if not is_replacement:
    Path("over").touch()
    wait_until(lambda: worker._session.link.is_outdated(worker._session.view))  # until the replacement joins
torch.save(model.state_dict(), "replacement.pt" if is_replacement else "survivor.pt")
"""


@pytest.mark.parametrize("dies_at", [3, 2], ids=["since the middle of the round", "all the time"])
def test_a_replacement_repeats_a_round_with_batch_norm_in_which_the_other_worker_was_alone(tmp_path, dies_at):
    """The layers of a worker that was alone left no record, so its replacement took other values for their tables."""
    run(tmp_path, LEFT_ALONE.replace("DIES_AT", str(dies_at)), "alone", workers=2)
    survivor, replacement = (torch.load(tmp_path / f"{name}.pt") for name in ("survivor", "replacement"))
    assert same_bits(survivor, replacement), "running statistics included"
    assert_clean(tmp_path, "alone", epochs=1, samples=40)


def test_a_mistake_in_the_script_is_reported_and_not_tried_for_ever(tmp_path):
    (tmp_path / "loop.py").write_text(
        LOOP.replace("    print(", "    torch.zeros(2, 3) @ torch.zeros(2, 3)\n    print(")
    )
    done = run(tmp_path, None, "wrong", code=1)
    first = done.err.splitlines()[0]
    assert re.match(r"Worker \d raised RuntimeError at step 1\d.*: mat1 and mat2 shapes cannot be multiplied", first)
    assert "torch.zeros(2, 3) @ torch.zeros(2, 3)" in done.err, "the line of the user's own code"
