"""Loops that take batches with `next` and begin another epoch when it raises StopIteration, as minGPT's does."""

from __future__ import annotations

import pytest
from own_loop_scripts import HEAD, NET, SGD
from real_runs import same_bits
from script_runs import audit, run, state

RESTARTED = (
    HEAD
    + NET
    + SGD
    + """
loader = DataLoader(data, batch_size=10, shuffle=True)
model, optimizer, batches = worker.prepare(model, optimizer, loader)
taken = iter(batches)
while worker.step < 25:
    try:
        x, y = next(taken)
    except StopIteration:
        taken = iter(batches)
        x, y = next(taken)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
assert worker.step == 25
"""
)
"""Two epochs of 11 batches, and three batches of another one."""


@pytest.mark.parametrize("killed_at", ["kill worker 1 at step 5; kill worker 0 at step 14", "kill worker 1 at step 11"])
def test_with_replacements_the_loop_takes_the_same_steps_to_the_same_bits(tmp_path, killed_at):
    """It ended with StopIteration after a failure, and began again at step 1."""
    run(tmp_path, RESTARTED, "whole", workers=2)
    done = run(tmp_path, RESTARTED, "killed", "--on-worker-failure", "replace-only", workers=2, faults=killed_at)
    assert done.out.count("was killed by SIGKILL") == killed_at.count("kill")
    assert same_bits(state(tmp_path, "whole")["model"], state(tmp_path, "killed")["model"])
    assert audit(tmp_path, "whole") == audit(tmp_path, "killed")
