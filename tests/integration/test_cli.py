"""The command line, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_runs import final_state, same_bits
from real_runs import syncline as command

TASK = """
import torch, syncline
torch.manual_seed(0)
x = torch.randn(120, 8)
y = (x.sum(1) > 0).long()
task = syncline.Task(model=torch.nn.Linear(8, 2), data=(x, y), test=(x, y), loss="cross_entropy",
                     optimizer=syncline.sgd(lr=0.5), metrics=["accuracy", "f1_score"])
other = syncline.Task(model=torch.nn.Linear(8, 2), data=(x, y))
def made():
    return task
number = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_task.py").write_text(TASK)
    return tmp_path


def test_a_model_by_name_trains_on_data_by_name_and_reports_its_accuracy(tmp_path):
    done = command("train", "mlp", "--data", "digits", "--workers", "2", "--epochs", "3", "--name", "d", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "epoch 3/3" in done.out
    assert "test/accuracy" in done.out
    assert "runs/d" in done.out
    assert "\x1b" not in done.out, "no escape codes without a terminal"
    run = tmp_path / "runs" / "d"
    assert {p.name for p in run.iterdir()} == {
        "plan.json", "expected.json", "config.json", "events.jsonl", "ledger.jsonl", "summary.json",
        "predictions.json", "task.bin", "logs", "checkpoints", "driver.lock", "workers.lock",
    }  # fmt: skip


def test_json_gives_one_object_a_line_and_the_summary_last(folder):
    done = command("train", "my_task.py:task", "--workers", "2", "--epochs", "2", "--json", cwd=folder)
    assert done.code == 0, done.err
    assert done.events[0]["event"] == "run_started"
    last = done.events[-1]
    assert last["event"] == "summary"
    assert 0.5 < last["metrics"]["test/accuracy"] <= 1
    assert 0.5 < last["metrics"]["test/f1_score"] <= 1
    assert last["samples_per_s"] > 0
    assert Path(folder, last["run_dir"]).is_dir()
    assert json.loads(Path(folder, last["run_dir"], "summary.json").read_text()) == last


def test_quiet_shows_one_line(folder):
    done = command("train", "my_task.py:made", "--epochs", "1", "--quiet", cwd=folder)
    assert done.code == 0, done.err
    assert len(done.out.splitlines()) == 1
    assert done.err == ""


def test_a_run_file_and_the_same_flags_give_the_same_run(tmp_path):
    (tmp_path / "run.toml").write_text(
        'model = "linear"\ndata = "digits"\nworkers = 2\nepochs = 2\nbatch = 100\nname = "file"\nseed = 3\n'
        '[optimizer]\nname = "adam"\nlr = 0.01\n'
    )
    assert command("train", "run.toml", cwd=tmp_path).code == 0
    flags = ["--data", "digits", "-w", "2", "-e", "2", "-b", "100", "--seed", "3", "--optimizer", "adam(lr=0.01)"]
    assert command("train", "linear", *flags, "--name", "flags", cwd=tmp_path).code == 0
    assert same_bits(*(final_state(tmp_path / "runs" / n)["model"] for n in ("file", "flags")))
    # A flag wins over the file.
    done = command("train", "run.toml", "--epochs", "1", "--name", "one", "--json", cwd=tmp_path)
    assert done.events[-1]["epochs"] == 1


def test_explain_prints_the_plan_and_starts_nothing(tmp_path):
    done = command("explain", "lenet", "--data", "digits", "--workers", "3", "--batch", "64", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "3 workers" in done.out
    assert "22 or 21 samples" in done.out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["train", "lenett", "--data", "digits"], ["'lenett'", "'lenet'"]),
        (["train", "lenet", "--data", "digit"], ["'digit'", "'digits'"]),
        (["train", "lenet"], ["--data", "cifar10, digits,"]),
        (["train", "lenet", "--data", "digits", "--strategy", "alreduce"], ["'alreduce'", "'allreduce'"]),
        (["train", "mlp(hiden=(3,))", "--data", "digits"], ["hiden"]),
        (["train", "nowhere.py:task"], ["nowhere.py"]),
        (["train", "my_task.py:tusk"], ["'tusk'", "'task'"]),
        (["train", "my_task.py:number"], ["int", "syncline.Task"]),
        (["train", "my_task.py"], ["2 tasks", "task, other"]),
        (["train", "none.toml"], ["none.toml"]),
        (["train", "mlp", "--data", "digits", "--workers", "0"], ["workers", "0", "1 or more"]),
        (["train", "mlp", "--data", "digits", "--device", "cuda"], ["--device cuda"]),
        (["train", "mlp", "--data", "digits", "--lr", "-1"], ["lr", "-1", "more than 0"]),
        (["resume", "nowhere"], ["nowhere", "run directory"]),
        (["run", "nowhere.py"], ["nowhere.py"]),
    ],
)
def test_a_mistake_is_one_message_without_a_traceback(folder, arguments, facts):
    done = command(*arguments, cwd=folder)
    assert done.code == 1
    assert not [fact for fact in facts if fact not in done.err], done.err
    assert "Traceback" not in done.err
    assert done.err.startswith("Error: ")


def test_a_wrong_value_in_a_run_file_names_file_and_line(folder):
    (folder / "bad.toml").write_text('model = "mlp"\ndata = "digits"\nworkers = 0\n')
    done = command("train", "bad.toml", cwd=folder)
    assert done.code == 1
    assert "bad.toml:3: workers" in done.err


def test_a_data_file_that_is_cut_off_is_named(tmp_path):
    data = tmp_path / "mnist"
    data.mkdir()
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (data / f"{name}-ubyte.gz").write_bytes(b"\x1f\x8b\x08\x00 cut off")
    done = command("train", "lenet", "--data", "mnist", "--data-dir", str(data), cwd=tmp_path)
    assert done.code == 1
    assert "ubyte.gz" in done.err
    assert "Traceback" not in done.err


def test_help_shows_every_command_and_every_setting(tmp_path):
    overview = command("--help", cwd=tmp_path)
    for name in ("train", "run", "resume", "explain", "bench"):
        assert name in overview.out
    details = command("train", "--help", cwd=tmp_path)
    for flag in ("--workers", "--strategy", "--checkpoint-every-s", "--on-nan", "--batch-norm"):
        assert flag in details.out
    assert command("--version", cwd=tmp_path).out.startswith("syncline ")
