"""From a run to files that other programs load: each is compared with the run's own model, and loaded as its users do.

An export takes seconds, so the tests share a few. All models of the zoo: SYNCLINE_TEST_EXPORTS=all, as `make nightly`.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import syncline
from syncline.cli.main import app
from syncline.data.named import named
from syncline.errors import CheckpointError, ConfigError, ExportError, UnknownName
from syncline.models.zoo import registry
from syncline.serving.exporting.onnx_file import ExportedModel, export_onnx
from syncline.serving.metadata import open_session, read_metadata
from syncline.serving.trained import of_run, of_task
from syncline.workers.build import build_model, build_sources

pytestmark = pytest.mark.xdist_group("export")  # one process, so that the tests share their exports

EVERY = registry.names() if os.environ.get("SYNCLINE_TEST_EXPORTS") == "all" else ["mlp"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> syncline.Result:
    out = tmp_path_factory.mktemp("runs")
    return syncline.train(
        model="lenet",
        data="digits",
        optimizer=syncline.adam(lr=0.003),
        workers=1,
        epochs=3,
        out=str(out),
        name="digits",
        quiet=True,
    )


@pytest.fixture(scope="module")
def exported(run: syncline.Result, tmp_path_factory: pytest.TempPathFactory) -> ExportedModel:
    path = tmp_path_factory.mktemp("exported") / "digits.zip"
    return syncline.export(run.run_dir, path, outputs="probabilities,logits,0", license="MIT")


@pytest.fixture(scope="module")
def bundle(exported: ExportedModel) -> Path:
    folder = exported.path.parent / "bundle"
    with zipfile.ZipFile(exported.path) as archive:
        archive.extractall(folder)
    return folder


def digits_test_samples() -> tuple[np.ndarray, np.ndarray]:
    data = named("digits")
    return data.load(data.locate(None, None), "test")


def test_the_file_gives_the_models_answers_for_any_number_of_samples(run: syncline.Result, bundle: Path) -> None:
    inputs, _ = digits_test_samples()
    session = open_session(bundle / "model.onnx")
    for count in (1, 2, 7, 100):
        probabilities, logits, layer = session.run(None, {"input": inputs[:count]})
        with torch.inference_mode():
            expected = run.model(torch.from_numpy(inputs[:count]))
            first = run.model.get_submodule("0")(torch.from_numpy(inputs[:count]))
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        np.testing.assert_allclose(probabilities, expected.softmax(1), atol=1e-5)
        np.testing.assert_allclose(layer, first, atol=1e-4)


def test_the_proof_and_the_card_say_what_was_compared(run: syncline.Result, exported: ExportedModel, bundle: Path):
    proof, card = exported.proof, json.loads((bundle / "model.onnx.card.json").read_text())
    assert (proof.data, proof.samples, proof.measure) == ("test", 360, "accuracy")
    assert proof.torch_score == proof.exported_score == pytest.approx(run.metrics["test/accuracy"], abs=1e-6)
    assert all(difference <= proof.tolerance for difference in proof.differences.values())
    assert card["file_sha256"] == hashlib.sha256((bundle / "model.onnx").read_bytes()).hexdigest()
    assert card["metrics"]["test/accuracy"] == pytest.approx(run.metrics["test/accuracy"])
    assert (card["license"], card["data"]["name"], card["training"]["strategy"]) == ("MIT", "digits", "allreduce")
    assert card["weights_sha256"] == of_run(run.run_dir).sha256 == read_metadata(bundle / "model.onnx").sha256
    assert "MIT" in (bundle / "model.onnx.card.md").read_text()


def test_the_file_says_what_a_server_needs(bundle: Path) -> None:
    facts = read_metadata(bundle / "model.onnx")
    assert (facts.name, facts.kind, facts.answers, facts.data) == ("lenet", "image", "classes", "digits")
    assert [(one.name, one.dtype, one.shape) for one in facts.inputs] == [("input", "float32", (1, 8, 8))]
    assert facts.output_names == ["probabilities", "logits", "0"]
    assert facts.class_names == tuple("0123456789")


def test_a_bundle_scores_with_numpy_and_onnxruntime_alone(run: syncline.Result, bundle: Path, tmp_path: Path) -> None:
    python = environment_with(tmp_path / "env", "numpy", "onnxruntime")
    for absent in ("torch", "syncline", "onnx"):
        imported = subprocess.run([python, "-c", f"import {absent}"], cwd=tmp_path, capture_output=True, timeout=60)
        assert b"ModuleNotFoundError" in imported.stderr
    inputs, _ = digits_test_samples()
    np.save(tmp_path / "images.npy", inputs)
    done = subprocess.run(
        [python, bundle / "scorer.py", tmp_path / "images.npy"], capture_output=True, text=True, timeout=60, check=True
    )
    header, *rows = csv.reader(done.stdout.splitlines())
    with torch.inference_mode():
        expected = run.model(torch.from_numpy(inputs)).softmax(1)
    assert header == ["class", "probability"]
    assert [int(label) for label, _ in rows] == expected.argmax(1).tolist()
    np.testing.assert_allclose([float(p) for _, p in rows], expected.max(1).values, atol=1e-5)
    assert len((bundle / "scorer.py").read_text().splitlines()) <= 100


def environment_with(folder: Path, *packages: str) -> Path:
    """A Python environment with nothing but these packages, linked from this one."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for package in packages:
        found = Path(importlib.util.find_spec(package).origin).parent
        for part in (found, found.with_name(f"{package}.libs")):
            if part.exists():
                (site / part.name).symlink_to(part)
    return folder / "bin" / "python"


def test_int8_is_smaller_and_as_good(run: syncline.Result, tmp_path: Path) -> None:
    done = syncline.export(run.run_dir, tmp_path / "small.onnx", int8=True, max_drop=3)
    assert done.proof.drop_points <= 3
    assert done.int8["float32_bytes"] > 2.5 * done.int8["int8_bytes"] == 2.5 * done.size_bytes
    assert read_metadata(done.path).precision == "int8"
    operators = {node.op_type for node in load(done.path).graph.node}
    assert {"QuantizeLinear", "DequantizeLinear"} <= operators
    images = digit_images(tmp_path)
    exact, small = (syncline.predict(what, images) for what in (run.run_dir, done.path))
    assert sum(a.label == b.label for a, b in zip(exact, small, strict=True)) >= 9
    assert len({one.label for one in small}) >= 4


def digit_images(folder: Path) -> Path:
    from PIL import Image

    inputs, targets = digits_test_samples()
    (folder / "images").mkdir()
    for k in range(10):
        Image.fromarray((255 * inputs[k, 0]).astype(np.uint8)).save(folder / "images" / f"{targets[k]}-{k}.png")
    return folder / "images"


def load(path: Path):
    import onnx

    return onnx.load(path)


def test_int8_that_is_worse_than_allowed_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    """The class depends on a feature that is small beside another one, so that 8 bits for both lose it."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 2, generator=generator) * torch.tensor([1e-3, 1e3])
    model = nn.Linear(2, 2)
    model.load_state_dict({"weight": torch.tensor([[-1.0, 0.0], [1.0, 0.0]]), "bias": torch.zeros(2)})
    data = (inputs, (inputs[:, 0] > 0).long())
    result = syncline.train(
        model=model, data=data, test=data, optimizer=syncline.sgd(lr=1e-12), workers=1, epochs=1, out=str(tmp_path),
        name="r", quiet=True,
    )  # fmt: skip
    assert result.metrics["test/accuracy"] > 0.99
    with pytest.raises(ExportError) as refused:
        syncline.export(result.run_dir, tmp_path / "exported" / "m.onnx", int8=True)
    assert refused.value.code == "int8-worse"
    assert refused.value.facts["drop"] > refused.value.facts["max_drop"] == 0.5
    assert list((tmp_path / "exported").iterdir()) == []


def test_torch_loads_a_program_and_others_the_weights(run: syncline.Result, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    inputs = torch.from_numpy(digits_test_samples()[0][:5])
    program = syncline.export(run.run_dir, tmp_path / "m.pt2", outputs=["logits"])
    with torch.inference_mode():
        (logits,) = torch.export.load(program.path).module()(inputs)
        torch.testing.assert_close(logits, run.model(inputs))
    weights = load_file(syncline.export(run.run_dir, tmp_path / "m.safetensors").path)
    assert all(torch.equal(weights[name], tensor) for name, tensor in run.model.state_dict().items())


def test_the_command_says_what_was_proved(run: syncline.Result, tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["export", str(run.run_dir), "--out", str(tmp_path / "w.safetensors"), "--json"])
    assert told.exit_code == 0, told.output
    found = json.loads(told.output)
    assert found["proof"]["exported_score"] == found["proof"]["torch_score"]
    assert (tmp_path / "w.safetensors.card.md").exists()


def test_a_layer_that_does_not_exist_is_refused_before_anything_is_written(run: syncline.Result, tmp_path: Path):
    with pytest.raises(UnknownName):
        syncline.export(run.run_dir, tmp_path / "m.onnx", outputs="fc9")
    assert list(tmp_path.iterdir()) == []


def test_settings_that_make_no_sense_are_refused(run: syncline.Result, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("")
    cases = [
        ({"path": "m.xyz"}, "unknown-format"),
        ({"path": "m.pt2", "int8": True}, "int8-format"),
        ({"path": "m.onnx", "max_drop": -1}, "invalid-setting"),
        ({"path": tmp_path, "format": "bundle"}, "bundle-place"),
        ({"path": tmp_path / "m.safetensors", "checkpoint": 1}, "no-checkpoint"),
    ]
    for arguments, code in cases:
        with pytest.raises((ConfigError, CheckpointError)) as refused:
            syncline.export(run.run_dir, **arguments)
        assert refused.value.code == code, arguments


class Branching(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else -super().forward(x)


class Counting(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).view(len(x), 3)


class Bessel(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(super().forward(x))


@pytest.mark.parametrize(
    ("model", "code", "operator"),
    [
        (Branching, "export-data-dependent", None),
        (Counting, "export-batch", None),
        (Bessel, "export-operator", "prims.bessel_j0"),
    ],
)
def test_a_model_that_cannot_be_exported_is_refused_with_the_reason(
    model: type[nn.Linear], code: str, operator: str | None, tmp_path: Path
) -> None:
    data = (torch.ones(8, 4), torch.arange(8) % 3)
    made = model(4, 3)
    task = syncline.Task(model=made, data=data, test=data).with_defaults()
    with pytest.raises(ExportError) as refused:
        export_onnx(of_task(task, made.state_dict(), version="1", facts={}), tmp_path / "m.onnx")
    assert (refused.value.code, refused.value.facts["operator"]) == (code, operator)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", EVERY)
def test_models_of_the_zoo_are_proved_equal(name: str, tmp_path: Path) -> None:
    size = registry.card(name).reference
    assert size is not None
    generator = np.random.default_rng(0)
    if size.vocabulary is not None:
        inputs = targets = generator.integers(0, size.vocabulary, (20, *size.input_shape))
        inputs[0, 0] = size.vocabulary - 1
    else:
        inputs = generator.normal(size=(20, *size.input_shape)).astype(np.float32)
        targets = size.classes - 1 - np.arange(20) % size.classes
    task = syncline.Task(model=name, data=(inputs, targets), test=(inputs, targets)).with_defaults()
    weights = build_model(task, build_sources(task)[0], seed=0).state_dict()
    done = export_onnx(of_task(task, weights, version="1", facts={}), tmp_path / "m.onnx")
    assert done.proof.samples == 20
    assert max(done.proof.differences.values()) <= done.proof.tolerance


SCRIPT = """
import torch, syncline
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()), batch_size=16)
worker = syncline.worker()
model, optimizer, batches = worker.prepare(model, optimizer, loader)
for x, y in batches:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""


def test_the_model_of_a_script_is_exported_with_a_task_that_rebuilds_it(tmp_path: Path) -> None:
    from real_runs import final_state
    from script_runs import run as run_script

    run_script(tmp_path, SCRIPT, "mine", workers=1)
    folder = tmp_path / "runs" / "mine"
    with pytest.raises(ConfigError) as refused:
        syncline.export(folder, tmp_path / "m.safetensors")
    assert refused.value.code == "script-model"
    data = (torch.randn(20, 2), torch.arange(20) % 2)
    task = syncline.Task(model=nn.Linear(2, 2), data=data, test=data)
    syncline.export(folder, tmp_path / "m.safetensors", task=task)
    from safetensors.torch import load_file

    found = load_file(tmp_path / "m.safetensors")
    assert torch.equal(found["weight"], final_state(folder)["model"]["weight"])


def test_onnxruntime_reports_nothing_to_its_vendor(bundle: Path, tmp_path: Path) -> None:
    """It keeps the session of its reports in a file among the temporary ones."""
    code = f"from syncline.serving.metadata import open_session; open_session({str(bundle / 'model.onnx')!r})"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)}, check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []
