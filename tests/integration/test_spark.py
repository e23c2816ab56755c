"""The same run in the executors of a real Spark cluster, with kills; and the Estimator on DataFrames."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from py4j.protocol import Py4JJavaError
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import StringIndexer, VectorAssembler
from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, ParamGridBuilder
from pyspark.sql import DataFrame, SparkSession, functions
from real_runs import (
    ACROSS_HOSTS,
    Slow,
    environment,
    final_state,
    parent,
    relative_difference,
    samples,
    small_net,
    stop,
    worker_process,
)
from real_runs import syncline as command
from serving_models import assert_scored, scorable
from spark_cluster import ENVIRONMENT, SETTINGS, Cluster, cluster, wait_until

import syncline
import syncline.spark
from syncline.compute.processes import process_state
from syncline.data.audit import audit_file
from syncline.engines.spark import SparkEngine
from syncline.telemetry.events import Event, Recovered, StrategySwitched, WorkerFailure
from syncline.telemetry.run_dir import RunDir

NOTICED_S = 3.0
STRICT = {"spark.driver.maxResultSize": "1m"}
"""The driver refuses what is not meant for it."""
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("spark"),  # one process, so that the cluster is started once
    pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java"),
]


@pytest.fixture(scope="module")
def spark_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch, cluster(tmp_path_factory.mktemp("spark")) as made:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield made


@pytest.fixture(scope="module")
def session(spark_cluster: Cluster) -> Iterator[SparkSession]:
    """One for all tests of this file, since starting one takes longer than most of them."""
    builder = SparkSession.builder.master(spark_cluster.url)
    for name, value in {**SETTINGS, "spark.local.dir": str(spark_cluster.folder / "driver"), **STRICT}.items():
        builder = builder.config(name, value)
    made = builder.getOrCreate()
    made.sparkContext.parallelize(range(2), 2).map(lambda x: x).collect()  # the executors are there
    # PySpark's answer to Ctrl-C is not the one of other tests in this process.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield made
    gateway = made.sparkContext._gateway
    made.stop()
    _end_java(gateway)


def _end_java(gateway: object) -> None:
    """PySpark keeps its Java process for the next session of this process; here, no more will come."""
    from pyspark import SparkContext

    gateway.shutdown()  # type: ignore[attr-defined]
    java = gateway.proc  # type: ignore[attr-defined]
    java.stdin.close()
    java.wait(20)
    SparkContext._gateway = SparkContext._jvm = None


@pytest.fixture(autouse=True)
def _leaves_nothing_in_the_cluster(spark_cluster: Cluster) -> Iterator[None]:
    yield
    wait_until(lambda: not spark_cluster.left(), "the end of all processes of the run", 10)


def train(tmp_path: Path, **changes: object) -> syncline.Result:
    settings: dict[str, object] = {
        "model": small_net(), "data": samples(), "test": samples(57, seed=2), "loss": "cross_entropy",
        "optimizer": syncline.sgd(lr=0.05, momentum=0.9), "batch": 10, "epochs": 3, "workers": 2, "engine": "spark",
        "out": str(tmp_path / "runs"), "quiet": True,
    }  # fmt: skip
    return syncline.train(**{**settings, **changes})  # type: ignore[arg-type]


def events(run_dir: Path, kind: type[Event]) -> list[Any]:
    return [e for e in RunDir(run_dir).read_events() if isinstance(e, kind)]


def whole_after(run_dir: Path, since: float) -> bool:
    """Whether both workers have continued since that time."""
    return any(len(e.members) == 2 and e.time > since for e in events(run_dir, Recovered))


def steps(run_dir: Path) -> int:
    if not (run_dir / "events.jsonl").exists():
        return 0
    return max((e.step for e in RunDir(run_dir).read_events() if hasattr(e, "step")), default=0)


class InTheBackground:
    """A run whose steps take their time until it may finish."""

    def __init__(self, tmp_path: Path, **changes: object) -> None:
        self._enough, self._done = tmp_path / "enough", list[syncline.Result]()
        self.run_dir = tmp_path / "runs" / "slow"
        model = Slow(small_net(), 0.06, until=self._enough)  # not at its end before Spark has replaced a worker
        self._thread = threading.Thread(
            target=lambda: self._done.append(train(tmp_path, model=model, name="slow", epochs=60, **changes))
        )
        self._thread.start()

    def result(self) -> syncline.Result:
        """Let it continue at full speed, and wait for its end."""
        self._enough.touch()
        self._thread.join(120)
        (result,) = self._done
        return result


# These come before there is a session here, which has all slots of the cluster as long as it runs.


def test_a_cluster_is_chosen_by_its_address(tmp_path, spark_cluster):
    ran = command(
        "train", "linear", "--data", "digits", "--engine", spark_cluster.url, "--workers", "2", "--max-steps", "5",
        "--json", cwd=tmp_path, env={"SPARK_CONF_DIR": str(settings_folder(tmp_path))},
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.events[-1]["steps"] == 5
    assert any("task slots" in e.get("message", "") for e in ran.events)


def test_when_the_driver_is_killed_nothing_is_left_in_the_cluster(tmp_path, spark_cluster):
    arguments = ["train", "linear", "--data", "digits", "--engine", spark_cluster.url, "--epochs", "100000"]
    driver = subprocess.Popen(
        [sys.executable, "-m", "syncline.cli.main", *arguments, "--name", "endless", "--quiet"],
        cwd=tmp_path, env=environment({"SPARK_CONF_DIR": str(settings_folder(tmp_path))}),
    )  # fmt: skip
    with driver:
        wait_until(lambda: steps(tmp_path / "runs" / "endless") > 0, "the first step")
        assert len(spark_cluster.zygotes()) == 2
        driver.kill()
    wait_until(lambda: not spark_cluster.left(), "the end of the workers")
    wait_until(lambda: not spark_cluster.executors(), "the end of the application")


LOCAL = """
import sys
from pathlib import Path
from pyspark.sql import SparkSession
from real_runs import Slow, samples, small_net
import syncline
SparkSession.builder.master("local[2]").getOrCreate()
folder = Path(sys.argv[1])
model = Slow(small_net(), 0.02, until=folder / "enough")
syncline.train(model=model, data=samples(), batch=10, epochs=60, workers=2, engine="spark", checkpoint_every_steps=5,
               out=str(folder / "runs"), name="slow", quiet=True)
"""


def test_when_spark_fails_a_job_the_run_continues_in_another(tmp_path):
    # Spark ends a job of local[2] with the first task that dies, and all other tasks with it.
    path = os.pathsep.join([str(Path(__file__).parent), environment()["PYTHONPATH"]])
    extra = {"SPARK_CONF_DIR": str(settings_folder(tmp_path)), "PYTHONPATH": path}
    run_dir = tmp_path / "runs" / "slow"
    with subprocess.Popen([sys.executable, "-c", LOCAL, str(tmp_path)], env=environment() | extra) as driver:
        wait_until(lambda: steps(run_dir) > 20, "the 20th step")
        os.kill(Cluster("", tmp_path, {driver.pid: -1}).agents()[0], signal.SIGKILL)
        wait_until(lambda: len(events(run_dir, WorkerFailure)) >= 2, "the loss of both workers")
        wait_until(lambda: bool(events(run_dir, Recovered)), "going on")
        (tmp_path / "enough").touch()
        assert driver.wait(90) == 0
    account = audit_file(RunDir(run_dir).ledger)
    assert account.is_clean
    assert account.is_complete


def test_too_few_task_slots_are_reported_with_their_number(session, spark_cluster):
    # Before the tests that kill executors or add some: after those, three agents were once seen in two slots.
    wait_until(lambda: len(spark_cluster.executors()) == 2, "the start of both executors")
    engine = SparkEngine(session=session, limit_s=4)
    with contextlib.closing(engine), pytest.raises(syncline.SynclineError) as caught:
        engine.reserve(3, lambda _: None)
    assert caught.value.facts == {"workers": 3, "nodes": 2}
    tracker = session.sparkContext.statusTracker()
    wait_until(lambda: not tracker.getActiveJobsIds(), "the end of the engine's job")


def test_a_run_on_spark_gives_the_parameters_of_the_same_run_here_and_leaves_the_session_running(tmp_path, session):
    there, here = train(tmp_path / "there"), train(tmp_path / "here", engine="local")
    assert there.steps == here.steps == 33
    assert relative_difference(final_state(here.run_dir)["model"], final_state(there.run_dir)["model"]) < 1e-5
    assert there.metrics["test/accuracy"] == here.metrics["test/accuracy"]
    assert session.range(5).count() == 5


@pytest.mark.usefixtures("session")
def test_executors_on_one_host_hold_a_model_together(tmp_path):
    there, here = train(tmp_path / "there", layout="pipeline(2)"), train(tmp_path / "here", engine="local", workers=1)
    assert relative_difference(final_state(here.run_dir)["model"], final_state(there.run_dir)["model"]) < 1e-5


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize(("strategy", "epochs"), ACROSS_HOSTS.items(), ids=("rivals", "the others"))
def test_presets_that_make_sense_across_hosts_run_on_spark(tmp_path, strategy, epochs):
    result = train(tmp_path, strategy=strategy, epochs=epochs, collective="process-group")  # as between hosts
    assert result.epochs == epochs
    assert len(events(result.run_dir, StrategySwitched)) == strategy.count(", then ")
    account = audit_file(RunDir(result.run_dir).ledger)
    assert account.is_clean
    assert account.is_complete
    assert result.metrics["test/accuracy"] > 0.6


@pytest.mark.usefixtures("session")
def test_h2o_runs_on_spark_with_two_groups_of_workers(tmp_path, spark_cluster):
    with spark_cluster.more_room(2):
        result = train(tmp_path, strategy="h2o", workers=4)
    account = audit_file(RunDir(result.run_dir).ledger)
    assert account.is_clean
    assert account.is_complete
    assert result.metrics["test/accuracy"] > 0.6


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("whom", ["a python worker of Spark", "an executor"])
def test_a_process_killed_in_the_middle_of_an_epoch_costs_no_sample(tmp_path, spark_cluster, whom, record_property):
    run = InTheBackground(tmp_path)
    wait_until(lambda: steps(run.run_dir) > 20, "the 20th step")
    victim = spark_cluster.agents()[0] if "python" in whom else spark_cluster.executors()[0]
    os.kill(victim, signal.SIGKILL)
    lost = wait_until(lambda: bool(events(run.run_dir, WorkerFailure)), "noticing")

    def is_back() -> bool:
        return any(len(e.members) == 2 for e in events(run.run_dir, Recovered))

    back = lost + wait_until(is_back, "the return")
    record_property(f"{whom}: noticed and back after, in seconds", (round(lost, 2), round(back, 2)))
    print(f"{whom}: noticed after {lost:.2f} s, two workers again after {back:.2f} s")
    result = run.result()
    account = audit_file(RunDir(result.run_dir).ledger)
    assert account.is_clean, account
    assert account.is_complete
    assert "was lost with its node agent" in events(result.run_dir, WorkerFailure)[0].cause


@pytest.mark.usefixtures("session")
def test_a_stopped_python_worker_is_noticed_and_replaced_also_if_a_worker_is_killed_at_that_moment(tmp_path):
    run = InTheBackground(tmp_path, checkpoint_every_steps=5)
    try:
        wait_until(lambda: steps(run.run_dir) > 20, "the 20th step")
        first = parent(parent(worker_process(run.run_dir, 1)))
        since = stop(first)
        wait_until(lambda: bool(events(run.run_dir, WorkerFailure)), "noticing")
        (lost,) = events(run.run_dir, WorkerFailure)
        assert (lost.worker_id, "no heartbeat" in lost.cause) == (1, True)
        assert lost.time - since < NOTICED_S
        wait_until(lambda: whole_after(run.run_dir, lost.time), "the return of worker 1")

        second = parent(parent(worker_process(run.run_dir, 1)))
        since = stop(second)
        os.kill(worker_process(run.run_dir, 0), signal.SIGKILL)
        wait_until(lambda: len(events(run.run_dir, WorkerFailure)) == 3, "noticing both")
        both = events(run.run_dir, WorkerFailure)[1:]
        assert sorted(e.worker_id for e in both) == [0, 1]
        assert max(e.time for e in both) - since < NOTICED_S
        wait_until(lambda: whole_after(run.run_dir, both[-1].time), "the return of both workers")
    finally:
        result = run.result()
    account = audit_file(RunDir(result.run_dir).ledger)
    assert account.is_clean, account
    assert account.is_complete
    assert [process_state(agent) in ("", "Z") for agent in (first, second)] == [True, True]


@pytest.mark.usefixtures("session")
def test_another_master_than_that_of_the_session_is_refused():
    with pytest.raises(syncline.ConfigError, match="already has a Spark session"):
        SparkEngine("spark-local[2]")


def settings_folder(folder: Path) -> Path:
    """Spark's settings for a command that makes its own session."""
    (folder / "conf").mkdir()
    (folder / "conf" / "spark-defaults.conf").write_text("".join(f"{k} {v}\n" for k, v in SETTINGS.items()))
    return folder / "conf"


def test_without_pyspark_the_error_says_what_to_install(tmp_path):
    code = "import sys; sys.modules['pyspark'] = None; import syncline.cli.main as m; m.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "train", "linear", "--data", "digits", "--engine", "spark"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, env=environment(),
    )  # fmt: skip
    assert done.returncode != 0
    assert "PySpark is not installed: pip install 'syncline[spark]'" in done.stderr


# The Estimator


def frame_of(session: SparkSession, count: int = 240) -> DataFrame:
    """The small problem as a DataFrame, with what Pipelines usually begin with: columns of numbers and a text label."""
    inputs, targets = samples(count)
    rows = [(i, "abc"[t], *x) for i, (x, t) in enumerate(zip(inputs.tolist(), targets.tolist(), strict=True))]
    return session.createDataFrame(rows, ["id", "kind", *(f"x{k}" for k in range(12))])


def estimator(tmp_path: Path, **changes: object) -> syncline.spark.Estimator:
    settings: dict[str, object] = {
        "model": small_net(), "loss": "cross_entropy", "optimizer": syncline.sgd(lr=0.1, momentum=0.9), "epochs": 8,
        "batch": 20, "workers": 2, "out": str(tmp_path / "runs"), "quiet": True, **changes,
    }  # fmt: skip
    return syncline.spark.Estimator(**settings)


PREDICT = """
import sys
from pyspark.ml import PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.sql import SparkSession
session = SparkSession.builder.master("local[1]").getOrCreate()
predicted = PipelineModel.load(sys.argv[1]).transform(session.read.parquet(sys.argv[2]))
print(predicted.columns)
print("accuracy", MulticlassClassificationEvaluator(metricName="accuracy").evaluate(predicted))
"""


def accuracy() -> MulticlassClassificationEvaluator:
    return MulticlassClassificationEvaluator(metricName="accuracy")


@pytest.fixture(scope="module")
def tuned(session, tmp_path_factory) -> tuple[CrossValidatorModel, Path]:
    """A pipeline with an estimator, tuned by a cross validator, and the folder of its runs."""
    folder = tmp_path_factory.mktemp("tuned")
    assemble = VectorAssembler(inputCols=[f"x{k}" for k in range(12)], outputCol="features")
    learn = estimator(folder, workers=1)  # five fits, one at a time, and starting workers takes most of each
    pipeline = Pipeline(stages=[StringIndexer(inputCol="kind", outputCol="label"), assemble, learn])
    grid = ParamGridBuilder().addGrid(learn.lr, [0.0001, 0.1]).build()
    validator = CrossValidator(
        estimator=pipeline, estimatorParamMaps=grid, evaluator=accuracy(), numFolds=2, seed=1, parallelism=2
    )
    return validator.fit(frame_of(session)), folder


def test_an_estimator_works_in_a_pipeline_and_a_cross_validator(tuned):
    chosen, folder = tuned
    assert chosen.avgMetrics[1] > 0.8 > chosen.avgMetrics[0]
    assert chosen.bestModel.stages[-1].metrics["train/loss"] < 0.3
    assert list((folder / "runs").glob("spilled-*")) == [], "the rows are gone"


def test_a_fitted_pipeline_predicts_in_a_new_process(session, tuned, tmp_path):
    frame, best = frame_of(session), tuned[0].bestModel
    saved, rows = str(tmp_path / "saved"), str(tmp_path / "rows.parquet")
    best.write().save(saved)
    frame.write.parquet(rows)
    here = accuracy().evaluate(best.transform(frame))
    done = subprocess.run(
        [sys.executable, "-c", PREDICT, saved, rows],
        capture_output=True, text=True, timeout=120,
        env=environment({"SPARK_CONF_DIR": str(settings_folder(tmp_path))}),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        str([*frame.columns, "label", "features", "prediction", "probability"]), f"accuracy {here}",
    ]  # fmt: skip


def test_no_row_passes_through_the_driver(session, tmp_path):
    """It takes no result of more than a megabyte, and these rows, made by the executors, have nine."""
    frame = session.range(2000).selectExpr("transform(sequence(1, 600), k -> sin(id * k)) features", "id % 3 label")
    with pytest.raises(Py4JJavaError, match=r"maxResultSize"):
        frame.collect()
    fitted = estimator(tmp_path, model=small_net(600), epochs=1).fit(frame)
    assert fitted.transform(frame).count() == 2000


def test_a_fitted_model_is_that_of_the_same_run_on_arrays_and_the_same_each_time(session, tmp_path):
    inputs, targets = samples(60)
    rows = list(zip(inputs.tolist(), targets.tolist(), strict=True))
    frame = session.createDataFrame(rows, "features array<float>, label long")
    first, second = (estimator(tmp_path, epochs=2).fit(frame).module.state_dict() for _ in range(2))
    assert relative_difference(first, second) < 1e-6, "whatever the order in which Spark delivers rows"
    fitted = estimator(tmp_path, epochs=1, batch=60, workers=1).fit(frame)
    there = train(
        tmp_path, engine="local", workers=1, data=(inputs, targets), test=None, epochs=1, batch=60,
        optimizer=syncline.sgd(lr=0.1, momentum=0.9),
    )  # fmt: skip
    assert relative_difference(there.model.state_dict(), fitted.module.state_dict()) < 1e-5
    out = fitted.transform(frame.withColumn("name", functions.lit("n")))
    assert out.columns == ["features", "label", "name", "prediction", "probability"]
    row = out.first()
    expected = fitted.module(torch.tensor([row["features"]])).softmax(1)[0]
    assert row["probability"].toArray() == pytest.approx(expected.tolist(), abs=1e-6)
    assert row["prediction"] == float(expected.argmax())


def test_an_estimator_is_saved_with_its_params_and_copied_with_others(tmp_path, session):
    made = estimator(tmp_path, strategy="sparknet(tau=5)", lr=0.2)
    made.write().overwrite().save(str(tmp_path / "estimator"))
    loaded = syncline.spark.Estimator.load(str(tmp_path / "estimator"))
    assert loaded.uid == made.uid
    assert {p.name: v for p, v in loaded.extractParamMap().items()} == {
        p.name: v for p, v in made.extractParamMap().items()
    }
    changed = loaded.copy({loaded.lr: 0.5})
    assert (changed.getOrDefault("lr"), loaded.getOrDefault("lr")) == (0.5, 0.2)


def test_user_errors_are_one_message(tmp_path, session):
    frame = frame_of(session, 12)
    with pytest.raises(syncline.DataError, match=r"no column 'features'.*It has: id, kind, x0"):
        estimator(tmp_path).fit(frame)
    with pytest.raises(syncline.ConfigError, match="StringIndexer"):
        estimator(tmp_path, features="x0", label="kind").fit(frame)
    with pytest.raises(syncline.ConfigError, match=r"'worker'.*'workers'"):
        estimator(tmp_path, worker=3)
    with pytest.raises(syncline.DataError, match=r"'x0' holds .* class indices"):
        estimator(tmp_path, features="x1", label="x0").fit(frame)
    assert list((tmp_path / "runs").glob("spilled-*")) == []


def test_files_and_dataframes_are_scored_on_spark_each_row_once(session, tmp_path):
    model, rows = scorable(tmp_path)
    seen: list[int] = []
    done = syncline.score(
        model, rows, tmp_path / "out", engine="spark", on_progress=lambda count, _: seen.append(count)
    )
    assert (done.rows, done.scored_rows, done.runtime, done.engine) == (1200, 1200, "onnx", "spark")
    assert seen == list(range(100, 1201, 100))
    assert_scored(pq.read_table(done.path), 1200)
    (tmp_path / "out" / "part-00001-00003-0000000000.parquet").unlink()
    assert syncline.score(model, rows, tmp_path / "out", engine="spark").scored_rows == 100
    assert_scored(pq.read_table(done.path), 1200)

    frame = syncline.score_frame(model, session.read.parquet(str(rows)), outputs=["y"])
    assert frame.columns == ["id", "a", "b", "prediction", "y"]
    assert_scored(pa.Table.from_pandas(frame.toPandas()), 1200)

    (tmp_path / "bad.csv").write_text("id,a,b\n1,1,2\n2,,3\n")
    with pytest.raises(syncline.DataError, match="line 3"):
        syncline.score(model, tmp_path / "bad.csv", tmp_path / "bad", engine="spark")
