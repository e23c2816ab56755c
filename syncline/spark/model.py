"""A trained model for pyspark.ml: from a DataFrame to a DataFrame with predictions.

Here: `Model`, and what runs in the executors to predict. Not here: training (`estimator.py`), reading columns
(`columns.py`), saving (`persistence.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyspark.ml
from pyspark.ml.linalg import VectorUDT
from pyspark.ml.param.shared import HasFeaturesCol, HasPredictionCol, HasProbabilityCol
from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql.types import ArrayType, DataType, DoubleType, StructField, StructType

from syncline.errors import ConfigError, DataError
from syncline.models.answers import Answers, main_name
from syncline.spark.columns import Kind, as_vectors, kind_of, read_features
from syncline.spark.persistence import PartsReader, PartsWriter

if TYPE_CHECKING:
    import torch
    from pyspark import Broadcast
    from pyspark.sql import DataFrame

__all__ = ["Model"]

_ROWS_AT_ONCE = 256
PREDICTION, PROBABILITY = "the prediction", "the probabilities"
"""What a column holds; no name of a layer has a space."""


class Model(pyspark.ml.Model, HasFeaturesCol, HasPredictionCol, HasProbabilityCol, MLReadable["Model"], MLWritable):
    """A trained torch model that adds a prediction and, for classes, their probabilities to each row."""

    def __init__(
        self,
        *,
        module: torch.nn.Module,
        shape: tuple[int, ...],
        dtype: str = "float32",
        answers: Answers = "classes",
        outputs: Sequence[str] = (),
        metrics: dict[str, float] | None = None,
        run_dir: str | None = None,
    ) -> None:
        """`shape` and `dtype` are those of one row's features; `outputs` as for `setOutputs`."""
        super().__init__()
        self._setDefault(predictionCol="prediction", probabilityCol="probability")
        self.module = module
        """The torch model, in evaluation mode."""
        self.metrics = metrics or {}
        """The latest value of each metric of the run."""
        self.run_dir = run_dir
        """The directory of the run that trained it."""
        self._shape, self._dtype, self._answers, self._outputs = shape, dtype, answers, tuple(outputs)

    def parts(self) -> dict[str, Any]:
        return {
            "module": self.module, "shape": self._shape, "dtype": self._dtype, "answers": self._answers,
            "outputs": self._outputs, "metrics": self.metrics, "run_dir": self.run_dir,
        }  # fmt: skip

    def write(self) -> PartsWriter:
        """A writer, such as `write().overwrite().save(path)`."""
        return PartsWriter(self)

    @classmethod
    def read(cls) -> PartsReader[Model]:
        return PartsReader(cls)

    def setFeaturesCol(self, value: str) -> Model:
        """Read the features from another column."""
        return self._set(featuresCol=value)

    def setPredictionCol(self, value: str) -> Model:
        """Write the prediction to another column."""
        return self._set(predictionCol=value)

    def setProbabilityCol(self, value: str) -> Model:
        """Write the probabilities to another column."""
        return self._set(probabilityCol=value)

    def setOutputs(self, names: Sequence[str]) -> Model:
        """Also write these outputs or layers, flattened, as columns of vectors: `fc1`, or `block_fc1` for `block.fc1`.

        `UnknownName` lists what there is.
        """
        from syncline.models.named_outputs import check_names

        check_names(self.module, self._answers, names)
        self._outputs = tuple(names)
        return self

    def transformSchema(self, schema: StructType) -> StructType:
        """The schema that `transform` returns."""
        new = list(self._columns().values())
        taken = [field.name for field in new if field.name in schema.names]
        if taken:
            raise ConfigError(
                f"The DataFrame already has a column {taken[0]!r}. Choose another name with "
                "prediction= or probability=, or drop that one."
            )
        return StructType([*schema.fields, *new])

    def _transform(self, dataset: DataFrame) -> DataFrame:
        name = self.getFeaturesCol()
        if name not in dataset.columns:
            there = ", ".join(dataset.columns)
            raise DataError(f"The DataFrame has no column {name!r} for the features. It has: {there}.")
        schema = self.transformSchema(dataset.schema)
        # Broadcast: each executor gets the model once, not once per partition.
        packed = dataset.sparkSession.sparkContext.broadcast(cloudpickle.dumps(self.module))
        kind = kind_of(name, dataset.schema[name].dataType)
        predictor = _Predictor(
            packed, name, kind, self._shape, self._dtype, self._answers, self._outputs, tuple(self._columns())
        )
        return dataset.mapInArrow(predictor, schema)

    def _columns(self) -> dict[str, StructField]:
        """The new columns: what each holds, and its name and type."""
        prediction: DataType = ArrayType(DoubleType()) if self._answers == "numbers" else DoubleType()
        columns = {}
        if self.getPredictionCol():
            columns[PREDICTION] = StructField(self.getPredictionCol(), prediction)
        if self._answers not in ("number", "numbers") and self.getProbabilityCol():
            columns[PROBABILITY] = StructField(self.getProbabilityCol(), VectorUDT())
        # A dot in the name of a column would mean a field of a struct.
        return columns | {name: StructField(name.replace(".", "_"), VectorUDT()) for name in self._outputs}


class _Predictor:
    """Runs in the executors: adds predictions to batches of rows."""

    def __init__(
        self,
        packed: Broadcast[bytes],
        name: str,
        kind: Kind,
        shape: tuple[int, ...],
        dtype: str,
        answers: Answers,
        outputs: tuple[str, ...],
        wanted: tuple[str, ...],
    ) -> None:
        self._packed, self._name, self._kind = packed, name, kind
        self._shape, self._dtype, self._answers = shape, dtype, answers
        self._outputs, self._wanted = outputs, wanted

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import torch

        torch.set_num_threads(1)  # the other cores run other tasks
        module = _unpack(self._packed.value)
        for batch in batches:
            features = read_features(self._name, batch.column(self._name), self._kind, self._dtype)
            if len(features) and int(np.prod(features.shape[1:])) != int(np.prod(self._shape)):
                raise DataError(
                    f"The model was trained on features of shape {self._shape}, but the column {self._name!r} has "
                    f"rows of shape {features.shape[1:]}."
                )
            columns = self._answer(module, features)
            yield pa.RecordBatch.from_arrays(
                [*batch.columns, *columns], names=[*batch.schema.names, *map(str, range(len(columns)))]
            )

    def _answer(self, module: torch.nn.Module, features: np.ndarray) -> list[pa.Array]:
        found = self._outputs_of(module, features)
        columns = self._predictions(found[main_name(self._answers)])
        columns.update({name: as_vectors(_flat(found[name]).numpy()) for name in self._outputs})
        return [columns[name] for name in self._wanted]

    def _outputs_of(self, module: torch.nn.Module, features: np.ndarray) -> dict[str, torch.Tensor]:
        """The outputs that the columns need, as float64. Without rows, they are of one number each."""
        import torch

        from syncline.models.named_outputs import NamedOutputs

        names = list(dict.fromkeys([main_name(self._answers), *self._outputs]))
        named = NamedOutputs(module, self._answers, names)
        parts: dict[str, list[torch.Tensor]] = {name: [torch.zeros(0, 1, dtype=torch.float64)] for name in names}
        with torch.inference_mode():
            for start in range(0, len(features), _ROWS_AT_ONCE):
                part = torch.tensor(features[start : start + _ROWS_AT_ONCE]).reshape(-1, *self._shape)
                found = named(part.float().div_(255.0) if part.dtype == torch.uint8 else part)
                for name in names:
                    parts[name] = [*(parts[name] if start else []), found[name].double()]
        return {name: torch.cat(some) for name, some in parts.items()}

    def _predictions(self, out: torch.Tensor) -> dict[str, pa.Array]:
        import torch

        if self._answers == "number":
            return {PREDICTION: pa.array(out.reshape(-1).numpy())}
        if self._answers == "numbers":
            return {PREDICTION: pa.array(list(out.reshape(len(out), -1).numpy()), pa.list_(pa.float64()))}
        if self._answers == "classes":
            probability = out.softmax(1)
        else:
            yes = out.reshape(-1).sigmoid() if self._answers == "binary logits" else out.reshape(-1)
            probability = torch.stack([1 - yes, yes], 1)
        return {
            PREDICTION: pa.array(probability.argmax(1).double().numpy()),
            PROBABILITY: as_vectors(probability.numpy()),
        }


def _flat(values: torch.Tensor) -> torch.Tensor:
    """One row of numbers per sample, also without samples."""
    return values.flatten(1) if values.dim() > 1 else values.unsqueeze(1)


@functools.lru_cache(maxsize=2)
def _unpack(packed: bytes) -> torch.nn.Module:
    """The model, unpickled once for all partitions of this process."""
    module: torch.nn.Module = cloudpickle.loads(packed)
    return module.eval()
