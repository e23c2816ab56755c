"""From rows of a table to a model's input, and from its outputs to columns.

Here: which columns are the input, the conversion of a piece, and the new columns. Not here: reading files
(`data/files/`), and running the model (`engine.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from syncline.data.files.columns import TableColumns, Where, choose, read_inputs
from syncline.data.files.options import FileOptions
from syncline.errors import ConfigError, DataError
from syncline.models.answers import PROBABILITIES
from syncline.serving.metadata import ModelMetadata

PREDICTION, PROBABILITY = "prediction", "probability"


def columns_for(schema: pa.Schema, metadata: ModelMetadata, features: Sequence[str] | None, shown: str) -> TableColumns:
    """The input columns of a table; `DataError` if they are not clear."""
    if len(metadata.inputs) != 1:
        raise ConfigError(
            f"{metadata.name} takes {len(metadata.inputs)} inputs, but a table can be scored only with models of one.",
            code="several-inputs", inputs=[one.name for one in metadata.inputs],
        )  # fmt: skip
    wanted = tuple(features) if features else metadata.columns or _guessed(schema, metadata)
    columns = choose(schema, FileOptions(features=wanted, label="none"), shown)
    if columns.kind == "numbers" and len(wanted) != math.prod(metadata.inputs[0].shape):
        raise DataError(
            f"The model takes {math.prod(metadata.inputs[0].shape)} numbers, but {shown} has {len(wanted)} input "
            f"columns: {', '.join(wanted[:5])}. Choose them with --features.",
            code="feature-count", expected=math.prod(metadata.inputs[0].shape), found=len(wanted),
        )  # fmt: skip
    return columns


def _guessed(schema: pa.Schema, metadata: ModelMetadata) -> tuple[str, ...]:
    """The only column of lists, bytes or images; else all numeric columns, if they are as many as the model takes."""
    is_nested = {field.name: pa.types.is_nested(field.type) or pa.types.is_binary(field.type) for field in schema}
    nested = [name for name, nested in is_nested.items() if nested]
    if len(nested) == 1:
        return (nested[0],)
    numeric = [field.name for field in schema if pa.types.is_integer(field.type) or pa.types.is_floating(field.type)]
    if not nested and len(numeric) == math.prod(metadata.inputs[0].shape):
        return tuple(numeric)
    raise DataError(
        f"The model was not trained on a table with named columns, so its input is not clear. Choose the column of "
        f"lists or images, or {math.prod(metadata.inputs[0].shape)} columns of numbers, with --features. The columns "
        f"are: {', '.join(schema.names)}.",
        code="unclear-features", columns=list(schema.names),
    )  # fmt: skip


def inputs_from(table: pa.Table, columns: TableColumns, metadata: ModelMetadata, where: Where) -> np.ndarray:
    """The model's input for these rows, in its type; `DataError` for a value that the type cannot hold."""
    facts = metadata.inputs[0]
    values = read_inputs(table, columns, facts.shape, where, resize=True).reshape(-1, *facts.shape)
    wanted = np.dtype(facts.dtype)
    if wanted.kind in "iu" and values.dtype != wanted:
        limits = np.iinfo(wanted)
        wrong = (values != np.trunc(values)) | (values < limits.min) | (values > limits.max)
        if wrong.any():
            row = int(np.flatnonzero(wrong.reshape(len(values), -1).any(1))[0])
            raise DataError(
                f"{where.at(row)}: the model takes {facts.dtype}, such as pixels from 0 to 255, but this row has "
                f"{values[wrong].flat[0]:g}.",
                code="value-range", row=row, value=float(values[wrong].flat[0]), dtype=facts.dtype,
            )  # fmt: skip
    return np.ascontiguousarray(values.astype(wanted, copy=False))


def new_columns(
    found: Mapping[str, np.ndarray], metadata: ModelMetadata, outputs: Sequence[str]
) -> dict[str, pa.Array]:
    """The prediction, its probability, and the outputs that were asked for."""
    columns = _predictions(found, metadata)
    for name in outputs:
        columns[name] = _lists(found[name])
    return columns


def outputs_to_run(metadata: ModelMetadata, outputs: Sequence[str]) -> list[str]:
    """The outputs of the model that are needed for the columns."""
    main = PROBABILITIES if PROBABILITIES in metadata.output_names else metadata.output_names[0]
    return list(dict.fromkeys([main, *outputs]))


def _predictions(found: Mapping[str, np.ndarray], metadata: ModelMetadata) -> dict[str, pa.Array]:
    main = next(iter(found.values()))
    if metadata.answers == "classes":
        best = main.argmax(1)
        if best.ndim > 1:  # a class for each position of a text
            return {PREDICTION: _lists(best)}
        names = metadata.class_names
        labels = (
            pa.array(best) if names is None else pa.DictionaryArray.from_arrays(best, list(names)).cast(pa.string())
        )
        probability = np.take_along_axis(main, best[:, None], 1)[:, 0]
        return {PREDICTION: labels, **({PROBABILITY: pa.array(probability)} if PROBABILITIES in found else {})}
    if metadata.answers in ("binary", "binary logits"):
        yes = main.reshape(len(main), -1)
        if yes.shape[1] == 1:
            return {PREDICTION: pa.array((yes[:, 0] > 0.5).astype(np.int64)), PROBABILITY: pa.array(yes[:, 0])}
        return {PREDICTION: _lists((yes > 0.5).astype(np.int64)), PROBABILITY: _lists(yes)}
    flat = main.reshape(len(main), -1)
    return {PREDICTION: pa.array(flat[:, 0]) if flat.shape[1] == 1 else _lists(main)}


def _lists(values: np.ndarray) -> pa.Array:
    """One flat list per row."""
    flat = np.ascontiguousarray(values.reshape(len(values), -1))
    width = flat.shape[1]
    offsets = pa.array(np.arange(0, flat.size + 1, width, dtype=np.int32)) if width else None
    return pa.ListArray.from_arrays(offsets, pa.array(flat.reshape(-1)))
