"""Training on a Spark DataFrame: an Estimator and a Model for pyspark.ml.

`Estimator` and `Model` are loaded on first use, and PySpark with them: worker processes read what was spilled for them
(`spilled.py`) without it. Not here: running workers in executors, which is `engines/spark.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from syncline.spark.estimator import Estimator
    from syncline.spark.model import Model

__all__ = ["Estimator", "Model"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'syncline.spark' has no attribute {name!r}")
    from syncline.engines.spark import needs_pyspark

    needs_pyspark()
    from syncline.spark import estimator, model

    return {"Estimator": estimator.Estimator, "Model": model.Model}[name]


def __dir__() -> list[str]:
    return list(__all__)
