"""Layers as columns of what a fitted model returns."""

from __future__ import annotations

from types import SimpleNamespace

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from syncline.errors import UnknownName
from syncline.spark.model import PREDICTION, PROBABILITY, _Predictor

MODULE = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()


def predicted(rows: np.ndarray, *, answers="classes", outputs=("0",), wanted=(PREDICTION, PROBABILITY, "0")):
    packed = SimpleNamespace(value=cloudpickle.dumps(MODULE))
    predictor = _Predictor(packed, "x", "array", (4,), "float32", answers, outputs, wanted)
    batch = pa.record_batch([pa.array(list(rows), pa.list_(pa.float32()))], names=["x"])
    (found,) = predictor([batch])
    return found


@pytest.mark.parametrize("count", [0, 1, 300])
def test_the_output_of_a_layer_is_a_column_of_vectors(count: int) -> None:
    rows = np.random.default_rng(0).normal(size=(count, 4)).astype(np.float32)
    found = predicted(rows)
    assert (found.num_rows, found.num_columns) == (count, 4)
    vectors = found.column(3).field("values").to_pylist()
    with torch.inference_mode():
        expected = MODULE[0](torch.from_numpy(rows))
    if count:
        np.testing.assert_allclose(vectors, expected, atol=1e-6)


def test_only_the_columns_that_are_wanted_are_made() -> None:
    rows = np.ones((2, 4), np.float32)
    assert predicted(rows, wanted=("0",)).num_columns == 2
    assert predicted(rows, answers="numbers", outputs=(), wanted=(PREDICTION,)).num_columns == 2


def test_a_layer_that_does_not_exist_is_refused_at_once() -> None:
    from syncline.models.named_outputs import check_names

    with pytest.raises(UnknownName) as unknown:
        check_names(MODULE, "classes", ["7"])
    assert {"0", "1", "2", "logits", "probabilities"} <= set(unknown.value.facts["known"])
