"""The user's own loop: three lines changed, the same parameters."""

from __future__ import annotations

import difflib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from real_runs import ROOT, environment, final_state, relative_difference, same_bits
from real_runs import syncline as command

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
        (("batch_size=10, shuffle=True", "batch_size=10, drop_last=True"), "remove drop_last"),
        (("worker.prepare(model, optimizer, loader)", "(model, optimizer, loader)"), "without calling worker.prepare"),
        (("worker.prepare(model, optimizer, loader)", "worker.prepare(model, loader)"), "exactly one optimizer"),
    ],
)
def test_a_loop_that_cannot_work_is_told_what_to_change(loop, change, words):
    loop.write_text(PREPARED.replace(*change))
    done = command("run", str(loop), cwd=loop.parent)
    assert done.code == 1
    assert words in done.err
