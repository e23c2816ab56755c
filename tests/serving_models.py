"""Small ONNX files for tests of the server, made without torch."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def save_model(path: Path, nodes: list, inputs: dict, outputs: dict, constants: dict | None = None) -> Path:
    """A graph; inputs and outputs are name: (type, shape)."""

    def made(tensors):
        return [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in tensors.items()]

    weights = [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()]
    graph = helper.make_graph(nodes, "g", made(inputs), made(outputs), weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return path


def adds(path: Path, number: float, size: int = 4) -> Path:
    """`y = x + number`, rows of any count: an answer shows which version gave it."""
    return save_model(
        path,
        [helper.make_node("Add", ["x", "c"], ["y"])],
        {"x": (TensorProto.FLOAT, ["batch", size])},
        {"y": (TensorProto.FLOAT, ["batch", size])},
        {"c": np.float32(number)},
    )


def mixes_rows(path: Path) -> Path:
    """Subtracts the mean over the batch: rows influence one another."""
    return save_model(
        path,
        [
            helper.make_node("ReduceMean", ["x"], ["m"], axes=[0], keepdims=1),
            helper.make_node("Sub", ["x", "m"], ["y"]),
        ],
        {"x": (TensorProto.FLOAT, ["batch", 4])},
        {"y": (TensorProto.FLOAT, ["batch", 4])},
    )


def two_outputs(path: Path) -> Path:
    """Two inputs of different types, two outputs."""
    return save_model(
        path,
        [
            helper.make_node("Cast", ["n"], ["f"], to=TensorProto.FLOAT),
            helper.make_node("Add", ["x", "f"], ["sum"]),
            helper.make_node("Mul", ["x", "f"], ["product"]),
        ],
        {"x": (TensorProto.FLOAT, ["batch", 3]), "n": (TensorProto.INT64, ["batch", 3])},
        {"sum": (TensorProto.FLOAT, ["batch", 3]), "product": (TensorProto.FLOAT, ["batch", 3])},
    )


def slow(path: Path, size: int = 2048, rounds: int = 1) -> Path:
    """Matrix products that take milliseconds."""
    names = ["x", *[f"h{k}" for k in range(rounds - 1)], "y"]
    nodes = [helper.make_node("MatMul", [a, "w"], [b]) for a, b in pairwise(names)]
    return save_model(
        path,
        nodes,
        {"x": (TensorProto.FLOAT, ["batch", size])},
        {"y": (TensorProto.FLOAT, ["batch", size])},
        {"w": np.eye(size, dtype=np.float32)},
    )


def repeats_text(path: Path) -> Path:
    """Strings in, the same strings out."""
    return save_model(
        path,
        [helper.make_node("Identity", ["words"], ["same"])],
        {"words": (TensorProto.STRING, ["batch", 1])},
        {"same": (TensorProto.STRING, ["batch", 1])},
    )


def scorable(folder: Path, *, files: int = 2, rows: int = 600, group_rows: int = 100) -> tuple[Path, Path]:
    """An exported model that adds 1 to the columns a and b, and a folder with rows to score."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from syncline.serving.metadata import KEY, ModelMetadata, TensorFacts

    path = adds(folder / "adds.onnx", 1, size=2)
    model = onnx.load(path)
    facts = ModelMetadata(
        name="adds", version="1", sha256="0", kind="table", answers="numbers", columns=("a", "b"),
        inputs=(TensorFacts(name="x", dtype="float32", shape=(2,)),),
        outputs=(TensorFacts(name="y", dtype="float32", shape=(2,)),),
    )  # fmt: skip
    model.metadata_props.add(key=KEY, value=facts.to_json())
    onnx.save(model, path)
    (folder / "rows").mkdir()
    for k in range(files):
        ids = np.arange(k * rows, (k + 1) * rows)
        table = pa.table({"id": ids, "a": ids.astype(np.float32), "b": -ids.astype(np.float32)})
        pq.write_table(table, folder / "rows" / f"{k}.parquet", row_group_size=group_rows)
    return path, folder / "rows"


def assert_scored(table, rows: int) -> None:
    """Every row of `scorable` is there once, with its own prediction."""
    ids = table["id"].to_numpy()
    assert np.array_equal(np.sort(ids), np.arange(rows))
    found = np.array(table["prediction"].to_pylist())
    assert np.array_equal(found, np.stack([ids + 1, 1 - ids], 1).astype(np.float32))
