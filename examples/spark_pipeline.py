"""A Spark ML pipeline with a torch model, trained on a Parquet file of handwritten digits.

python examples/spark_pipeline.py                                        (local Spark)
spark-submit --master spark://HOST:7077 examples/spark_pipeline.py       (cluster; see docs/spark.md)
"""

import os
import sys
import tempfile

from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits
from torch import nn

import syncline
import syncline.spark


def make_parquet(session: SparkSession, path: str) -> None:
    """Stands in for your data lake: 64 numeric columns, and one with the digit."""
    images, labels = load_digits(return_X_y=True)
    columns = [f"pixel{k}" for k in range(64)]
    rows = [(*map(float, image / 16), int(label)) for image, label in zip(images, labels, strict=True)]
    session.createDataFrame(rows, [*columns, "digit"]).write.parquet(path)


def main() -> None:
    # Otherwise Spark starts the first python3 on the PATH, which may lack torch and Syncline.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    session = SparkSession.builder.appName("digits").getOrCreate()
    with tempfile.TemporaryDirectory() as folder:
        make_parquet(session, f"{folder}/digits.parquet")
        train, test = session.read.parquet(f"{folder}/digits.parquet").randomSplit([0.8, 0.2], seed=1)

        net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        estimator = syncline.spark.Estimator(
            model=net, loss="cross_entropy", optimizer=syncline.sgd(lr=0.1, momentum=0.9), label="digit",
            workers=2, epochs=20, batch=64, out=f"{folder}/runs",
        )  # fmt: skip
        pixels = [name for name in train.columns if name.startswith("pixel")]
        assemble = VectorAssembler(inputCols=pixels, outputCol="features")
        fitted = Pipeline(stages=[assemble, estimator]).fit(train)

        fitted.write().overwrite().save(f"{folder}/model")
        predicted = PipelineModel.load(f"{folder}/model").transform(test)
        evaluator = MulticlassClassificationEvaluator(labelCol="digit", metricName="accuracy")
        print(f"accuracy on new digits: {evaluator.evaluate(predicted):.3f}")
    session.stop()


if __name__ == "__main__":
    main()
