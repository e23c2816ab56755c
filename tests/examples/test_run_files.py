"""The run files in examples/runs: one for each model, each with its expected result."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from syncline.cli.tasks import find_task
from syncline.config.spec import Spec
from syncline.models import zoo

RUNS = Path(__file__).parents[2] / "examples" / "runs"


def test_every_model_has_a_run_file_and_every_run_file_a_model():
    assert sorted(path.stem for path in RUNS.glob("*.toml")) == zoo.names()


@pytest.mark.parametrize("name", zoo.names())
def test_a_run_file_trains_its_model_with_two_workers(name):
    found = find_task(str(RUNS / f"{name}.toml"), {}, {})
    assert isinstance(found.task.model, Spec)
    assert found.task.model.name == name
    assert found.config.workers == 2
    assert found.task.with_defaults().optimizer is not None


@pytest.mark.parametrize("name", zoo.names())
def test_a_run_file_says_how_to_start_it_and_what_result_to_expect(name):
    comment = "".join(line for line in (RUNS / f"{name}.toml").read_text().splitlines(True) if line.startswith("#"))
    assert f"syncline train examples/runs/{name}.toml" in comment
    assert re.search(r"Expect .*\d", comment)
    assert re.search(r"\d+ (s|min)\b", comment), "it says how long that takes"


def test_the_run_file_of_mlp_keeps_its_promise_on_iris(tmp_path):
    command = [sys.executable, "-m", "syncline.cli.main", "train", str(RUNS / "mlp.toml"), "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["metrics"]["test/accuracy"] >= 0.95


def test_the_page_about_models_has_all_of_them_with_their_sizes():
    page = (RUNS.parents[1] / "docs" / "models.md").read_text()
    for card in map(zoo.card, zoo.names()):
        assert card.reference is not None
        options = ", ".join(f"`{option}`" for option in card.options)
        row = f"| `{card.name}` | {card.reference.parameters:,} | {card.reference.data} | {options} |"
        assert row.replace("|  |", "| |") in page
