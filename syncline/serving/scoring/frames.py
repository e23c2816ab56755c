"""`syncline.score_frame`: a table in, the same table with predictions out.

Here: pandas and Arrow tables in this process, and DataFrames of Spark, which stay where they are and are scored when
they are used. Not here: files (`score.py`), and the columns (`tables.py`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from syncline import boundary
from syncline.data.files.columns import Where
from syncline.errors import ConfigError, ExportError
from syncline.serving.metadata import ModelMetadata
from syncline.serving.scoring.engine import Answer, Loaded, Runtime, answer_of, export_to, threads_kept
from syncline.serving.scoring.score import load, pick_runtime, refuse_taken
from syncline.serving.scoring.tables import columns_for, inputs_from, new_columns

__all__ = ["score_frame"]

Frame = TypeVar("Frame")


def score_frame(
    model: str | Path,
    frame: Frame,
    *,
    outputs: Sequence[str] = (),
    features: Sequence[str] | None = None,
    runtime: Runtime = "auto",
    checkpoint: int | None = None,
) -> Frame:
    """Add predictions to the rows of a table, and return a table of the same kind.

    Args:
        model: A run directory, an exported ONNX file or bundle, or a model whose weights ship with Syncline.
        frame: A pandas DataFrame, an Arrow Table, or a DataFrame of Spark, which is scored in the executors when the
            result is used.
        outputs: Outputs or layers to add as columns of lists, such as `probabilities` or `fc1`.
        features: The input columns. Default: those of the training data.
        runtime: `onnx`, `torch`, or `auto`: for Spark an exported file, which travels with the tasks, else the faster
            one.
        checkpoint: The step of the checkpoint. Default: the newest.
    """
    add = _ADDERS.get(_kind(frame))
    if add is None:
        raise ConfigError(
            f"score_frame was given a {type(frame).__module__}.{type(frame).__qualname__}, but takes a pandas "
            "DataFrame, a pyarrow Table or a Spark DataFrame. For files: syncline.score",
            code="not-a-frame", type=type(frame).__qualname__,
        )  # fmt: skip
    with boundary.guarding():
        source, loaded, metadata = load(model, outputs, checkpoint)
        facts = _FrameSetup(
            loaded=loaded, metadata=metadata, outputs=tuple(outputs), key=secrets.token_hex(8),
            features=tuple(features) if features else None,
        )  # fmt: skip
        result: Frame = add(frame, source, facts, runtime)
        return result


class _FrameSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a process needs to score rows."""

    loaded: Loaded
    metadata: ModelMetadata
    features: tuple[str, ...] | None
    outputs: tuple[str, ...]
    key: str
    """By which a process keeps the loaded model."""


_loaded: dict[str, Answer] = {}


def _answer(setup: _FrameSetup, threads: int) -> Answer:
    """The model of this process, loaded once for all batches."""
    if setup.key not in _loaded:
        _loaded.clear()
        _loaded[setup.key] = answer_of(setup.loaded, threads)
    return _loaded[setup.key]


def _new(table: pa.Table, setup: _FrameSetup, answer: Answer) -> dict[str, pa.Array]:
    """The new columns of these rows."""
    columns = columns_for(table.schema, setup.metadata, setup.features, "the table")
    inputs = inputs_from(table, columns, setup.metadata, Where("the table", "row", 0))
    found = answer(inputs) if len(inputs) else {name: value[:0] for name, value in answer(_one(setup)).items()}
    return new_columns(found, setup.metadata, setup.outputs)


def _one(setup: _FrameSetup) -> np.ndarray:
    facts = setup.metadata.inputs[0]
    return np.zeros((1, *facts.shape), facts.dtype)


# Tables of this process


def _arrow(table: pa.Table, source: Path, setup: _FrameSetup, runtime: Runtime) -> pa.Table:
    for name, values in _here(table, source, setup, runtime).items():
        table = table.append_column(name, values)
    return table


def _pandas(frame: Any, source: Path, setup: _FrameSetup, runtime: Runtime) -> Any:
    new = _here(pa.Table.from_pandas(frame, preserve_index=False), source, setup, runtime)
    return frame.assign(**{name: values.to_pandas().to_numpy() for name, values in new.items()})


def _here(table: pa.Table, source: Path, setup: _FrameSetup, runtime: Runtime) -> dict[str, pa.Array]:
    refuse_taken(table.schema.names, setup.outputs, "the table")
    with tempfile.TemporaryDirectory(prefix="syncline-scoring-") as scratch:
        exported = Path(scratch, "_model.onnx")
        loaded, _ = pick_runtime(runtime, source, setup.loaded, setup.metadata, len(table), 1, exported)
        with threads_kept() if loaded.runtime == "torch" else contextlib.nullcontext():
            return _new(table, setup, answer_of(loaded, len(os.sched_getaffinity(0))))


# DataFrames of Spark


def _spark(frame: Any, source: Path, setup: _FrameSetup, runtime: Runtime) -> Any:
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.types import StructField, StructType

    refuse_taken(frame.columns, setup.outputs, "the DataFrame")
    setup = _travelling(source, setup, runtime)
    columns_for(_spark_schema(frame), setup.metadata, setup.features, "the DataFrame")  # refused now, not in a task
    with threads_kept() if setup.loaded.runtime == "torch" else contextlib.nullcontext():
        new = new_columns(answer_of(setup.loaded, 1)(_one(setup)), setup.metadata, setup.outputs)
    added = [StructField(name, from_arrow_type(values.type)) for name, values in new.items()]
    broadcast = frame.sparkSession.sparkContext.broadcast(setup)  # once per executor, not once per partition

    def add(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from _with_new(pa.Table.from_batches([batch]), broadcast.value).combine_chunks().to_batches()

    return frame.mapInArrow(add, StructType([*frame.schema.fields, *added]))


def _spark_schema(frame: Any) -> pa.Schema:
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(frame.schema)


def _with_new(table: pa.Table, setup: _FrameSetup) -> pa.Table:
    for name, values in _new(table, setup, _answer(setup, threads=1)).items():
        table = table.append_column(name, values)
    return table


def _travelling(source: Path, setup: _FrameSetup, runtime: Runtime) -> _FrameSetup:
    """With the exported model inside; with torch, each machine reads the run."""
    loaded = setup.loaded
    if loaded.runtime == "torch" and runtime != "torch":
        with tempfile.TemporaryDirectory(prefix="syncline-scoring-") as scratch:
            try:
                loaded = export_to(source, Path(scratch, "_model.onnx"), loaded).with_content()
            except ExportError:
                if runtime == "onnx":
                    raise
    elif loaded.runtime == "onnx":
        loaded = pick_runtime(runtime, source, loaded, setup.metadata, 0, 1, source)[0].with_content()
    return msgspec.structs.replace(setup, loaded=loaded)


def _kind(frame: object) -> str:
    """Which kind of table this is, without importing packages for those that it is not."""
    for one in type(frame).__mro__:
        package = one.__module__.partition(".")[0]
        if (package, one.__name__) in _TYPES:
            return package
    return ""


_TYPES = {("pandas", "DataFrame"), ("pyarrow", "Table"), ("pyspark", "DataFrame")}
_ADDERS: dict[str, Callable[[Any, Path, _FrameSetup, Runtime], Any]] = {
    "pandas": _pandas,
    "pyarrow": _arrow,
    "pyspark": _spark,
}
