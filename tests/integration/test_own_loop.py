"""The user's own loop: three lines changed, the same parameters."""

from __future__ import annotations

import difflib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from own_loop_scripts import HEAD, LOSS_WEIGHT, NET, SAME_RESULT, SGD, UNFROZEN
from real_runs import ROOT, environment, final_state, relative_difference, same_bits
from real_runs import syncline as command
from warm_process import warm_process

import syncline

LOOP = ROOT / "examples" / "my_loop.py"
PLAIN = """
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(103, 12)
targets = (inputs[:, :5].sum(1) > 0).long()
loader = DataLoader(TensorDataset(inputs, targets), batch_size=10, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loss_fn = torch.nn.CrossEntropyLoss()
batches = loader

for epoch in range(3):
    for x, y in batches:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
"""
ADDED = (
    "import syncline",
    "worker = syncline.worker()",
    "model, optimizer, batches = worker.prepare(model, optimizer, loader)",
)
PREPARED = PLAIN.replace("import torch\n", f"import torch\n{ADDED[0]}\n", 1).replace(
    "batches = loader\n", f"{ADDED[1]}\n{ADDED[2]}\n"
)


@pytest.mark.parametrize(
    "strategy",
    ["ssp", "hogwild", "h2o(group=2)", "allreduce until epoch 1, then easgd"],
)
def test_a_loop_of_ones_own_takes_every_strategy(tmp_path, loop, strategy):
    ran = command("run", str(loop), "--workers", "4", "--strategy", strategy, "--json", cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert ran.events[-1]["steps"] == 33


def test_a_tournament_says_why_a_loop_of_ones_own_cannot_have_it(tmp_path, loop):
    ran = command("run", str(loop), "--workers", "2", "--strategy", "ltfb", cwd=tmp_path)
    assert ran.code == 1
    assert "Use syncline train" in ran.err


@pytest.fixture
def loop(tmp_path: Path) -> Path:
    path = tmp_path / "loop.py"
    path.write_text(PREPARED)
    return path


def run(loop: Path, name: str, *arguments: str) -> dict[str, object]:
    done = command("run", str(loop), "--name", name, *arguments, cwd=loop.parent)
    assert done.code == 0, done.err
    return final_state(loop.parent / "runs" / name)


def test_the_loop_differs_from_its_single_process_form_in_three_lines():
    plain, prepared = PLAIN.replace("batches = loader\n", "").splitlines(), PREPARED.splitlines()
    changed = [d for d in difflib.ndiff(plain, prepared) if d[:2] in ("+ ", "- ")]
    assert [c[2:] for c in changed] == list(ADDED)


def test_the_example_marks_exactly_the_lines_that_were_added():
    marked = [line.partition("#")[0].strip() for line in LOOP.read_text().splitlines() if line.endswith("# +")]
    assert marked == list(ADDED)


def test_an_own_loop_gives_the_parameters_of_syncline_train_for_any_number_of_workers(tmp_path, loop):
    loop.write_text(PREPARED.replace("Dropout(0.1)", "ReLU()"))
    torch.manual_seed(0)
    inputs = torch.randn(103, 12)
    targets = (inputs[:, :5].sum(1) > 0).long()
    model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    trained = syncline.train(
        model=model, data=(inputs, targets), optimizer=syncline.sgd(lr=0.1, momentum=0.9, fused=False), batch=10,
        epochs=3, workers=3, out=str(tmp_path / "built-in"), quiet=True,
    )  # fmt: skip
    expected = final_state(trained.run_dir)["model"]
    three = run(loop, "three", "--workers", "3")
    assert same_bits(expected, three["model"]), "one mechanism, two callers: not a bit may differ"
    one = run(loop, "one", "--workers", "1")
    assert relative_difference(expected, one["model"]) < 1e-5


def test_an_own_loop_follows_any_strategy_like_the_built_in_one(tmp_path, loop):
    loop.write_text(PREPARED.replace("Dropout(0.1)", "ReLU()"))
    torch.manual_seed(0)
    inputs = torch.randn(103, 12)
    targets = (inputs[:, :5].sum(1) > 0).long()
    model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    strategy = "diloco(steps=4) + bf16"
    trained = syncline.train(
        model=model, data=(inputs, targets), optimizer=syncline.sgd(lr=0.1, momentum=0.9, fused=False), batch=10,
        epochs=3, workers=2, strategy=strategy, out=str(tmp_path / "built-in"), quiet=True,
    )  # fmt: skip
    own = run(loop, "own", "--workers", "2", "--strategy", strategy)
    assert same_bits(final_state(trained.run_dir)["model"], own["model"])


def test_no_loss_is_reported_that_the_script_did_not_log(tmp_path, loop):
    """A loss of 0 was, and the terminal drew a chart of it."""
    ran = command("run", str(loop), "--workers", "2", "--json", cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert {event["loss"] for event in ran.events if event["event"] == "progress"} == {None}


def test_the_same_file_runs_as_plain_python(loop):
    saved = "\ntorch.save(model.state_dict(), 'plain.pt')\n"
    loop.write_text(PREPARED + saved)
    done = subprocess.run(
        [sys.executable, str(loop)], cwd=loop.parent, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    plain = torch.load(loop.parent / "plain.pt", weights_only=True)
    loop.write_text(PREPARED)
    assert same_bits(plain, run(loop, "one", "--workers", "1", "--threads", str(torch.get_num_threads()))["model"])


def test_a_stopped_own_loop_resumes_at_the_exact_sample_with_the_same_bits(tmp_path, loop):
    whole = run(loop, "whole", "--workers", "2")
    ask = "\n".join(
        [
            "        if epoch == 1 and worker.rank == 0 and not pathlib.Path('asked').exists():",
            "            pathlib.Path('asked').touch()",
            "            stat = pathlib.Path('/proc', str(os.getppid()), 'stat').read_text()",
            "            os.kill(int(stat.rpartition(')')[2].split()[1]), signal.SIGINT)",
            "        if epoch == 1:",
            "            threading.Event().wait(0.05)",
            "        optimizer.step()",
        ]
    )
    loop.write_text("import os, pathlib, signal, threading\n" + PREPARED.replace("        optimizer.step()", ask))
    done = command("run", str(loop), "--name", "stopped", "--workers", "2", cwd=tmp_path)
    assert done.code == 130, done.err
    assert "syncline resume runs/stopped" in done.err
    position = final_state(tmp_path / "runs" / "stopped")["position"]
    assert position["epoch"] == 1
    done = command("resume", "runs/stopped", cwd=tmp_path)
    assert done.code == 0, done.err
    assert same_bits(whole["model"], final_state(tmp_path / "runs" / "stopped")["model"])


def test_arguments_after_the_dashes_reach_the_script_and_what_it_prints_is_shown_once(tmp_path):
    script = tmp_path / "says.py"
    script.write_text(PREPARED + "\nimport sys\nprint('arguments:', sys.argv[1:])\nworker.log(score=0.5)\n")
    done = command("run", "says.py", "--workers", "2", "--", "--deep", "3", cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.out.count("arguments: ['--deep', '3']") == 1
    assert "score" in done.out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("worker.prepare(model, optimizer, loader)", "(model, optimizer, loader)"), "without calling worker.prepare"),
        (
            ("optimizer, batches = worker.prepare(model, optimizer, ", "batches = worker.prepare(model, "),
            "no optimizer",
        ),
        (("loss_fn(model(x), y)", "torch.nn.CrossEntropyLoss(reduction='sum')(model(x), y)"), "loss='sum'"),
        (("for x, y in batches", "for x, y in loader"), "Iterate over the loader that prepare returned"),
    ],
)
def test_a_loop_that_cannot_work_is_refused_with_what_to_change(loop, change, words):
    loop.write_text(
        PREPARED.replace(*change).replace("model, optimizer, batches = (model", "model, _, batches = (model")
    )
    done = command("run", str(loop), cwd=loop.parent)
    assert done.code == 1
    assert words in done.err


@pytest.mark.parametrize("name", list(SAME_RESULT))
def test_a_loop_trains_the_same_with_one_worker_and_with_three(tmp_path, name):
    (tmp_path / "loop.py").write_text(SAME_RESULT[name])
    found = []
    for workers in (1, 3):
        done = command("run", "loop.py", "--workers", str(workers), "--name", f"with-{workers}", cwd=tmp_path)
        assert done.code == 0, done.err
        found.append(final_state(tmp_path / "runs" / f"with-{workers}")["model"])
    assert relative_difference(*found) < (1e-4 if name == "LBFGS" else 1e-5)
    audits = [command("audit", f"runs/with-{workers}", cwd=tmp_path) for workers in (1, 3)]
    assert audits[0].out == audits[1].out
    assert audits[0].code == audits[1].code == (1 if "no batches" in name else 0)


def test_the_result_of_a_plain_script_is_that_of_torch_alone(tmp_path):
    """Frozen parameters that are trained later, and ones that are in no model, as one process does without Syncline."""
    for name, script in (("unfrozen", UNFROZEN), ("outside", LOSS_WEIGHT)):
        saving = "\nif worker.is_main:\n    torch.save(list(model.parameters()), 'with.pt')\n"
        (tmp_path / "loop.py").write_text(script + saving)
        done = command("run", "loop.py", "--workers", "2", "--name", name, cwd=tmp_path)
        assert done.code == 0, done.err
        alone = script.replace("model, optimizer, batches = worker.prepare(model, optimizer, loader)", ORDERED)
        (tmp_path / "alone.py").write_text(alone + saving.replace("with.pt", "alone.pt"))
        alone_words = warm_process().words("alone.py")
        subprocess.run(alone_words, cwd=tmp_path, env=environment(), check=True, timeout=60)
        ours, theirs = (torch.load(tmp_path / f, weights_only=False) for f in ("with.pt", "alone.pt"))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)


ORDERED = """
from syncline.data.order import permutation
class InOrder:
    epoch = 0
    def __iter__(self):
        order = permutation(0, InOrder.epoch, 103).tolist()
        InOrder.epoch += 1
        return iter([order[i : i + 10] for i in range(0, 103, 10)])
batches = DataLoader(data, batch_sampler=InOrder())
"""
"""The batches of a run, served to a script that prepares nothing."""


def test_the_original_optimizer_steps_with_the_others_too(tmp_path, loop):
    """A script that ignores what `prepare` returned for its optimizer used to train each worker alone."""
    whole = run(loop, "whole", "--workers", "2")
    changed = PREPARED.replace("model, optimizer, batches = worker", "_, _, batches = worker")
    loop.write_text(changed)
    assert same_bits(whole["model"], run(loop, "ignored", "--workers", "2")["model"])


@pytest.mark.parametrize(
    "skip",
    [
        "        if worker.rank == 1 and epoch == 1: continue\n",
        "        if worker.rank == 1 and epoch == 1: break\n",
        "        if worker.rank == 1 and epoch == 2: break\n",
    ],
    ids=["continue", "break", "end"],
)
def test_a_step_that_only_one_worker_skips_ends_the_run_with_the_worker_and_the_step(loop, skip):
    loop.write_text(PREPARED.replace("        optimizer.zero_grad()\n", f"{skip}        optimizer.zero_grad()\n"))
    done = command("run", str(loop), "--workers", "2", cwd=loop.parent)
    assert done.code == 1
    assert re.search(r"out of step: (worker \d is in step \d+|rank \d combines)", done.err), done.err
    assert "worker.any(" in done.err


def test_models_that_differ_between_workers_are_noticed_within_a_few_steps(loop):
    spoiled = "        if worker.rank == 1 and epoch == 1:\n            model[0].weight.data.mul_(1.01)\n"
    loop.write_text(PREPARED.replace("        optimizer.zero_grad()\n", f"{spoiled}        optimizer.zero_grad()\n"))
    done = command("run", str(loop), "--workers", "2", cwd=loop.parent)
    assert done.code == 1
    assert re.search(r"worker 0 and worker 1 differ at step (1\d|2\d)", done.err), done.err


def test_numbers_of_all_workers_are_combined_and_evaluation_is_divided_exactly(tmp_path):
    script = (
        HEAD
        + NET
        + SGD
        + """
import json, pathlib
loader, tests = DataLoader(data, batch_size=10, shuffle=True), DataLoader(data, batch_size=25)
model, optimizer, batches, tests = worker.prepare(model, optimizer, loader, tests)
losses = []
for x, y in batches:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(worker.mean(loss.item()))
model.eval()
seen = torch.zeros(0)
with torch.no_grad():
    for x, y in tests:
        seen = torch.cat([seen, x[:, 0]])
        both = worker.gather(x[:, 0])
everything = worker.gather(seen)
facts = {
    "losses": losses, "own": len(seen), "all": sorted(everything.tolist()) == sorted(inputs[:, 0].tolist()),
    "last": both.tolist() == inputs[75:103, 0].tolist() or both.tolist() == inputs[100:103, 0].tolist(),
    "mean": worker.mean(seen.mean().item()), "sum": worker.sum(len(seen)), "any": worker.any(worker.rank == 1),
}
worker.print("once", worker.size)
pathlib.Path(f"facts-{worker.size}-{worker.rank}.json").write_text(json.dumps(facts))
"""
    )
    (tmp_path / "loop.py").write_text(script)
    for workers in (1, 3):
        done = command("run", "loop.py", "--workers", str(workers), "--name", f"with-{workers}", cwd=tmp_path)
        assert done.code == 0, done.err
        assert done.out.count(f"once {workers}") == 1
    (alone,) = (json.loads(p.read_text()) for p in tmp_path.glob("facts-1-*.json"))
    of_three = [json.loads((tmp_path / f"facts-3-{rank}.json").read_text()) for rank in range(3)]
    assert [facts["own"] for facts in of_three] != [103] * 3
    for facts in of_three:
        assert facts["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert facts["mean"] == pytest.approx(alone["mean"], rel=1e-5)
        assert (facts["all"], facts["last"], facts["sum"], facts["any"]) == (True, True, 103, True)


def test_an_audit_of_a_script_that_takes_no_batches_says_why_there_is_nothing_to_account_for(tmp_path):
    (tmp_path / "loop.py").write_text(SAME_RESULT["no batches"])
    assert command("run", "loop.py", "--workers", "2", "--name", "whole", cwd=tmp_path).code == 0
    audit = command("audit", "runs/whole", cwd=tmp_path)
    assert audit.code == 1
    assert "took no batches from Syncline" in audit.err


def test_a_prepared_model_is_saved_whole_as_torch_saves_it_without_syncline(tmp_path):
    """A hook that cannot be pickled made torch.save(model) fail."""
    (tmp_path / "loop.py").write_text(SAME_RESULT["plain"] + 'torch.save(model, f"{worker.rank}.pt")\n')
    ran = command("run", "loop.py", "--workers", "2", cwd=tmp_path)
    assert ran.code == 0, ran.err
    with torch.serialization.safe_globals([torch.nn.Sequential, torch.nn.Linear, torch.nn.ReLU]):
        one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert same_bits(one.state_dict(), other.state_dict())


def test_copies_of_a_model_that_takes_no_batches_are_models_by_themselves(tmp_path):
    copied = "torch.save(model, f'{worker.rank}.pt')\nassert copy.deepcopy(model)(inputs).shape == (103, 2)\n"
    (tmp_path / "loop.py").write_text("import copy\n" + SAME_RESULT["no batches"] + copied)
    ran = command("run", "loop.py", "--workers", "2", cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert torch.load(tmp_path / "1.pt", weights_only=False)(torch.zeros(3, 12)).shape == (3, 2)


def test_clipping_in_the_loop_is_refused_where_only_servers_have_the_gradient(tmp_path):
    (tmp_path / "loop.py").write_text(SAME_RESULT["clipped"])
    done = command("run", "loop.py", "--workers", "2", "--strategy", "server-sync", cwd=tmp_path)
    assert done.code == 1
    assert "clip_norm=" in done.err


RANDOM_ITEMS = (
    HEAD
    + NET
    + SGD
    + """
class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return len(inputs)
    def __getitem__(self, index):
        return inputs[index] + 0.1 * torch.randn(12), targets[index]

model.insert(1, nn.Dropout(0.0))
tests = DataLoader(data, batch_size=25)
batches = worker.prepare(model, optimizer, DataLoader(Augmented(), batch_size=10, shuffle=True), tests)[2]
assert "RANK" not in os.environ, "a script that calls worker() must not distribute itself once more"
for epoch in range(2):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum().item() for x, y in worker._loaders[1])
"""
)


def test_random_samples_are_the_same_for_any_number_of_workers_and_uncombined_results_are_reported(tmp_path):
    (tmp_path / "loop.py").write_text(RANDOM_ITEMS)
    found = []
    for workers in (1, 2):
        done = command("run", "loop.py", "--workers", str(workers), "--name", f"with-{workers}", cwd=tmp_path)
        assert done.code == 0, done.err
        assert ("worker.sum" in done.out + done.err) == (workers > 1)
        found.append(final_state(tmp_path / "runs" / f"with-{workers}")["model"])
    assert relative_difference(*found) < 1e-5


def test_a_sampler_without_end_is_refused(tmp_path):
    endless = "sampler=torch.utils.data.RandomSampler(data, replacement=True, num_samples=10**10)"
    (tmp_path / "loop.py").write_text(SAME_RESULT["plain"].replace("shuffle=True", endless))
    done = command("run", "loop.py", "--workers", "2", cwd=tmp_path)
    assert done.code == 1
    assert "num_samples" in done.err
