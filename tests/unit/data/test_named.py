"""The registry of data sets known by name, and what it may import."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from syncline.data.named import DataInfo, named, names
from syncline.errors import UnknownName

REPOSITORY = Path(__file__).parents[3]


def run_python(code: str, **environment: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr


def test_every_name_leads_to_a_data_set_of_that_name():
    assert names() == ["digits", "mnist"]
    for name in names():
        assert named(name).name == name


def test_a_misspelt_name_brings_the_nearest_and_all_names():
    with pytest.raises(
        UnknownName, match=r"There is no data set 'minst'\. Did you mean 'mnist'\? Known: digits, mnist\."
    ):
        named("minst")


def test_what_is_known_of_a_data_set_survives_pickling():
    info = DataInfo(name="x", train_samples=3, test_samples=1, input_shape=(2,), classes=None, scale=(0.5, 0.25))
    assert pickle.loads(pickle.dumps(info)) == info


def test_what_digits_promises_is_what_it_loads(tmp_path: Path):
    data = named("digits")
    path = data.locate(tmp_path, None)
    info = data.info(path)
    for split, samples in (("train", info.train_samples), ("test", info.test_samples)):
        inputs, targets = data.load(path, split)
        assert inputs.shape == (samples, *info.input_shape)
        assert targets.shape == (samples,)
        assert targets.dtype == np.int64
        assert info.classes is not None
        assert set(targets.tolist()) == set(range(info.classes))


def test_names_places_and_shapes_need_neither_torch_nor_numpy_nor_sklearn(tmp_path: Path):
    run_python(
        """
import os, struct, sys
from pathlib import Path
import syncline.data.named
folder = Path(os.environ["SYNCLINE_DATA"])
for prefix in ("train", "t10k"):
    (folder / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 2051, 0, 28, 28))
    (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, 0))
for name in syncline.data.named.names():
    data = syncline.data.named.named(name)
    data.info(data.locate(None, None))
loaded = {"torch", "numpy", "sklearn"} & set(sys.modules)
assert not loaded, loaded
""",
        SYNCLINE_DATA=str(tmp_path),
        XDG_CACHE_HOME=str(tmp_path),
    )


def test_loading_needs_numpy_but_neither_torch_nor_sklearn():
    run_python(
        """
import sys
from syncline.data.named import named
digits = named("digits")
digits.load(digits.locate(None, None), "test")
loaded = {"torch", "sklearn"} & set(sys.modules)
assert not loaded, loaded
"""
    )
