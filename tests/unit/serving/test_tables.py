"""From rows of a table to a model's input, and from its outputs to columns."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from syncline.data.files.columns import Where
from syncline.errors import ConfigError, DataError
from syncline.serving.metadata import ModelMetadata, TensorFacts
from syncline.serving.scoring.tables import columns_for, inputs_from, new_columns, outputs_to_run

WHERE = Where("rows.parquet, row group 0")


def about(
    *shape: int, dtype: str = "float32", answers: str = "classes", names=None, columns=None, outputs=("logits",)
) -> ModelMetadata:
    return ModelMetadata(
        name="m", version="1", sha256="", kind="table", answers=answers, class_names=names, columns=columns,
        inputs=(TensorFacts(name="input", dtype=dtype, shape=shape),),
        outputs=tuple(TensorFacts(name=name, dtype="float32", shape=(2,)) for name in outputs),
    )  # fmt: skip


def inputs(table: pa.Table, facts: ModelMetadata, features=None) -> np.ndarray:
    return inputs_from(table, columns_for(table.schema, facts, features, "rows"), facts, WHERE)


def test_the_columns_of_the_training_data_are_taken_in_its_order() -> None:
    table = pa.table({"id": [1, 2], "b": [3.0, 4.0], "a": [5.0, 6.0]})
    assert inputs(table, about(2, columns=("a", "b"))).tolist() == [[5, 3], [6, 4]]


def test_the_only_column_of_lists_is_the_input_in_the_shape_of_the_model() -> None:
    table = pa.table({"id": [1], "pixels": pa.array([[0, 1, 2, 255]], pa.list_(pa.int64()))})
    found = inputs(table, about(1, 2, 2, dtype="uint8"))
    assert (found.dtype, found.tolist()) == (np.uint8, [[[[0, 1], [2, 255]]]])


def test_numeric_columns_are_the_input_if_they_are_as_many_as_the_model_takes() -> None:
    assert inputs(pa.table({"a": [1], "b": [2]}), about(2)).tolist() == [[1, 2]]
    with pytest.raises(DataError) as unclear:
        inputs(pa.table({"id": [0], "a": [1], "b": [2]}), about(2))
    assert (unclear.value.code, unclear.value.facts["columns"]) == ("unclear-features", ["id", "a", "b"])


def test_too_few_columns_are_refused_before_anything_is_scored() -> None:
    with pytest.raises(DataError) as refused:
        inputs(pa.table({"a": [1], "b": [2]}), about(3), features=["a", "b"])
    assert refused.value.facts == {"expected": 3, "found": 2}


@pytest.mark.parametrize("value", [256.0, -1.0, 0.5])
def test_a_value_that_a_pixel_cannot_have_is_refused_with_its_row(value: float) -> None:
    table = pa.table({"a": [1.0, 2.0], "b": [3.0, value]})
    with pytest.raises(DataError) as refused:
        inputs(table, about(2, dtype="uint8"))
    assert (refused.value.code, refused.value.facts["row"], refused.value.facts["value"]) == ("value-range", 1, value)


def test_a_class_has_its_name_and_its_probability() -> None:
    facts = about(2, names=("cat", "dog"), outputs=("probabilities", "logits"))
    found = {"probabilities": np.array([[0.25, 0.75], [1.0, 0.0]], np.float32)}
    columns = new_columns(found, facts, ["probabilities"])
    assert columns["prediction"].to_pylist() == ["dog", "cat"]
    assert columns["probability"].to_pylist() == [0.75, 1.0]
    assert columns["probabilities"].to_pylist() == [[0.25, 0.75], [1.0, 0.0]]
    assert outputs_to_run(facts, ["logits"]) == ["probabilities", "logits"]


def test_numbers_and_tokens_become_numbers_and_lists() -> None:
    one = new_columns({"output": np.array([[1.5], [2.5]])}, about(2, answers="number"), [])
    assert one["prediction"].to_pylist() == [1.5, 2.5]
    tokens = new_columns({"logits": np.array([[[0, 9], [5, 0]]])}, about(2), [])
    assert tokens["prediction"].to_pylist() == [[1, 0]]
    yes = new_columns({"probabilities": np.array([[0.9], [0.1]])}, about(2, answers="binary logits"), [])
    assert yes["prediction"].to_pylist() == [1, 0]


def test_a_model_of_several_inputs_is_refused() -> None:
    facts = about(2)
    both = ModelMetadata(
        **{f: getattr(facts, f) for f in facts.__struct_fields__ if f != "inputs"}, inputs=facts.inputs * 2
    )
    with pytest.raises(ConfigError) as refused:
        columns_for(pa.schema([("a", pa.float32())]), both, None, "rows")
    assert refused.value.code == "several-inputs"
