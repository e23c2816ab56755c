"""A user's own loop when workers fail: the survivors stay where they are in their scripts."""

from __future__ import annotations

import json

import pytest
from own_loop_scripts import (
    ACCUMULATED,
    ADVERSARIAL,
    CLIPPED,
    CLOSURE,
    COMBINED_FIRST,
    DRAWN,
    HEAD,
    NET,
    NORMALIZED,
    PLAIN,
    SAMPLING,
    SCALED,
)
from real_runs import relative_difference, same_bits
from script_runs import audit, run, state

EVERYTHING = (
    HEAD
    + """
model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
by_step = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=40)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
model, optimizer, batches, by_step, scaler = worker.prepare(
    model, optimizer, DataLoader(data, batch_size=10, shuffle=True), by_step, scaler
)
for epoch in worker.epochs(4):
    for x, y in batches:
        scaler.scale(F.cross_entropy(model(x), y) / 2).backward()
        if worker.batch % 2 == 1 or worker.batch == len(batches) - 1:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            by_step.step()
            worker.state.updates = worker.state.get("updates", 0) + 1
"""
)
FIVE_KILLS = "; ".join(
    f"kill worker {worker} at step {step}" for worker, step in [(1, 3), (0, 9), (2, 17), (1, 26), (0, 38)]
)
OBSERVED = (
    HEAD
    + NET
    + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(data, batch_size=10, shuffle=True)
model, optimizer, batches, tests = worker.prepare(model, optimizer, loader, DataLoader(data, batch_size=32))
best, evaluated, steps = [], [], 0
first = id(model), id(optimizer), id(best), os.getpid()
worker.state.setdefault("best", 0.0)
for epoch in worker.epochs(3):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        steps += 1
    evaluated.append(epoch)
    right = 0
    with torch.no_grad():
        for x, y in tests:
            right += (model(x).argmax(1) == y).sum().item()
    accuracy = worker.sum(right) / len(data)
    worker.state.best = max(worker.state.best, accuracy)
    best.append(worker.state.best)
    worker.log(accuracy=accuracy)
assert first == (id(model), id(optimizer), id(best), os.getpid())
import json, pathlib
seen = {"rank": worker.rank, "evaluated": evaluated, "best": best, "steps": steps, "at": worker.step}
pathlib.Path(f"seen-{os.getpid()}.json").write_text(json.dumps(seen))
"""
)


def test_with_replacements_five_kills_change_no_bit_whatever_the_loop_does(tmp_path):
    run(tmp_path, EVERYTHING, "whole")
    done = run(tmp_path, EVERYTHING, "killed", "--on-worker-failure", "replace-only", faults=FIVE_KILLS)
    assert done.out.count("was killed by SIGKILL") == 5
    assert audit(tmp_path, "whole") == audit(tmp_path, "killed")
    whole, killed = state(tmp_path, "whole"), state(tmp_path, "killed")
    assert same_bits(whole["model"], killed["model"])
    assert whole["schedulers"] == killed["schedulers"]
    assert whole["script"] == killed["script"]


@pytest.mark.parametrize(
    "script",
    [ADVERSARIAL, CLIPPED, CLOSURE, DRAWN, SCALED, SAMPLING, ACCUMULATED],
    ids=["two optimizers", "clipped", "a closure", "drawn batches", "scaled losses", "every 4th", "accumulated"],
)
def test_with_replacements_the_result_is_the_same(tmp_path, script):
    run(tmp_path, script, "whole")
    faults = "kill worker 1 at step 2; kill worker 0 at step 5"
    done = run(tmp_path, script, "killed", "--on-worker-failure", "replace-only", faults=faults)
    assert done.out.count("was killed by SIGKILL") == 2
    assert relative_difference(state(tmp_path, "whole")["model"], state(tmp_path, "killed")["model"]) == 0
    assert audit(tmp_path, "whole") == audit(tmp_path, "killed")


@pytest.mark.parametrize(
    "script", [PLAIN, NORMALIZED, ADVERSARIAL, CLIPPED, CLOSURE, DRAWN],
    ids=["plain", "batch norm", "two optimizers", "clipped", "a closure", "drawn batches"],
)  # fmt: skip
def test_survivors_continue_and_every_sample_counts_once(tmp_path, script):
    faults = "kill worker 1 at step 2; kill worker 0 at step 5"
    done = run(tmp_path, script, "killed", faults=faults)
    assert done.out.count("was killed by SIGKILL") == 2
    assert audit(tmp_path, "killed")


def test_survivors_keep_their_objects_and_do_not_evaluate_finished_epochs_again(tmp_path):
    faults = "kill worker 0 at step 15; kill worker 2 at step 27"
    done = run(tmp_path, OBSERVED, "killed", faults=faults)
    assert done.out.count("was killed by SIGKILL") == 2
    audit(tmp_path, "killed")
    seen = [json.loads(path.read_text()) for path in tmp_path.glob("seen-*.json")]
    (survivor,) = [s for s in seen if s["evaluated"] == [0, 1, 2]]
    assert survivor["best"] == sorted(survivor["best"])
    assert survivor["steps"] == survivor["at"], "no step was made twice"
    assert all(s["best"][-1] == survivor["best"][-1] for s in seen), "worker.state reached the replacements"
    assert all(s["evaluated"] == [0, 1, 2][-len(s["evaluated"]) :] for s in seen)


@pytest.mark.parametrize("policy", ["replace-only", "shrink-and-replace"])
def test_a_replacement_exchanges_nothing_while_it_runs_through_finished_epochs(tmp_path, policy):
    """The coordinator may not know yet in which epoch the run is; the replacement evaluated finished ones with all."""
    script = OBSERVED.replace("worker.epochs(3)", "range(3)")
    done = run(tmp_path, script, "killed", "--on-worker-failure", policy, faults="kill worker 1 at step 12")
    assert done.out.count("was killed by SIGKILL") == 1
    audit(tmp_path, "killed")
    run(tmp_path, script, "whole")
    if policy == "replace-only":
        whole, killed = state(tmp_path, "whole"), state(tmp_path, "killed")
        assert same_bits(whole["model"], killed["model"])
        assert whole["script"] == killed["script"], "worker.state"


def test_a_script_without_batches_computes_with_the_live_state_from_its_first_forward_on(tmp_path):
    """A replacement computed its first gradient with the initial parameters, and it was applied."""
    run(tmp_path, COMBINED_FIRST, "whole")
    faults = "kill worker 1 at step 4; kill worker 0 at step 9"
    done = run(tmp_path, COMBINED_FIRST, "killed", "--on-worker-failure", "replace-only", faults=faults)
    assert done.out.count("was killed by SIGKILL") == 2
    assert same_bits(state(tmp_path, "whole")["model"], state(tmp_path, "killed")["model"])
