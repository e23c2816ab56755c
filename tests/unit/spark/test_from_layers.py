"""A declared model in a Spark estimator is made for the rows of its table."""

from __future__ import annotations

import pickle

import pytest
import torch

import syncline


def test_a_declared_model_is_made_for_rows_of_a_known_shape_and_travels_to_workers():
    pytest.importorskip("pyspark")
    from syncline.spark.estimator import _FromLayers

    make = pickle.loads(pickle.dumps(_FromLayers(syncline.declared(["linear('classes')"], name="small"), (4,), 3)))
    assert make.__name__ == "small"
    assert make()(torch.zeros(2, 4)).shape == (2, 3)
