"""Parameters that a script adds to its optimizer in the middle of the training."""

from __future__ import annotations

import pytest
from own_loop_scripts import ADDED_BY_EPOCH, ADDED_BY_STEP
from real_runs import same_bits
from real_runs import syncline as command
from script_runs import audit, run, state

KILLS = {
    "by step": (ADDED_BY_STEP, [(1, 4), (0, 5), (2, 13), (1, 14), (0, 20)]),
    "by epoch": (ADDED_BY_EPOCH, [(1, 11), (0, 16), (2, 19)]),
}
"""In the steps in which groups are added, and after them."""


@pytest.mark.parametrize("how", list(KILLS))
def test_replacements_train_the_parameters_that_were_added_to_the_same_bits(tmp_path, how):
    script, kills = KILLS[how]
    run(tmp_path, script, "whole")
    faults = "; ".join(f"kill worker {worker} at step {step}" for worker, step in kills)
    done = run(tmp_path, script, "killed", "--on-worker-failure", "replace-only", faults=faults)
    assert done.out.count("was killed by SIGKILL") == len(kills)
    whole, killed = state(tmp_path, "whole"), state(tmp_path, "killed")
    assert same_bits(whole["model"], killed["model"])
    assert whole["learning_rates"] == killed["learning_rates"]
    assert whole["script"] == killed["script"]
    assert audit(tmp_path, "whole") == audit(tmp_path, "killed")


@pytest.mark.parametrize("script", [ADDED_BY_STEP, ADDED_BY_EPOCH], ids=["by step", "by epoch"])
def test_a_resumed_run_has_the_groups_of_its_checkpoint_whether_its_script_adds_them_or_not(tmp_path, script):
    run(tmp_path, script, "whole")
    settings = ("--on-worker-failure", "stop", "--checkpoint-every-steps", "3")
    run(tmp_path, script, "stopped", *settings, faults="kill worker 1 at step 19", code=1)
    assert len(state(tmp_path, "stopped")["optimizer"]["param_groups"]) > 1
    done = command("resume", "runs/stopped", cwd=tmp_path)
    assert done.code == 0, done.err
    whole, resumed = state(tmp_path, "whole"), state(tmp_path, "stopped")
    assert same_bits(whole["model"], resumed["model"])
    assert whole["learning_rates"] == resumed["learning_rates"]


def test_workers_that_do_not_add_the_same_groups_are_reported(tmp_path):
    script = ADDED_BY_EPOCH.replace("if epoch == 1:", "if epoch == 1 and worker.rank == 1:")
    done = run(tmp_path, script, "different", code=1)
    assert "worker 1 has 2" in done.err


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        (ADDED_BY_EPOCH, ["--strategy", "onebit"], ["onebit", "--strategy allreduce"]),
        (ADDED_BY_EPOCH, ["--strategy", "sparknet"], ["--strategy allreduce"]),
        (ADDED_BY_EPOCH.replace("model[0].parameters()", "nn.Linear(2, 2).parameters()"), [], ["2 of the parameters"]),
        (ADDED_BY_EPOCH.replace("        optimizer.zero_grad()\n", ""), [], ["optimizer.zero_grad()"]),
    ],
    ids=["residuals", "own updates", "new layers", "leftover gradients"],
)
def test_what_could_not_be_recovered_exactly_is_refused_with_a_fix(tmp_path, script, arguments, words):
    done = run(tmp_path, script, "refused", *arguments, code=1)
    assert all(word in done.err for word in words), done.err
