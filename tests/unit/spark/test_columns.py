"""Columns of a DataFrame become arrays, or it is said which column cannot and why. No Spark is started."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types

from syncline.errors import ConfigError, DataError
from syncline.spark.columns import as_vectors, kind_of, read_features, read_labels


def test_numbers_are_one_feature_each():
    read = read_features("x", pa.array([1, 2, 3]), "number")
    assert read.dtype == np.float32
    assert read.tolist() == [[1], [2], [3]]


def test_arrays_keep_their_shape_and_become_what_is_asked_for():
    nested = pa.array([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]], [[9.0, 0.0], [1.0, 2.0]]])
    assert read_features("x", nested, "array").shape == (3, 2, 2)
    assert read_features("x", nested.slice(1, 1), "array").tolist() == [[[5, 6], [7, 8]]]
    assert read_features("tokens", pa.array([[1, 2], [3, 4]]), "array", "int64").dtype == np.int64


def test_vectors_are_read_dense_and_sparse_alike():
    vectors = pa.array(
        [
            {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0, 3.0]},
            {"type": 0, "size": 3, "indices": [2], "values": [7.0]},
        ],
        pa.struct(
            [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())),
             ("values", pa.list_(pa.float64()))]
        ),
    )  # fmt: skip
    assert read_features("v", vectors, "vector").tolist() == [[1, 2, 3], [0, 0, 7]]
    assert read_features("v", vectors.slice(0, 1), "vector").tolist() == [[1, 2, 3]]
    assert read_features("v", vectors.slice(1, 1), "vector").tolist() == [[0, 0, 7]]


def test_dense_vectors_are_written_as_they_are_read():
    rows = np.arange(6.0).reshape(3, 2)
    assert read_features("v", as_vectors(rows), "vector").tolist() == rows.tolist()


def image(pixels: np.ndarray, mode: int) -> dict[str, object]:
    height, width = pixels.shape[:2]
    return {"origin": "", "height": height, "width": width, "nChannels": 3, "mode": mode, "data": pixels.tobytes()}


IMAGES = pa.struct(
    [("origin", pa.string()), ("height", pa.int32()), ("width", pa.int32()), ("nChannels", pa.int32()),
     ("mode", pa.int32()), ("data", pa.binary())]
)  # fmt: skip


def test_images_come_with_channels_first_and_red_before_blue():
    blue, red = np.zeros((2, 3, 3), np.uint8), np.zeros((2, 3, 3), np.uint8)
    blue[..., 0], red[..., 2] = 255, 255  # as OpenCV keeps them
    read = read_features("image", pa.array([image(blue, 16), image(red, 16)], IMAGES), "image")
    assert read.shape == (2, 3, 2, 3)
    assert read.dtype == np.uint8
    assert read[1, 0].min() == 255
    assert read[1, 1:].max() == 0
    gray = np.arange(6, dtype=np.uint8).reshape(2, 3)
    assert read_features("image", pa.array([image(gray, 0)], IMAGES), "image").tolist() == [[gray.tolist()]]


def test_images_of_different_sizes_are_refused_with_the_sizes():
    images = [image(np.zeros((2, 3), np.uint8), 0), image(np.zeros((4, 3), np.uint8), 0)]
    with pytest.raises(DataError, match="3 x 2, 3 x 4"):
        read_features("image", pa.array(images, IMAGES), "image")


def test_bytes_are_pixels_also_in_the_middle_of_a_column_and_files_of_images_are_not():
    column = pa.array([b"\x01\x02", b"\x03\x04", b"\x05\x06"], pa.binary())
    assert read_features("b", column, "bytes").tolist() == [[1, 2], [3, 4], [5, 6]]
    assert read_features("b", column.slice(1, 2), "bytes").tolist() == [[3, 4], [5, 6]]
    with pytest.raises(DataError, match="holds PNG files"):
        read_features("b", pa.array([b"\x89PNG..."], pa.binary()), "bytes")


def test_rows_of_different_length_and_rows_without_a_value_are_refused_with_the_column():
    with pytest.raises(DataError, match=r"column 'x' have between 1 and 2 values"):
        read_features("x", pa.array([[1.0], [1.0, 2.0]]), "array")
    for column, kind in ((pa.array([1.0, None]), "number"), (pa.array([[1.0, None]]), "array")):
        with pytest.raises(DataError, match=r"'x'.*dropna"):
            read_features("x", column, kind)  # type: ignore[arg-type]


def test_whole_doubles_are_classes_and_others_are_not():
    labels = read_labels("y", pa.array([0.0, 2.0]), "number", are_classes=True)
    assert labels.dtype == np.int64
    assert labels.tolist() == [0, 2]
    with pytest.raises(DataError, match=r"'y' holds 0\.5"):
        read_labels("y", pa.array([0.0, 0.5]), "number", are_classes=True)
    with pytest.raises(DataError, match="holds -1"):
        read_labels("y", pa.array([0, -1]), "number", are_classes=True)


def test_labels_for_other_losses_are_floats():
    assert read_labels("y", pa.array([1, 2]), "number", are_classes=False).dtype == np.float32
    assert read_labels("y", pa.array([[1.0, 2.0]]), "array", are_classes=False).shape == (1, 2)
    assert read_labels("y", pa.array([True, False]), "number", are_classes=True).tolist() == [1, 0]


def test_what_spark_calls_a_type_decides_how_a_column_is_read():
    assert kind_of("x", VectorUDT()) == "vector"
    assert kind_of("x", types.ArrayType(types.ArrayType(types.FloatType()))) == "array"
    assert kind_of("x", types.DecimalType(10, 2)) == "number"
    assert kind_of("x", types.BinaryType()) == "bytes"
    fields = [types.StructField(n, types.IntegerType()) for n in ("height", "width", "mode", "data")]
    assert kind_of("x", types.StructType(fields)) == "image"
    with pytest.raises(ConfigError, match=r"column 'name' is of type string.*StringIndexer"):
        kind_of("name", types.StringType())
    with pytest.raises(ConfigError, match="array<string>"):
        kind_of("words", types.ArrayType(types.StringType()))
