"""The registry of datasets known by name, and what it may import."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from syncline.data.named import DataInfo, named, names
from syncline.data.shakespeare import Shakespeare
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
    assert names() == ["cifar10", "digits", "fashion-mnist", "iris", "mnist", "shakespeare"]
    for name in names():
        assert named(name).name == name


def test_a_misspelt_name_brings_the_nearest_and_all_names():
    with pytest.raises(UnknownName) as caught:
        named("minst")
    assert caught.value.facts["nearest"][0] == "mnist"
    assert caught.value.facts["known"] == names()


def test_options_go_to_the_data_set_and_one_it_lacks_is_reported():
    assert named("shakespeare", block=64) == Shakespeare(block=64)
    with pytest.raises(UnknownName) as caught:
        named("shakespeare", blok=64)
    assert caught.value.facts["known"] == ["block", "stride"]
    with pytest.raises(UnknownName) as caught:
        named("mnist", block=64)
    assert caught.value.facts["known"] == []


def test_what_is_known_of_a_data_set_survives_pickling():
    info = DataInfo(name="x", train_samples=3, test_samples=1, input_shape=(2,), classes=None, scale=(0.5, 0.25))
    assert pickle.loads(pickle.dumps(info)) == info


@pytest.mark.parametrize("name", ["digits", "iris"])
def test_what_a_data_set_in_scikit_learn_promises_is_what_it_loads(name: str, tmp_path: Path):
    data = named(name)
    path = data.locate(tmp_path, None)
    info = data.info(path)
    for split, samples in (("train", info.train_samples), ("test", info.test_samples)):
        inputs, targets = data.load(path, split)
        assert inputs.shape == (samples, *info.input_shape)
        assert targets.shape == (samples,)
        assert targets.dtype == np.int64
        assert info.classes is not None
        assert set(targets.tolist()) == set(range(info.classes))
        assert info.class_names is not None
        assert len(info.class_names) == info.classes


def test_names_places_and_shapes_need_neither_torch_nor_numpy_nor_sklearn(tmp_path: Path):
    run_python(
        """
import os, struct, sys
from pathlib import Path
import syncline.data.named
folder = Path(os.environ["SYNCLINE_DATA"])
(folder / "fashion-mnist").mkdir()
for place in (folder, folder / "fashion-mnist"):
    for prefix in ("train", "t10k"):
        (place / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 2051, 0, 28, 28))
        (place / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, 0))
for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
    (folder / f"{name}.bin").write_bytes(bytes(3073))
(folder / "shakespeare").mkdir()
(folder / "shakespeare" / "input.txt").write_text("To be, or not to be, that is the question. " * 99)
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
