"""A Spark ML pipeline with a torch model in it, on a parquet file of handwritten digits that it makes itself.

python examples/spark_pipeline.py                                        (a Spark of its own)
spark-submit --master spark://HOST:7077 examples/spark_pipeline.py       (a cluster; see docs/spark.md)
"""

import os
import sys
import tempfile

from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import SparkSession
from torch import nn

import syncline
import syncline.spark
from syncline.data.named import named


def make_parquet(session: SparkSession, path: str) -> None:
    """Stands for what is in your data lake: 64 columns of numbers, and one that says which digit it is."""
    digits = named("digits")
    images, labels = digits.load(digits.locate(None, None), "train")
    columns = [f"pixel{k}" for k in range(64)]
    rows = [(*map(float, image.ravel()), int(label)) for image, label in zip(images, labels, strict=True)]
    session.createDataFrame(rows, [*columns, "digit"]).write.parquet(path)


def main() -> None:
    # Otherwise Spark takes whichever python3 comes first on the PATH, and that one may have neither torch nor this.
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
        judge = MulticlassClassificationEvaluator(labelCol="digit", metricName="accuracy")
        print(f"accuracy on new digits: {judge.evaluate(predicted):.3f}")
    session.stop()


if __name__ == "__main__":
    main()
