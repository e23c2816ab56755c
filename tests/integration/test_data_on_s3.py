"""Shards on an S3 server: a run that is killed in the middle of an epoch and resumed uses every row once."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer
from real_runs import environment, final_state
from real_runs import syncline as command
from serving_models import assert_scored, scorable

pytestmark = pytest.mark.xdist_group("s3")  # one process, because these tests share a fixture

SHARDS, ROWS_PER_SHARD, ROWS_PER_GROUP = 20, 30, 8
ROWS = SHARDS * ROWS_PER_SHARD
BATCH = 30  # divides the rows, so that each use of a row changes its count by exactly one

TASK = f"""
import os, pathlib, signal, threading
import torch, syncline

class CountsRows(torch.nn.Module):
    '''The weight of a row is how often the state of the run has used it. Worker 0 kills the driver once, at step 10.'''

    def __init__(self):
        super().__init__()
        self.uses, self.calls = torch.nn.Parameter(torch.zeros({ROWS})), 0

    def forward(self, x):
        self.calls += 1
        threading.Event().wait(0.01)
        if self.calls == 10 and os.readlink("/proc/self/fd/1").endswith("worker-0.log"):
            flag = pathlib.Path("killed")
            if not flag.exists():
                flag.touch()
                stat = pathlib.Path("/proc", str(os.getppid()), "stat").read_text()
                os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
        return self.uses[x[:, 0].long()]

task = syncline.Task(
    model=CountsRows(), data={{"name": "s3://rows/train", "shuffle": os.environ["SHUFFLE"], "window": 3}},
    loss=lambda output, target: -output.mean(), optimizer=syncline.sgd(lr={BATCH}), metrics=[],
)
"""


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """A server on loopback with the shards on it; what must be in the environment to reach it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "NO_PROXY": "127.0.0.1",
    }
    client = boto3.client(
        "s3",
        endpoint_url=variables["AWS_ENDPOINT_URL"],
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket="rows")
    for shard in range(SHARDS):
        rows = range(shard * ROWS_PER_SHARD, (shard + 1) * ROWS_PER_SHARD)
        file = io.BytesIO()
        pq.write_table(
            pa.table({"row": list(rows), "label": [r % 3 for r in rows]}), file, row_group_size=ROWS_PER_GROUP
        )
        client.put_object(Bucket="rows", Key=f"train/part-{shard:03}.parquet", Body=file.getvalue())
    yield variables
    client.close()
    server.stop()


@pytest.mark.parametrize("shuffle", ["global", "groups"])
def test_every_row_is_used_once_though_the_run_was_killed_in_the_middle_of_an_epoch(
    tmp_path: Path, s3: dict[str, str], shuffle: str
):
    (tmp_path / "task.py").write_text(TASK)
    variables = {**s3, "SHUFFLE": shuffle}
    process = subprocess.Popen(
        [
            sys.executable, "-m", "syncline.cli.main", "train", "task.py:task", "--workers", "3", "--batch", str(BATCH),
            "--epochs", "2", "--name", "killed-run",
        ],
        cwd=tmp_path, env=environment(variables), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    _, said = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, said.decode()

    resumed = command("resume", "runs/killed-run", cwd=tmp_path, env=variables)

    assert resumed.code == 0, resumed.err
    state = final_state(tmp_path / "runs" / "killed-run")
    assert state["position"]["step"] == 2 * ROWS // BATCH
    assert state["model"]["uses"].round(decimals=4).tolist() == [2.0] * ROWS, "each row once in each of two epochs"
    audit = command("audit", "runs/killed-run", cwd=tmp_path)
    assert audit.code == 0, audit.out
    clean = f"{ROWS} of {ROWS} samples committed once; 0 lost, 0 repeated"
    assert [line.partition(": ")[2] for line in audit.out.splitlines() if line.startswith("epoch")] == [clean, clean]


def test_a_bucket_that_is_not_there_is_reported(tmp_path: Path, s3: dict[str, str]):
    ran = command("train", "mlp", "--data", "s3://nowhere/train", cwd=tmp_path, env=s3)
    assert ran.code != 0
    assert "s3://nowhere/train" in ran.err
    assert "AWS_" in ran.err
    assert "Traceback" not in ran.err


def test_scores_are_written_to_a_url_and_a_job_continues_there(tmp_path: Path, s3: dict[str, str]):
    model, rows = scorable(tmp_path)
    uploaded = command(
        "predict", str(model), "--data", str(rows), "--out", "s3://rows/scores", "--json", cwd=tmp_path, env=s3
    )
    assert uploaded.code == 0, uploaded.err
    assert json.loads(uploaded.out)["path"] == "s3://rows/scores"
    client = boto3.client("s3", endpoint_url=s3["AWS_ENDPOINT_URL"], aws_access_key_id="testing",
                          aws_secret_access_key="testing", region_name="us-east-1")  # fmt: skip
    client.delete_object(Bucket="rows", Key="scores/part-00001-00003-0000000000.parquet")
    again = command(
        "predict", str(model), "--data", str(rows), "--out", "s3://rows/scores", "--json", cwd=tmp_path, env=s3
    )
    assert json.loads(again.out)["scored_rows"] == 100
    found = client.list_objects_v2(Bucket="rows", Prefix="scores/part-")["Contents"]
    parts = [client.get_object(Bucket="rows", Key=one["Key"])["Body"].read() for one in found]
    assert_scored(pa.concat_tables([pq.read_table(io.BytesIO(part)) for part in parts]), 1200)
    client.close()
    other = command(
        "predict", str(model), "--data", str(rows / "0.parquet"), "--out", "s3://rows/scores", cwd=tmp_path, env=s3
    )
    assert other.code != 0
    assert "another job" in other.err
