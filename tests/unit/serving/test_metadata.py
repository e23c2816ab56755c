"""What an exported model says about itself, and what is missing without the extra."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import msgspec
import onnx
import pytest
from onnx import TensorProto, helper

import syncline
from syncline.errors import ConfigError, ExportError
from syncline.serving import metadata
from syncline.serving.metadata import ModelMetadata, TensorFacts, read_metadata

FACTS = ModelMetadata(
    name="m", version="7", sha256="ab", kind="table", answers="classes", class_names=("a", "b"), columns=("x",),
    inputs=(TensorFacts(name="x", dtype="float32", shape=(2,)),),
    outputs=(TensorFacts(name="y", dtype="float32", shape=(2,)),),
)  # fmt: skip


def file_with(path: Path, **props: str) -> Path:
    """An ONNX file that returns its input."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 2]) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    for key, value in props.items():
        model.metadata_props.add(key=key, value=value)
    onnx.save(model, path)
    return path


def test_metadata_is_read_back_from_the_file(tmp_path: Path) -> None:
    assert read_metadata(file_with(tmp_path / "m.onnx", syncline=FACTS.to_json())) == FACTS


@pytest.mark.parametrize(
    ("props", "code"),
    [
        ({}, "no-metadata"),
        ({"syncline": "{"}, "bad-metadata"),
        ({"syncline": msgspec.structs.replace(FACTS, format=99).to_json()}, "bad-metadata"),
    ],
)
def test_a_file_from_elsewhere_is_refused(tmp_path: Path, props: dict[str, str], code: str) -> None:
    with pytest.raises(ExportError) as refused:
        read_metadata(file_with(tmp_path / "m.onnx", **props))
    assert refused.value.code == code


def test_what_is_no_onnx_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"nonsense")
    with pytest.raises(ExportError) as refused:
        read_metadata(tmp_path / "m.onnx")
    assert refused.value.code == "not-onnx"
    with pytest.raises(ConfigError) as missing:
        read_metadata(tmp_path / "none.onnx")
    assert missing.value.code == "no-model-file"


def test_without_the_extra_an_export_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        metadata.importlib.util, "find_spec", lambda name: None if name.startswith("onnx") else real(name)
    )
    with pytest.raises(ConfigError) as refused:
        syncline.export("lenet", tmp_path / "m.onnx")
    assert refused.value.code == "missing-package"
    assert "syncline[serve]" in str(refused.value)


def test_metadata_is_read_without_torch(tmp_path: Path) -> None:
    path = file_with(tmp_path / "m.onnx", syncline=FACTS.to_json())
    code = (
        "import sys; from syncline.serving.metadata import read_metadata; "
        "assert read_metadata(sys.argv[1]).name == 'm'; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, path], check=True, timeout=60)
