"""What a script's steps and samples count as: accumulation, batches that are left out, runs without a step."""

from __future__ import annotations

import pytest
from own_loop_scripts import ACCUMULATED, HEAD, IN_A_CONTEXT, NET, PLAIN, SGD
from real_runs import syncline as command
from script_runs import assert_clean, run

LEFT_OUT = (
    HEAD
    + NET
    + SGD
    + """
model, optimizer, batches = worker.prepare(model, optimizer, DataLoader(data, batch_size=10, shuffle=True))
for epoch in range(2):
    for i, (x, y) in enumerate(batches):
        {leave}
        (F.cross_entropy(model(x), y) / 4).backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
"""
)


@pytest.mark.parametrize(
    ("script", "steps"), [(ACCUMULATED, 6), (IN_A_CONTEXT, 6), (PLAIN, 22)], ids=["by hand", "in a context", "without"]
)
def test_micro_batches_that_are_accumulated_are_one_step_with_all_of_their_samples(tmp_path, script, steps):
    """Eleven batches an epoch, four to a step. Each used to count as a step, and three of four as lost."""
    done = run(tmp_path, script + "worker.print('steps:', worker.step)\n", "whole", workers=2)
    assert f"steps: {steps}\n" in done.out
    assert f"finished {steps} steps" in done.out
    assert_clean(tmp_path, "whole", epochs=2)


@pytest.mark.parametrize(
    ("leave", "steps", "skipped"),
    [
        # The gradients of the last three batches of an epoch stay, and are part of the next epoch's first step.
        ("if i in (4, 5): continue", 4, 2 * 2 * 10 + 23),
        # In the middle of a step. What is left of the last epoch was never taken.
        ("if i == 7: optimizer.zero_grad(); break", 2, 63 + 40),
        ("if i == 8: break", 4, 23 + 10),
    ],
    ids=["continue", "break in a step", "break after a step"],
)
def test_batches_that_a_script_leaves_out_are_skipped_and_not_lost(tmp_path, leave, steps, skipped):
    ran = run(tmp_path, LEFT_OUT.format(leave=leave), "whole", workers=2)
    assert f"finished {steps} steps" in ran.out
    done = command("audit", "runs/whole", cwd=tmp_path)
    assert done.code == 0, done.out
    assert done.out.count(" 0 lost, 0 repeated") == 2
    assert f"{skipped:,} samples were skipped by the script" in done.out


def test_the_audit_of_a_script_that_failed_before_its_first_step_says_so(tmp_path):
    """It used to say that own loops have no ledger."""
    failing = PLAIN.replace("        optimizer.step()\n", "        raise ValueError('no step')\n")
    run(tmp_path, failing, "failed", workers=2, code=1)
    done = command("audit", "runs/failed", cwd=tmp_path)
    assert done.code == 1
    assert "has not completed a step" in done.err
    assert "own" not in done.err
