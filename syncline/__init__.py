"""Syncline: train any PyTorch model on many workers, at any rhythm, and never lose work.

The names below are the public ones. They are loaded on first use, so that `import syncline` takes no time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from syncline.algorithms.outer import average, block_momentum, elastic, nesterov
    from syncline.config.run import RunConfig
    from syncline.config.spec import Spec
    from syncline.declare.declared import Declared, declared
    from syncline.driver import resume, train
    from syncline.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        Interrupted,
        NonFiniteLoss,
        SynclineError,
        UnknownName,
        WorkerFailed,
    )  # fmt: skip
    from syncline.inference.predict import Prediction, predict
    from syncline.result import Result
    from syncline.strategies.hierarchy import Hierarchy
    from syncline.strategies.how import BF16, Exact, Int8, OneBit, PowerSGD, TopK
    from syncline.strategies.own import AnyStrategy, Own
    from syncline.strategies.strategy import Strategy
    from syncline.strategies.switching import Phase, Switching, Until
    from syncline.strategies.what import Gradients, Models, Updates
    from syncline.strategies.when import Async, Every, Layerwise, Stale
    from syncline.strategies.whom import Everyone, Memory, Neighbours, Rivals, Server
    from syncline.task import Task, adam, adamw, optimizer, sgd
    from syncline.workers.own_loop import worker

__version__ = "0.1.0"

__all__ = [
    "AnyStrategy", "Hierarchy", "Own", "Phase", "Strategy", "Switching", "Until",
    "Gradients", "Models", "Updates", "average", "block_momentum", "elastic", "nesterov",
    "Async", "Every", "Layerwise", "Stale",
    "Everyone", "Memory", "Neighbours", "Rivals", "Server",
    "BF16", "Exact", "Int8", "OneBit", "PowerSGD", "TopK",
    "CheckpointError", "ConfigError", "DataError", "Declared", "Interrupted", "NonFiniteLoss", "Prediction", "Result",
    "RunConfig", "Spec", "SynclineError", "Task", "UnknownName", "WorkerFailed", "adam", "adamw", "declared",
    "optimizer", "predict", "resume", "sgd", "train", "worker",
]  # fmt: skip

_HOME = {
    "RunConfig": "config.run",
    "Spec": "config.spec",
    "Result": "result",
    **dict.fromkeys(("Prediction", "predict"), "inference.predict"),
    **dict.fromkeys(("Declared", "declared"), "declare.declared"),
    "resume": "driver",
    "train": "driver",
    "worker": "workers.own_loop",
    **dict.fromkeys(("average", "block_momentum", "elastic", "nesterov"), "algorithms.outer"),
    **dict.fromkeys(("BF16", "Exact", "Int8", "OneBit", "PowerSGD", "TopK"), "strategies.how"),
    **dict.fromkeys(("Gradients", "Models", "Updates"), "strategies.what"),
    **dict.fromkeys(("Async", "Every", "Layerwise", "Stale"), "strategies.when"),
    **dict.fromkeys(("Everyone", "Memory", "Neighbours", "Rivals", "Server"), "strategies.whom"),
    "Strategy": "strategies.strategy",
    "Hierarchy": "strategies.hierarchy",
    **dict.fromkeys(("Phase", "Switching", "Until"), "strategies.switching"),
    **dict.fromkeys(("AnyStrategy", "Own"), "strategies.own"),
    **dict.fromkeys(("Task", "adam", "adamw", "optimizer", "sgd"), "task"),
}


def __getattr__(name: str) -> Any:
    if name == "spark":  # a package of its own; PySpark is loaded when something in it is used
        return importlib.import_module("syncline.spark")
    if name not in __all__:
        raise AttributeError(f"module 'syncline' has no attribute {name!r}")
    return getattr(importlib.import_module(f"syncline.{_HOME.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
