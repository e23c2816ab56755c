"""A language model that carries its hidden state from batch to batch, when workers fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import script_runs
import torch
from real_runs import relative_difference, same_bits
from real_runs import syncline as command
from script_runs import audit, run

LOOP = """
import os, pathlib, signal, torch, syncline
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
text = torch.randint(17, (9, 61)).t().contiguous()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.lstm, self.out = nn.Embedding(17, 8), nn.LSTM(8, 10, 2), nn.Linear(10, 17)

    def forward(self, x, hidden):
        out, hidden = self.lstm(self.words(x), hidden)
        return self.out(out), hidden

def get_batch(number):
    start = 4 * (number % 15)
    return text[start : start + 4], text[start + 1 : start + 5]

def kill_once(name):
    if not pathlib.Path(name).exists():
        pathlib.Path(name).touch()
        os.kill(os.getpid(), signal.SIGKILL)

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
worker = syncline.worker()
model, optimizer = worker.prepare(model, optimizer)
hidden = worker.carried((torch.zeros(2, 9, 10), torch.zeros(2, 9, 10)), dim=1, reset_every=10)
for x, y in worker.batches(get_batch, steps=20, dim=1):
    optimizer.zero_grad()
    output, hidden.value = model(x, hidden.value)
    F.cross_entropy(output.reshape(-1, 17), y.reshape(-1)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
"""
KILLED = LOOP.replace(
    "    F.cross_entropy",
    "    if worker.batch == 18 and worker.rank == worker.size - 1:\n        kill_once('killed')\n    F.cross_entropy",
)
"""A worker dies when its new state is known to all, and its gradients are not."""
UNCHANGED = (
    LOOP[: LOOP.index("hidden = worker.carried")]
    + """
def detached(hidden):
    return tuple(state.detach() for state in hidden)

def get_batch(start):
    length = min(4, len(text) - 3 - start)
    return text[start : start + length], text[start + 1 : start + 1 + length].reshape(-1)

for epoch in range(2):
    hidden = torch.zeros(2, 9, 10), torch.zeros(2, 9, 10)
    whole = [get_batch(start) for start in range(0, 38, 4)]
    for batch, (x, y) in enumerate(worker.batches(whole, dim=1)):
        optimizer.zero_grad()
        hidden = worker.carry(hidden, dim=1)
        output, hidden = model(x, hidden)
        if epoch == 1 and batch == 6 and worker.rank == worker.size - 1 and os.environ.get("KILL"):
            kill_once('killed')
        F.cross_entropy(output.reshape(-1, 17), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
"""
)
"""The same with the state in a variable of the script, a list of whole batches and flattened targets."""
PLAIN = (
    UNCHANGED.replace("worker = syncline.worker()", "")
    .replace("model, optimizer = worker.prepare(model, optimizer)", "")
    .replace("worker.batches(whole, dim=1)", "whole")
    .replace("worker.carry(hidden, dim=1)", "detached(hidden)")
    .replace("if epoch == 1 and batch == 6 and worker.rank == worker.size - 1 and os.environ", "if {}")
    + "torch.save(model.state_dict(), 'plain.pt')\n"
)
FAULTS = "kill worker 1 at step 3; kill worker 0 at step 12"


def state(folder: Path, name: str, samples: int = 180) -> dict[str, Any]:
    """What a clean run has saved, with epochs of so many samples."""
    clean = f"{samples} of {samples} samples committed once; 0 lost, 0 repeated"
    assert all(clean in line for line in audit(folder, name))
    return script_runs.state(folder, name)


def hidden_of(found: dict[str, Any]) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = found["script"]["carried"][0][-1]["tensors"]
    return tensors


def test_replacements_continue_with_the_hidden_state_to_the_bit(tmp_path):
    run(tmp_path, LOOP, "one", workers=1)
    run(tmp_path, LOOP, "whole")
    done = run(tmp_path, KILLED, "killed", "--on-worker-failure", "replace-only", faults=FAULTS)
    assert done.out.count("was killed by SIGKILL") == 3
    one, whole, killed = (state(tmp_path, name) for name in ("one", "whole", "killed"))
    assert relative_difference(one["model"], whole["model"]) < 1e-5
    assert same_bits(whole["model"], killed["model"])
    assert all(torch.equal(a, b) for a, b in zip(hidden_of(whole), hidden_of(killed), strict=True))


def test_survivors_divide_the_hidden_state_anew_and_none_of_it_is_lost(tmp_path):
    """With a learning rate of 0 the hidden state depends on the text only, not on which step a sample was in."""
    run(tmp_path, LOOP.replace("lr=0.5", "lr=0.0"), "one", workers=1)
    done = run(tmp_path, KILLED.replace("lr=0.5", "lr=0.0"), "killed", workers=4, faults=FAULTS)
    assert done.out.count("was killed by SIGKILL") == 3
    for a, b in zip(hidden_of(state(tmp_path, "one")), hidden_of(state(tmp_path, "killed")), strict=True):
        torch.testing.assert_close(a, b)


def test_an_interrupted_run_resumes_with_the_hidden_state(tmp_path):
    run(tmp_path, LOOP, "whole", workers=2)
    settings = ("--on-worker-failure", "stop", "--checkpoint-every-steps", "4")
    run(tmp_path, LOOP, "stopped", *settings, workers=2, faults="kill worker 1 at step 10", code=1)
    done = command("resume", "runs/stopped", cwd=tmp_path)
    assert done.code == 0, done.err
    assert same_bits(state(tmp_path, "whole")["model"], state(tmp_path, "stopped")["model"])


def test_a_strategy_that_does_not_sum_gradients_in_every_step_is_refused(tmp_path):
    done = run(tmp_path, LOOP, "local", "--strategy", "sparknet(tau=4)", workers=2, code=1)
    assert "--strategy allreduce" in done.err


def test_a_hidden_state_in_a_variable_of_the_script_is_carried_to_the_bit(tmp_path, monkeypatch):
    (tmp_path / "plain.py").write_text(PLAIN)
    subprocess.run([sys.executable, "plain.py"], cwd=tmp_path, check=True)
    run(tmp_path, UNCHANGED, "one", workers=1)
    run(tmp_path, UNCHANGED, "whole")
    monkeypatch.setenv("KILL", "1")
    done = run(tmp_path, UNCHANGED, "killed", "--on-worker-failure", "replace-only", faults=FAULTS)
    assert done.out.count("was killed by SIGKILL") == 3
    one, whole, killed = (state(tmp_path, name, 90) for name in ("one", "whole", "killed"))
    assert same_bits(torch.load(tmp_path / "plain.pt"), one["model"])
    assert relative_difference(one["model"], whole["model"]) < 1e-5
    assert same_bits(whole["model"], killed["model"])


def test_an_interrupted_run_resumes_with_the_state_in_a_variable_of_the_script(tmp_path):
    run(tmp_path, UNCHANGED, "whole", workers=2)
    settings = ("--on-worker-failure", "stop", "--checkpoint-every-steps", "4")
    run(tmp_path, UNCHANGED, "stopped", *settings, workers=2, faults="kill worker 1 at step 15", code=1)
    done = command("resume", "runs/stopped", cwd=tmp_path)
    assert done.code == 0, done.err
    assert same_bits(state(tmp_path, "whole", 90)["model"], state(tmp_path, "stopped", 90)["model"])


@pytest.mark.parametrize(
    ("before", "after", "fix"),
    [
        ("output, hidden = model(x, hidden)", "output, (h, c) = model(x, hidden); hidden = h * 0.5, c", "unchanged"),
        ("hidden = torch.zeros(2, 9, 10), torch.zeros(2, 9, 10)", "hidden = (torch.rand(2, 9, 10),) * 2", "initial"),
    ],
)
def test_a_state_that_other_workers_could_not_know_is_refused(tmp_path, before, after, fix):
    done = run(tmp_path, UNCHANGED.replace(before, after), "changed", workers=2, code=1)
    assert "worker.carried" in done.err
    assert fix in done.err
