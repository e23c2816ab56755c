"""Training on a DataFrame: a pyspark.ml Estimator.

Here: `Estimator`, its Params, and the order of things in `fit`: executors write the rows where workers can read them,
workers train in the same executors, and the trained model comes back. Not here: writing the rows (`feeding.py`),
running workers (`engines/spark.py`), predicting (`model.py`), saving (`persistence.py`).
"""

from __future__ import annotations

import copy
import dataclasses
import secrets
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark.ml
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasFeaturesCol, HasLabelCol, HasPredictionCol, HasProbabilityCol
from pyspark.ml.util import MLReadable, MLWritable

from syncline.config.run import RunConfig
from syncline.config.spec import Spec
from syncline.driver import run_task
from syncline.engines.spark import SparkEngine
from syncline.errors import ConfigError, Interrupted, WorkerFailed, check_options
from syncline.models.answers import answers_of
from syncline.models.declared.declaration import Declared
from syncline.models.zoo import registry as zoo
from syncline.observe.observer import WithoutEnd, choose_view
from syncline.spark.feeding import Fed, FrameColumns, spill
from syncline.spark.model import Model
from syncline.spark.persistence import PartsReader, PartsWriter
from syncline.strategies.reading import read_strategy
from syncline.task import Task
from syncline.telemetry.events import InfoMessage

if TYPE_CHECKING:
    import torch
    from pyspark.sql import DataFrame

__all__ = ["Estimator"]

_ONE_AT_A_TIME = threading.Lock()
"""Each run needs one task slot per worker. Two runs at once, as in a CrossValidator with parallelism, would each hold
some of the slots and wait forever for the rest."""
_PARAMS = ("workers", "epochs", "batch", "strategy", "seed")
_DTYPES = ("float32", "float64", "int64")


class Estimator(
    pyspark.ml.Estimator[Model],
    HasFeaturesCol,
    HasLabelCol,
    HasPredictionCol,
    HasProbabilityCol,
    MLReadable["Estimator"],
    MLWritable,
):
    """Trains a torch model on a DataFrame, with workers in the executors of its Spark session.

    lr, epochs, batch, strategy, workers and seed are Params, so a CrossValidator can search over them.

    >>> estimator = syncline.spark.Estimator(model=Net(), features="image", label="digit", workers=8)  # doctest: +SKIP
    >>> fitted = estimator.fit(train_df)                                                              # doctest: +SKIP
    """

    lr: Param[float] = Param(Params._dummy(), "lr", "the optimizer's learning rate", TypeConverters.toFloat)
    epochs: Param[int] = Param(
        Params._dummy(), "epochs", "number of passes over the training data", TypeConverters.toInt
    )
    batch: Param[int] = Param(Params._dummy(), "batch", "global batch size", TypeConverters.toInt)
    strategy: Param[str] = Param(Params._dummy(), "strategy", "synchronization strategy", TypeConverters.toString)
    workers: Param[int] = Param(Params._dummy(), "workers", "number of workers", TypeConverters.toInt)
    seed: Param[int] = Param(Params._dummy(), "seed", "seed of initial weights and shuffling", TypeConverters.toInt)

    def __init__(
        self,
        *,
        model: Any,
        loss: Any = None,
        optimizer: Any = None,
        schedule: Any = None,
        metrics: Any = None,
        weight_decay: float | None = None,
        clip_norm: float | None = None,
        features: str = "features",
        label: str = "label",
        prediction: str = "prediction",
        probability: str = "probability",
        shape: tuple[int, ...] | None = None,
        dtype: str = "float32",
        lr: float | None = None,
        spill_dir: str | None = None,
        quiet: bool = False,
        **settings: Any,
    ) -> None:
        """As for `syncline.train`, with columns instead of data.

        `features`, `label`, `prediction` and `probability` are column names. The model gets each row's features in
        `shape`, such as (1, 28, 28), as `dtype`. `lr` overrides the optimizer's learning rate. `settings` are those of
        `RunConfig`: workers, epochs, strategy and so on. Rows are spilled to files under `spill_dir`, by default
        `out`, which must be on a file system that all executors share.
        """
        super().__init__()
        self._setDefault(predictionCol="prediction", probabilityCol="probability")
        self._set(featuresCol=features, labelCol=label, predictionCol=prediction, probabilityCol=probability)
        known = [f.name for f in dataclasses.fields(RunConfig) if f.name not in ("engine", "resume")]
        check_options("syncline.spark.Estimator", settings, known, kind="setting")
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype is {dtype!r}, but must be one of {', '.join(map(repr, _DTYPES))}.")
        if "strategy" in settings:
            settings["strategy"] = str(settings["strategy"])
        given = {name: settings.pop(name) for name in _PARAMS if settings.get(name) is not None}
        self._set(**given, **({"lr": lr} if lr is not None else {}))
        self._task: dict[str, Any] = {
            "model": model, "loss": loss, "optimizer": optimizer, "schedule": schedule, "metrics": metrics,
            "weight_decay": weight_decay, "clip_norm": clip_norm,
        }  # fmt: skip
        self._shape, self._dtype, self._spill_dir, self._quiet = shape, dtype, spill_dir, quiet
        self._settings = settings
        self._config()  # fail early
        self._task_on(None)

    def parts(self) -> dict[str, Any]:
        """Its constructor arguments, except Params."""
        others = {"shape": self._shape, "dtype": self._dtype, "spill_dir": self._spill_dir, "quiet": self._quiet}
        return {**self._task, **others, **self._settings}

    def write(self) -> PartsWriter:
        """A writer, such as `write().overwrite().save(path)`."""
        return PartsWriter(self)

    @classmethod
    def read(cls) -> PartsReader[Estimator]:
        return PartsReader(cls)

    def _fit(self, dataset: DataFrame) -> Model:
        config, task = self._config(), self._task_on(None)
        read_strategy(config.strategy)  # fail before anything is written
        answers = answers_of(task.loss)
        columns = FrameColumns.of(
            dataset, self.getFeaturesCol(), self.getLabelCol(), dtype=self._dtype,
            are_classes=None if answers is None else answers == "classes",
        )  # fmt: skip
        folder = Path(self._spill_dir or config.out).absolute() / f"spilled-{secrets.token_hex(6)}"
        view = WithoutEnd(choose_view(quiet=self._quiet, json=False))
        with _ONE_AT_A_TIME:
            try:
                fed = spill(dataset, columns, config.workers, folder)
                view.on_event(InfoMessage(message=fed.summary()))
                shape = self._shape_of(fed)
                task, outputs = self._prepared(fed, shape)
                result = run_task(task, config, view, engine=SparkEngine(session=dataset.sparkSession))
                module = result.model
            except (Interrupted, WorkerFailed):
                raise  # resuming the run needs its rows
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            finally:
                view.close()
        shutil.rmtree(folder, ignore_errors=True)
        if answers is None:
            answers = "classes" if columns.are_classes else "number" if outputs in ((), (1,)) else "numbers"
        elif answers == "number" and outputs not in (None, (), (1,)):
            answers = "numbers"
        fitted = Model(
            module=module, shape=shape, dtype=self._dtype, answers=answers, metrics=dict(result.metrics),
            run_dir=str(result.run_dir),
        )  # fmt: skip
        fitted._resetUid(self.uid)
        return self._copyValues(fitted)

    def _config(self) -> RunConfig:
        chosen = {name: self.getOrDefault(name) for name in _PARAMS if self.isDefined(name)}
        recommended = {}
        if isinstance(self._task["model"], (str, Spec)):
            card = zoo.card(Spec.of(self._task["model"], what="model").name)
            recommended = {"epochs": card.epochs, "batch": card.batch}
        return RunConfig(**{**recommended, **self._settings, **chosen, "engine": "spark"})

    def _task_on(self, data: Any) -> Task:
        """What to train, with the defaults of the model."""
        task = Task(**self._task, data=data).with_defaults()
        if not self.isDefined("lr"):
            return task
        if not isinstance(task.optimizer, Spec):
            raise ConfigError(
                "lr is set, but the optimizer is a function. Set it inside that function, or pass the optimizer "
                "by name, such as optimizer=syncline.sgd(lr=0.1)."
            )
        return dataclasses.replace(task, optimizer=task.optimizer.with_options(lr=self.getOrDefault("lr")))

    def _shape_of(self, fed: Fed) -> tuple[int, ...]:
        found, wanted = fed.frame.feature_shape, self._shape
        if wanted is None:
            return found
        if _product(found) != _product(wanted):
            raise ConfigError(
                f"shape is {wanted}, which has {_product(wanted)} values, but each row of {self.getFeaturesCol()!r} "
                f"has {_product(found)}, of shape {found}."
            )
        return wanted

    def _prepared(self, fed: Fed, shape: tuple[int, ...]) -> tuple[Task, tuple[int, ...] | None]:
        """The task on the spilled rows, and the shape of the model's output for one row, if known."""
        frame = dataclasses.replace(fed.frame, feature_shape=shape)
        task = self._task_on(frame)
        if isinstance(task.model, Spec):
            # The number of classes is known only here: a worker sees just the rows of its steps.
            task = dataclasses.replace(task, model=_FromZoo(task.model, shape, fed.classes))
        elif isinstance(task.model, Declared):
            task = dataclasses.replace(task, model=_FromLayers(task.model, shape, fed.classes))
        outputs = None
        if answers_of(task.loss) != "classes":
            # torch would silently broadcast a target of another shape.
            outputs = _outputs_of(task.model, shape, self._dtype)
            if outputs == (1,):
                task = dataclasses.replace(task, data=dataclasses.replace(frame, label_shape=(1,)))
        return task, outputs


class _FromZoo:
    """A model of the zoo for rows of a known shape, built in the worker."""

    def __init__(self, spec: Spec, shape: tuple[int, ...], classes: int) -> None:
        self.__name__ = str(spec)
        self._spec, self._shape, self._classes = spec, shape, classes

    def __call__(self) -> torch.nn.Module:
        return zoo.build(self._spec.name, self._shape, self._classes, **dict(self._spec.options))


class _FromLayers:
    """A declared model for rows of a known shape, built in the worker."""

    def __init__(self, declared: Declared, shape: tuple[int, ...], classes: int) -> None:
        self.__name__ = declared.name
        self._declared, self._shape, self._classes = declared, shape, classes

    def __call__(self) -> torch.nn.Module:
        return self._declared.build(self._shape, self._classes)


def _outputs_of(model: Any, shape: tuple[int, ...], dtype: str) -> tuple[int, ...] | None:
    import torch

    try:
        module = copy.deepcopy(model if isinstance(model, torch.nn.Module) else model()).eval()
        with torch.inference_mode():
            return tuple(module(torch.zeros(2, *shape, dtype=getattr(torch, dtype))).shape[1:])
    except Exception:  # an error in the user's code will show in training
        return None


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for n in shape:
        product *= n
    return product
