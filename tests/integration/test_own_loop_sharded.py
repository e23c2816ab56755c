"""`--layout sharded` in a user's own loop: the result of one process, also after kills, and plain states."""

from __future__ import annotations

import json

import pytest
import torch
from own_loop_scripts import ADDED_BY_STEP, CLOSURE, HEAD, PLAIN
from real_runs import relative_difference, same_bits
from real_runs import syncline as command
from script_runs import assert_clean, run, state

SHARDED = ("--layout", "sharded")
EVERYTHING = (
    HEAD
    + """
import json, pathlib, signal

KILLS = json.loads(os.environ.get("KILLS", "[]"))
now = [None]


def die(place):
    for victim, step, where in KILLS:
        flag = pathlib.Path(f"killed-{victim}-{step}-{where}")
        if (victim, step, where) == (worker.rank, now[0], place) and not flag.exists():
            flag.touch()
            return True
    return False


class Mortal(torch.optim.AdamW):
    def step(self, closure=None):
        if die("in the update"):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data[: max(1, p.numel() // 2)] = float("nan")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(12, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 2)
        self.frozen, self.rarely, self.scale = nn.Linear(16, 16), nn.Linear(16, 16), nn.Parameter(torch.tensor(1.5))
        self.frozen.requires_grad_(False)

    def forward(self, x, more):
        x = torch.relu(self.norm(self.first(x)))
        return self.last(self.frozen(self.rarely(x) if more else x) * self.scale)


model = Net()
tensors = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() < 2]
optimizer = Mortal([{"params": tensors, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.02)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=33)
loader = DataLoader(data, batch_size=10, shuffle=True)
model, optimizer, schedule, batches, tests = worker.prepare(
    model, optimizer, schedule, loader, DataLoader(data, batch_size=32)
)
norms, first = [], (id(model), id(optimizer), os.getpid())
for epoch in worker.epochs(3):
    model.train()
    for x, y in batches:
        now[0] = worker.step
        for half in (0, 1):
            (F.cross_entropy(model(x, worker.step % 3 == 0), y) / 2).backward()
        if die("before clipping"):
            os.kill(os.getpid(), signal.SIGKILL)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        if die("after clipping"):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        if die("after the step"):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        schedule.step()
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in tests:
            right += (model(x, True).argmax(1) == y).sum().item()
    worker.state.accuracy = worker.sum(right) / len(data)
assert first == (id(model), id(optimizer), os.getpid())
if worker.is_main:
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "norms": norms}
    torch.save({**saved, "accuracy": worker.state.accuracy}, "saved.pt")
before = model.last.weight.data_ptr()
model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
assert (model.last.weight.data_ptr() == before) == (worker.size == 1), "what it loads is its own"
"""
)


def saved(folder):
    return torch.load(folder / "saved.pt")


def assert_same_optimizer(actual, expected):
    assert actual["param_groups"] == expected["param_groups"]
    assert actual["state"].keys() == expected["state"].keys()
    for number, slots in expected["state"].items():
        assert actual["state"][number].keys() == slots.keys()
        for name, value in slots.items():
            torch.testing.assert_close(actual["state"][number][name], value, rtol=1e-3, atol=1e-6)


def test_a_script_with_everything_gives_what_one_process_gives_and_plain_states(tmp_path):
    run(tmp_path, EVERYTHING, "replicated", workers=1)
    expected = saved(tmp_path)
    for workers in (2, 3):
        run(tmp_path, EVERYTHING, f"sharded{workers}", *SHARDED, workers=workers)
        got = saved(tmp_path)
        assert relative_difference(expected["model"], got["model"]) < 1e-5
        assert_same_optimizer(got["optimizer"], expected["optimizer"])
        counts = [slots["step"].data_ptr() for slots in got["optimizer"]["state"].values()]
        assert len(set(counts)) == len(counts), "each parameter counts by itself when this is loaded"
        assert got["norms"] == pytest.approx(expected["norms"], rel=1e-4)
        assert got["accuracy"] == expected["accuracy"]
        assert_same_optimizer(state(tmp_path, f"sharded{workers}")["optimizer"], expected["optimizer"])
        assert_clean(tmp_path, f"sharded{workers}", epochs=3)


def test_with_replacements_kills_anywhere_in_a_step_change_no_bit(tmp_path):
    run(tmp_path, EVERYTHING, "whole", *SHARDED)
    whole = saved(tmp_path)
    places = ["before clipping", "after clipping", "in the update", "after the step"]
    env = {"KILLS": json.dumps([(number % 3, 3 + 7 * number, place) for number, place in enumerate(places)])}
    done = run(tmp_path, EVERYTHING, "killed", *SHARDED, "--on-worker-failure", "replace-only", env=env)
    assert done.out.count("was killed by SIGKILL") == 4
    assert same_bits(whole["model"], saved(tmp_path)["model"])
    assert state(tmp_path, "whole")["schedulers"] == state(tmp_path, "killed")["schedulers"]
    assert_same_optimizer(saved(tmp_path)["optimizer"], whole["optimizer"])
    assert_clean(tmp_path, "killed", epochs=3)


def test_groups_that_a_script_adds_are_divided_anew_also_by_replacements(tmp_path):
    run(tmp_path, ADDED_BY_STEP, "alone", workers=1)
    run(tmp_path, None, "whole", *SHARDED, workers=2)
    faults = "kill worker 1 at step 4; kill worker 0 at step 14"
    run(tmp_path, None, "killed", *SHARDED, "--on-worker-failure", "replace-only", workers=2, faults=faults)
    alone, whole, killed = (state(tmp_path, name) for name in ("alone", "whole", "killed"))
    assert relative_difference(alone["model"], whole["model"]) < 1e-5
    assert same_bits(whole["model"], killed["model"])
    assert_same_optimizer(killed["optimizer"], alone["optimizer"])


@pytest.mark.parametrize(
    ("policy", "victims"),
    [
        ("shrink", [(2, 5, "after clipping"), (0, 14, "in the update")]),
        ("shrink-and-replace", [(1, 14, "in the update")]),
    ],
)
def test_survivors_continue_where_they_are_and_every_sample_counts_once(tmp_path, policy, victims):
    env = {"KILLS": json.dumps(victims)}
    done = run(tmp_path, EVERYTHING, "killed", *SHARDED, "--on-worker-failure", policy, env=env)
    assert done.out.count("was killed by SIGKILL") == len(victims)
    assert_clean(tmp_path, "killed", epochs=3)
    assert all(value.isfinite().all() for value in state(tmp_path, "killed")["model"].values())


def test_any_layout_and_number_of_workers_resume_a_script(tmp_path):
    body = """
        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss
        optimizer.step(closure)
"""
    script = PLAIN[: PLAIN.index("        optimizer.zero_grad()")].replace("range(2)", "range(3)") + body
    run(tmp_path, script, "whole", workers=1)
    settings = ("--on-worker-failure", "stop", "--checkpoint-every-steps", "6")
    faults = "kill worker 1 at step 13"
    run(tmp_path, None, "first", *settings, *SHARDED, workers=3, faults=faults, code=1)
    run(tmp_path, None, "second", *settings, workers=2, faults=faults, code=1)
    for name, workers, layout in [("first", "2", "replicated"), ("second", "3", "sharded")]:
        done = command("resume", f"runs/{name}", "--workers", workers, "--layout", layout, cwd=tmp_path)
        assert done.code == 0, done.err
        assert relative_difference(state(tmp_path, "whole")["model"], state(tmp_path, name)["model"]) < 1e-5
        assert_clean(tmp_path, name, epochs=3)


def test_what_would_be_different_is_refused_with_the_reason(tmp_path):
    step = "        optimizer.step()\n"
    shrink = "        model[0].weight.data.mul_(0.9)\n"
    for script, what in [
        (CLOSURE, "LBFGS looks at whole ones"),
        (PLAIN.replace(step, step + shrink), "without optimizer.step()"),
        ("import torch.distributed as dist\ndist.init_process_group('gloo')\n", "trains with torch.distributed"),
    ]:
        refused = run(tmp_path, script, f"refused{len(what)}", *SHARDED, workers=2, code=1)
        assert what in refused.err
        assert "--layout replicated" in refused.err
