"""Loops that take their next batch in the middle of a step, as nanoGPT's does, when workers fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import script_runs
from own_loop_scripts import AHEAD
from real_runs import Ran, same_bits
from real_runs import syncline as command
from script_runs import assert_clean, state

ACCUMULATED = AHEAD.replace("micro_steps = 1", "micro_steps = 4")
AFTER_BACKWARD = AHEAD.replace(
    """        x, y = next(stream, (None, None))
        die("after taking")
        loss.backward()
        die("after backward")
""",
    """        loss.backward()
        die("after backward")
        x, y = next(stream, (None, None))
        die("after taking")
""",
)
KILLS = {
    "two workers": (AHEAD, 2, [(0, 3, "before forward"), (1, 6, "after taking"), (0, 10, "after clipping")]),
    "three workers": (AHEAD, 3, [(2, 4, "after forward"), (1, 9, "after backward"), (0, 14, "after the step")]),
    "accumulated": (ACCUMULATED, 3, [(1, 1, "after taking"), (2, 3, "after the step"), (0, 4, "before forward")]),
    "after backward": (AFTER_BACKWARD, 2, [(1, 3, "after taking"), (0, 10, "after forward")]),
}
"""The script, the number of workers, and who is killed, at which step and where in it."""


def run(folder: Path, script: str, name: str, *arguments: str, kills: Any = (), **options: Any) -> Ran:
    script = script.replace("KILLS = []", f"KILLS = {list(kills)}")
    return script_runs.run(folder, script, name, *arguments, env={"KILLED": name}, **options)


@pytest.mark.parametrize("name", list(KILLS))
def test_with_replacements_the_result_has_the_same_bits_wherever_a_worker_is_killed(tmp_path, name):
    script, workers, kills = KILLS[name]
    run(tmp_path, script, "whole", workers=workers)
    done = run(tmp_path, script, "killed", "--on-worker-failure", "replace-only", workers=workers, kills=kills)
    assert done.out.count("was killed by SIGKILL") == len(kills)
    assert_clean(tmp_path, "killed", epochs=2)
    whole, killed = state(tmp_path, "whole"), state(tmp_path, "killed")
    assert same_bits(whole["model"], killed["model"])
    assert whole["schedulers"] == killed["schedulers"]
    assert whole["script"] == killed["script"]


@pytest.mark.parametrize("strategy", ["allreduce", "sparknet(tau=4)"])
def test_survivors_without_a_replacement_count_every_sample_once(tmp_path, strategy):
    script = AHEAD.replace("nn.BatchNorm1d(16)", "nn.ReLU()").replace(
        "    nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n", ""
    )
    kills = [(1, 5, "after taking"), (0, 15, "after backward")]
    done = run(tmp_path, script, "killed", "--strategy", strategy, workers=3, kills=kills)
    assert done.out.count("was killed by SIGKILL") >= 1
    assert_clean(tmp_path, "killed", epochs=2)


def test_a_checkpoint_saved_while_a_batch_is_taken_ahead_resumes_to_the_same_bits(tmp_path):
    run(tmp_path, AHEAD, "whole", workers=2)
    settings = ("--on-worker-failure", "stop", "--checkpoint-every-steps", "3")
    run(tmp_path, AHEAD, "stopped", *settings, workers=2, faults="kill worker 1 at step 17", code=1)
    # On a quick machine, later checkpoints were still being written when the run stopped.
    assert 0 < state(tmp_path, "stopped")["position"]["step"] < 18
    done = command("resume", "runs/stopped", cwd=tmp_path)
    assert done.code == 0, done.err
    assert_clean(tmp_path, "stopped", epochs=2)
    whole, resumed = state(tmp_path, "whole"), state(tmp_path, "stopped")
    assert same_bits(whole["model"], resumed["model"])
    assert whole["schedulers"] == resumed["schedulers"]
