"""Scripts that do different things on different workers: the run ends, and resumes with the fixed script."""

from __future__ import annotations

import pytest
from own_loop_scripts import NORMALIZED
from real_runs import final_state, same_bits
from real_runs import syncline as command

SCHEDULED = NORMALIZED.replace(
    "model, optimizer, batches = worker.prepare(model, optimizer, loader)\n",
    "schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)\n"
    "model, optimizer, batches, schedule = worker.prepare(model, optimizer, loader, schedule)\n",
).replace("        optimizer.step()\n", "        optimizer.step()\n        schedule.step()\n")
BEFORE = "        optimizer.zero_grad()\n"
MISTAKES = {
    "skipped": (f"        if worker.rank == 1 and worker.step == 13: continue\n{BEFORE}", ""),
    "left early": (f"        if worker.rank == 1 and worker.step == 13: break\n{BEFORE}", ""),
    "a replacement differs": (
        f"        if worker.step == 13 and not started: continue\n        started = True\n{BEFORE}",
        "kill worker 1 at step 13",
    ),
}
"""What one worker does in step 13, and a failure that makes it."""


@pytest.mark.parametrize("name", list(MISTAKES))
def test_the_state_before_the_step_is_saved_and_the_fixed_script_resumes_there_to_the_same_bits(tmp_path, name):
    mistake, faults = MISTAKES[name]
    script = tmp_path / "loop.py"
    script.write_text(SCHEDULED)
    assert command("run", "loop.py", "--workers", "2", "--name", "whole", cwd=tmp_path).code == 0
    script.write_text("started = False\n" + SCHEDULED.replace(BEFORE, mistake))
    words = ("run", "loop.py", "--workers", "2", "--name", "wrong", "--on-worker-failure", "replace-only")
    done = command(*words, cwd=tmp_path, env={"SYNCLINE_FAULTS": faults})
    assert done.code == 1
    assert "out of step" in done.err
    assert final_state(tmp_path / "runs" / "wrong")["position"]["step"] == 13
    assert "syncline resume" in done.err
    script.write_text(SCHEDULED)
    done = command("resume", "runs/wrong", cwd=tmp_path)
    assert done.code == 0, done.err
    whole, resumed = final_state(tmp_path / "runs" / "whole"), final_state(tmp_path / "runs" / "wrong")
    assert same_bits(whole["model"], resumed["model"])
    assert whole["schedulers"] == resumed["schedulers"]
    audits = [command("audit", f"runs/{run}", cwd=tmp_path) for run in ("whole", "wrong")]
    assert [audit.code for audit in audits] == [0, 0], audits[1].out
