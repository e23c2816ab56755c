"""Test accuracy on MNIST of LeNet in a Spark ML pipeline, trained on a DataFrame read from parquet.

python benchmarks/spark_mnist.py          (starts a local Spark with two slots; takes some minutes)

A CrossValidator chooses between two learning rates. The best pipeline is saved, and loaded by a new process with its
own session, which prints its test accuracy. The driver accepts no result of more than a megabyte, a hundredth of the
rows: if they passed through it, the fit would fail. The script first checks that such a result does fail.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
from py4j.protocol import Py4JJavaError
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import DataFrame, SparkSession

import syncline
import syncline.spark
from syncline.data.named import named
from syncline.models.zoo import lenet


def make_parquet(folder: Path) -> None:
    """One file each for training and test: the pixels as bytes, and the digit."""
    mnist = named("mnist")
    for part in ("train", "test"):
        images, labels = mnist.load(mnist.locate(None, None), part)
        columns = {"image": [image.tobytes() for image in images], "digit": labels}
        pa.parquet.write_table(pa.table(columns), folder / f"{part}.parquet", row_group_size=5000)


def session_of_two() -> SparkSession:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {"spark.driver.maxResultSize": "1m", "spark.ui.enabled": "false", "spark.driver.memory": "2g"}
    builder = SparkSession.builder.master("local[2]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    return session


def evaluator() -> MulticlassClassificationEvaluator:
    return MulticlassClassificationEvaluator(labelCol="digit", metricName="accuracy")


def rejects_rows(train: DataFrame) -> bool:
    try:
        train.collect()
    except Py4JJavaError as error:
        return "maxResultSize" in str(error)
    return False


def fit(folder: Path) -> None:
    session = session_of_two()
    train = session.read.parquet(str(folder / "train.parquet"))
    print("the driver rejects the rows:", rejects_rows(train))
    learn = syncline.spark.Estimator(
        model=lenet.build((1, 28, 28), 10), loss="cross_entropy", optimizer=syncline.sgd(lr=0.01, momentum=0.9),
        features="image", label="digit", shape=(1, 28, 28), workers=2, epochs=3, batch=64, out=str(folder / "runs"),
        quiet=True,
    )  # fmt: skip
    grid = ParamGridBuilder().addGrid(learn.lr, [0.002, 0.01]).build()
    pipeline = Pipeline(stages=[learn])
    validator = CrossValidator(estimator=pipeline, estimatorParamMaps=grid, evaluator=evaluator(), numFolds=2, seed=1)
    began = time.monotonic()
    chosen = validator.fit(train)
    print(f"five fits of three epochs each in {time.monotonic() - began:.0f} s")
    for setting, accuracy in zip(grid, chosen.avgMetrics, strict=True):
        print(f"lr {next(iter(setting.values()))}: {accuracy:.2%} in the held-out folds")
    chosen.bestModel.write().save(str(folder / "model"))
    session.stop()


def predict(folder: Path) -> None:
    session = session_of_two()
    predicted = PipelineModel.load(str(folder / "model")).transform(session.read.parquet(str(folder / "test.parquet")))
    print(f"in a new session: {evaluator().evaluate(predicted):.2%} test accuracy")
    session.stop()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        predict(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            make_parquet(Path(made))
            fit(Path(made))
            subprocess.run([sys.executable, __file__, made], check=True)
