"""`syncline list` and `syncline show`, as typed."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from syncline.cli.main import app

RUN_FILE = """
data = "digits"
[model]
name = "tiny"
layers = ["flatten", { layer = "linear(64)", name = "a" }, { layer = "add", from = ["a", "previous"] }, "linear(10)"]
"""


def typed(*words: str) -> str:
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_list_ends_with_how_many_there_are():
    lines = typed("list", "optimizers").splitlines()
    assert lines[-1].split() == [str(sum(line[0] != " " for line in lines[:-1])), "optimizers"]
    assert any(line.startswith("Lion ") for line in lines)


def test_a_list_can_be_narrowed_down_and_says_so():
    text = typed("list", "layers", "pool")
    assert "MaxPool2d" in text
    assert "Linear " not in text
    assert "layers" in text.splitlines()[-1]
    assert "'pool'" in text.splitlines()[-1]


def test_what_is_nowhere_in_a_list_gets_the_nearest_name():
    text = typed("list", "activations", "relux")
    assert text.startswith("0 of 28 activations")
    assert "Did you mean 'ReLU'" in text


def test_a_list_as_json_has_names_and_sentences():
    entries = [json.loads(line) for line in typed("list", "strategies", "--json").splitlines()]
    assert {"name", "summary"} == set(entries[0])
    assert "allreduce" in [entry["name"] for entry in entries]


def test_models_and_data_are_listed_with_a_sentence_each():
    for kind, name in (("models", "lenet"), ("data", "digits")):
        entries = {e["name"]: e["summary"] for e in map(json.loads, typed("list", kind, "--json").splitlines())}
        assert entries[name].endswith(".")


def test_a_run_file_is_shown_and_drawn(tmp_path: Path):
    file, picture = tmp_path / "tiny.toml", tmp_path / "tiny.svg"
    file.write_text(RUN_FILE)
    text = typed("show", str(file), "--svg", str(picture))
    assert text.startswith("tiny on digits\n")
    assert "4,160" in text
    assert "4 layers, 4,810 parameters" in text
    assert picture.read_text().startswith("<svg ")


def test_a_model_of_the_zoo_is_shown_for_its_data():
    assert "131,080 parameters" in typed("show", "lenet", "--data", "digits")
