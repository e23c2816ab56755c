"""Saving Estimator and Model where Spark saves: any path that Hadoop's file systems know, hdfs:// and s3a:// included.

Here: a pyspark.ml writer and reader for objects that have Params, a few facts, and Python parts beside them. Params and
facts are Spark's usual JSON in `metadata/`; the parts are pickled in the file `parts.pickle`, with classes and
functions of the user's script in it (cloudpickle). Reading that file runs code that it names, so a saved model is to be
loaded only from those who are trusted, as any pickled one.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from typing import Any, TypeVar

import cloudpickle
from pyspark.ml.param import Params
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWriter
from pyspark.sql import SparkSession

from syncline.errors import CheckpointError

__all__ = ["PartsReader", "PartsWriter"]

_FILE = "parts.pickle"
_PIECE_BYTES = 8 * 1024 * 1024


T = TypeVar("T", bound=MLReadable[Any])


class PartsWriter(MLWriter):
    """Saves Params, and `parts()`: the keyword arguments that make an equal object, but for its Params."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        """What pyspark.ml calls after it has dealt with overwriting."""
        DefaultParamsWriter.saveMetadata(self._instance, path, self.sparkSession)
        _write(self.sparkSession, os.path.join(path, _FILE), cloudpickle.dumps(self._instance.parts()))


class PartsReader(MLReader[T]):
    """Loads what `PartsWriter` has saved."""

    def __init__(self, cls: type[T]) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> T:
        """The object that was saved at `path`."""
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)
        parts = pickle.loads(b"".join(_read(self.sparkSession, os.path.join(path, _FILE))))
        instance = self._cls(**parts)
        assert isinstance(instance, Params)
        instance._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(instance, metadata)
        return instance


def _write(session: SparkSession, path: str, data: bytes) -> None:
    file_system, place = _file(session, path)
    stream = file_system.create(place, True)
    try:
        for start in range(0, len(data), _PIECE_BYTES):
            stream.write(bytearray(data[start : start + _PIECE_BYTES]))
    finally:
        stream.close()


def _read(session: SparkSession, path: str) -> Iterator[bytes]:
    file_system, place = _file(session, path)
    if not file_system.exists(place):
        raise CheckpointError(f"There is no {path}: nothing was saved there by Syncline, or only in part.")
    stream = file_system.open(place)
    try:
        while piece := stream.readNBytes(_PIECE_BYTES):
            yield bytes(piece)
    finally:
        stream.close()


def _file(session: Any, path: str) -> tuple[Any, Any]:
    """A file by Hadoop's reckoning; PySpark itself has no Python interface to its file systems."""
    java = session.sparkContext._jvm
    place = java.org.apache.hadoop.fs.Path(path)
    return place.getFileSystem(session.sparkContext._jsc.hadoopConfiguration()), place
