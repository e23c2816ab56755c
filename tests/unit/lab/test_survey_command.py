"""`syncline survey` and its commands as a whole, with frameworks that take no time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from survey_files import a_survey, machine
from typer.testing import CliRunner

from syncline.cli.main import app
from syncline.errors import ConfigError, Interrupted, SynclineError, UnknownName
from syncline.lab.survey import adding, command, survey_file
from syncline.lab.survey.adding import check_event
from syncline.lab.survey.probes import PROBES
from syncline.lab.survey.probes.probe import Bench, Round, Work
from syncline.lab.survey.values import Absent, Figure

ROOT = Path(__file__).parents[3]
TRAINS = """
from peer_protocol import arguments, print_event
asked = arguments()
images = asked.batch * asked.workers * asked.steps
print_event(event="measured", images_per_s=images / 2.0, steps=asked.steps, seconds=2.0, version="1", parameters=61706)
"""
START = """start = ["{python}", "{adapter}", "--workers", "{workers}", "--batch", "{batch}", "--warm-up", "{warm_up}",
    "--steps", "{steps}"]\n"""
EVENT = {"steps": 20, "seconds": 2.0, "images_per_s": 160.0, "version": "1", "parameters": 61706}
WORK = Work(workers=2, batch=8, warm_up=2, steps=20)


@pytest.fixture
def peers(tmp_path: Path) -> Path:
    """A folder of environments with two added frameworks: `tiny`, and `absent`, which is not installed."""
    folder = tmp_path / "peers"
    for key, install in (("tiny", ""), ("absent", '[install]\npython = "3.11"\npackages = ["a_package"]\n')):
        place = folder / "adapters" / key
        place.mkdir(parents=True)
        (place / "peer.toml").write_text(f'name = "The {key}"\nwhat = "What {key} is."\n{START}{install}')
        (place / "adapter.py").write_text(TRAINS)
    return folder


def measured(peers: Path, out: Path, **options):
    return command.survey(only=["figure-4"], names=["tiny", "absent"], quick=True, out=out, peers_dir=peers, **options)


def figures(survey) -> dict[tuple[str, str], object]:
    return {(cell.framework, cell.column): cell.value for cell in survey.cells}


def test_a_survey_is_measured_by_running_adapters_and_written_in_three_forms(peers, tmp_path):
    found = figures(measured(peers, tmp_path / "out"))
    assert found["tiny", "batch-64"] == Figure.of([64 * 2 * 150 / 2.0] * 2)
    absent = found["absent", "batch-64"]
    assert isinstance(absent, Absent)
    assert "--install absent" in absent.why
    for name in ("survey.html", "survey.md"):
        assert "The tiny" in (tmp_path / "out" / name).read_text()
    command.verify(tmp_path / "out" / "survey.json", peers_dir=peers)


class Counting:
    """A probe that counts its calls and may be interrupted."""

    def __init__(self, interrupted_at: int = -1) -> None:
        self.calls = 0
        self._interrupted_at = interrupted_at

    def __call__(self, bench: Bench) -> Round:
        if self.calls == self._interrupted_at:
            raise KeyboardInterrupt
        self.calls += 1
        return Round(values={column.key: 5.0 for column in bench.columns}, version="1")


def test_ctrl_c_keeps_what_is_measured_and_the_same_command_continues(peers, tmp_path):
    first, second = Counting(interrupted_at=1), Counting()
    with pytest.raises(Interrupted):
        measured(peers, tmp_path, probes={**PROBES, "speed": first})
    kept = survey_file.read(tmp_path / "survey.json")
    assert figures(kept)["tiny", "batch-16"] == Figure.of([5.0])
    assert (tmp_path / "survey.html").exists()
    found = measured(peers, tmp_path, probes={**PROBES, "speed": second})
    assert figures(found)["tiny", "batch-16"] == Figure.of([5.0, 5.0])
    assert (first.calls, second.calls) == (1, 1)


def test_a_changed_adapter_is_measured_again_and_verify_notices_it(peers, tmp_path):
    measured(peers, tmp_path, probes={**PROBES, "speed": Counting()})
    with (peers / "adapters" / "tiny" / "adapter.py").open("a") as file:
        file.write("# another one\n")
    with pytest.raises(SynclineError) as error:
        command.verify(tmp_path / "survey.json", peers_dir=peers)
    assert {p["code"] for p in error.value.facts["problems"]} == {"adapter"}
    again = Counting()
    measured(peers, tmp_path, probes={**PROBES, "speed": again})
    assert again.calls == 2
    command.verify(tmp_path / "survey.json", peers_dir=peers)


def test_a_framework_that_fails_says_why_and_is_not_tried_again_in_this_run(peers, tmp_path):
    (peers / "adapters" / "tiny" / "adapter.py").write_text("raise SystemExit('alas')")
    found = figures(measured(peers, tmp_path))["tiny", "batch-16"]
    assert isinstance(found, Absent)
    assert "alas" in found.why


def test_a_quick_survey_does_not_continue_a_full_one_nor_that_of_another_machine(peers, tmp_path):
    (tmp_path / "survey.json").write_bytes(survey_file.as_json(a_survey()))
    with pytest.raises(ConfigError) as error:
        measured(peers, tmp_path)
    assert error.value.code == "another-machine"
    out = tmp_path / "full"
    options = {"only": ["figure-4"], "names": ["tiny"], "out": out, "peers_dir": peers}
    command.survey(**options, probes={**PROBES, "speed": Counting()})
    with pytest.raises(ConfigError) as error:
        command.survey(**options, quick=True)
    assert error.value.code == "another-survey"


@pytest.mark.parametrize(("option", "value"), [("only", ["figure-99"]), ("names", ["tensorflaw"])])
def test_unknown_names_are_refused(peers, tmp_path, option, value):
    with pytest.raises(UnknownName) as error:
        command.survey(**{option: value}, out=tmp_path, peers_dir=peers)
    assert error.value.facts["name"] == value[0]


def test_surveys_of_several_machines_are_merged_and_changed_ones_are_refused(tmp_path):
    for name, cores in (("a", 2), ("b", 64)):
        (tmp_path / f"{name}.json").write_bytes(survey_file.as_json(a_survey(on=machine(cores))))
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    done = CliRunner().invoke(app, ["survey", "merge", *files, "--out", str(tmp_path / "both")])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "both" / "survey.html").read_text()
    assert page.count("The syncline-train on ") >= 2
    text = Path(files[1]).read_text()
    Path(files[1]).write_text(text.replace("105.0", "905.0"))
    with pytest.raises(ConfigError) as error:
        command.merge_files([Path(file) for file in files], tmp_path / "both")
    assert error.value.code == "survey-problems"


def test_what_is_no_survey_is_refused(tmp_path):
    (tmp_path / "survey.json").write_text('{"cells": 3}')
    with pytest.raises(ConfigError) as error:
        command.verify(tmp_path / "survey.json")
    assert error.value.code == "not-a-survey"


def test_entries_are_listed():
    done = CliRunner().invoke(app, ["survey", "list"])
    assert done.exit_code == 0
    assert "figure-4" in done.output


def test_the_numpy_example_is_added_in_80_lines_and_measured(tmp_path):
    example = ROOT / "examples" / "numpy_framework"
    files = [path for path in example.iterdir() if path.is_file()]
    assert sum(len(path.read_text().splitlines()) for path in files) <= 80
    place = adding.add(example, tmp_path, say=lambda _: None)
    assert place == tmp_path / "adapters" / "numpy_framework"
    assert sorted(path.name for path in place.iterdir()) == ["adapter.py", "peer.toml"]


def test_the_numpy_example_has_the_gradients_of_torch(monkeypatch):
    import importlib.util

    import numpy as np
    import torch

    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "peers" / "protocol"))
    spec = importlib.util.spec_from_file_location("numpy_adapter", ROOT / "examples" / "numpy_framework" / "adapter.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    from torch_lenet import lenet

    model, random = lenet(), np.random.default_rng(0)
    images, labels = random.standard_normal((8, 1, 28, 28), dtype=np.float32), random.integers(0, 10, 8)
    values = [p.detach().numpy() for p in model.parameters()]
    found = example.gradients([v.T if v.ndim == 2 else v for v in values], images, labels)
    torch.nn.functional.cross_entropy(model(torch.from_numpy(images)), torch.from_numpy(labels)).backward()
    for mine, parameter in zip(found, model.parameters(), strict=True):
        assert parameter.grad is not None
        np.testing.assert_allclose(mine.T if mine.ndim == 2 else mine, parameter.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_an_event_that_follows_the_protocol_is_accepted():
    check_event(EVENT, WORK)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 19),
        ("seconds", 0.0),
        ("seconds", float("nan")),
        ("images_per_s", 80.0),  # of one worker's batch
        ("images_per_s", "fast"),
        ("version", 1),
        ("version", ""),
        ("parameters", 44426),
        ("parameters", None),
    ],
)
def test_an_event_that_does_not_is_refused(field, value):
    with pytest.raises(ConfigError) as error:
        check_event({**EVENT, field: value}, WORK)
    assert error.value.code == "adapter"


def test_an_adapter_is_refused_if_its_name_is_taken_or_it_is_not_installed(peers, tmp_path):
    shutil.copytree(peers / "adapters" / "tiny", tmp_path / "ddp")
    with pytest.raises(ConfigError) as error:
        adding.add(tmp_path / "ddp", peers, say=lambda _: None)
    assert error.value.code == "name-taken"
    shutil.copytree(peers / "adapters" / "absent", tmp_path / "absent")
    with pytest.raises(ConfigError) as error:
        adding.add(tmp_path / "absent", peers, say=lambda _: None)
    assert error.value.code == "not-installed"


def test_json_progress_has_every_round(peers, tmp_path, capsys):
    measured(peers, tmp_path, as_json=True)
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    rounds = [e["values"]["batch-16"] for e in events if e["event"] == "measured" and e["framework"] == "tiny"]
    assert rounds == [16 * 2 * 300 / 2.0] * 2
    assert events[-1]["event"] == "written"
