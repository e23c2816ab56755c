"""Saving Estimator and Model to any path of Hadoop's file systems, including hdfs:// and s3a://.

Here: a pyspark.ml writer and reader for objects with Params and Python parts. Params are Spark's usual JSON in
`metadata/`; the parts are pickled in `parts.pickle`, including classes and functions of the user's script
(cloudpickle). Reading a pickle can run code, so load only models that you trust.
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
    """Saves Params, and `parts()`: the constructor arguments except Params."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        """Called by pyspark.ml after it has handled overwriting."""
        DefaultParamsWriter.saveMetadata(self._instance, path, self.sparkSession)
        _write(self.sparkSession, os.path.join(path, _FILE), cloudpickle.dumps(self._instance.parts()))


class PartsReader(MLReader[T]):
    """Loads what `PartsWriter` saved."""

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
        raise CheckpointError(f"There is no {path}. Syncline saved nothing there, or only a part.")
    stream = file_system.open(place)
    try:
        while piece := stream.readNBytes(_PIECE_BYTES):
            yield bytes(piece)
    finally:
        stream.close()


def _file(session: Any, path: str) -> tuple[Any, Any]:
    """The Hadoop file system and path; PySpark has no Python interface to them."""
    java = session.sparkContext._jvm
    place = java.org.apache.hadoop.fs.Path(path)
    return place.getFileSystem(session.sparkContext._jsc.hadoopConfiguration()), place
