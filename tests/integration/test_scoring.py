"""Scoring files of rows, with processes that are killed in between: every row exactly once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

import syncline
from syncline.cli.main import app
from syncline.errors import ConfigError, DataError, SynclineError, UnknownName

pytestmark = pytest.mark.xdist_group("scoring")  # one process, so that the tests share a run

ROWS, GROUP = 20_000, 400
LIMIT_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a table, its exported model, and rows to score in two files."""
    folder = tmp_path_factory.mktemp("scoring")
    generator = np.random.default_rng(0)
    for name, count in (("train", 200), ("rows/a", ROWS // 2), ("rows/b", ROWS // 2)):
        (folder / name).parent.mkdir(exist_ok=True)
        x = generator.normal(size=(3, count)).astype(np.float32)
        first = ROWS // 2 if name.endswith("b") else 0
        table = pa.table({
            "id": np.arange(first, first + count), "x0": x[0], "x1": x[1], "x2": x[2],
            "label": np.where(x[0] > 0, "yes", "no"),
        })  # fmt: skip
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=GROUP)
    data = f"{folder / 'train.parquet'}(features=['x2', 'x1', 'x0'], label='label', test_share=0.2)"
    syncline.train(model="mlp", data=data, workers=1, epochs=2, out=str(folder), name="run", quiet=True)
    syncline.export(folder / "run", folder / "m.onnx")
    return folder


def scored(path: Path) -> pa.Table:
    """The rows of a finished job, each exactly once."""
    table = pq.read_table(path)
    assert np.array_equal(np.sort(table["id"].to_numpy()), np.arange(ROWS))
    assert (path / "_SUCCESS").exists()
    return table


def expected(folder: Path, table: pa.Table) -> np.ndarray:
    inputs = np.stack([table[name].to_numpy() for name in ("x2", "x1", "x0")], 1)
    with torch.inference_mode():
        trained = syncline.resume(folder / "run", quiet=True).model
        return trained(torch.from_numpy(inputs)).softmax(1).numpy()


def test_rows_keep_their_columns_and_get_the_models_predictions(folder: Path, tmp_path: Path) -> None:
    done = syncline.score(folder / "m.onnx", folder / "rows", tmp_path / "out", outputs=["logits"], workers=2)
    assert (done.rows, done.scored_rows, done.runtime) == (ROWS, ROWS, "onnx")
    table = scored(done.path)
    probabilities = expected(folder, table)
    assert table.column_names == ["id", "x0", "x1", "x2", "label", "prediction", "probability", "logits"]
    assert table["prediction"].to_pylist() == np.array(["no", "yes"])[probabilities.argmax(1)].tolist()
    np.testing.assert_allclose(table["probability"].to_numpy(), probabilities.max(1), atol=1e-5)
    assert table["id"].to_numpy().tolist() == list(range(ROWS))  # in the order of the input


def test_a_job_that_is_killed_continues_and_scores_every_row_once(folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys, syncline\n"
        "syncline.score(*sys.argv[1:4], workers=2, on_progress=lambda done, rows: print(done, flush=True))"
    )
    arguments = [str(folder / "m.onnx"), str(folder / "rows"), str(tmp_path / "out")]
    job = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE)
    assert job.stdout is not None
    for _ in range(3):
        assert job.stdout.readline()
    job.send_signal(signal.SIGKILL)
    job.wait(LIMIT_S)
    job.stdout.close()
    there = len(list((tmp_path / "out").glob("part-*")))
    assert 3 <= there < ROWS // GROUP
    told = CliRunner().invoke(
        app, ["predict", arguments[0], "--data", arguments[1], "--out", arguments[2], "--workers", "1", "--json"]
    )
    assert told.exit_code == 0, told.output
    done = json.loads(told.output)
    assert 0 < done["scored_rows"] < done["rows"] == ROWS
    scored(tmp_path / "out")
    assert not list((tmp_path / "out").glob(".*"))


def test_a_process_that_is_killed_is_replaced(folder: Path, tmp_path: Path) -> None:
    killed: list[int] = []

    def kill_one(done: int, rows: int) -> None:
        if not killed:
            killed.append(scoring_processes()[0])
            os.kill(killed[0], signal.SIGKILL)

    syncline.score(folder / "m.onnx", folder / "rows", tmp_path / "out", workers=2, on_progress=kill_one)
    assert killed
    scored(tmp_path / "out")


def scoring_processes() -> list[int]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in children if b"scoring.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_piece_that_kills_every_process_ends_the_job(folder: Path, tmp_path: Path) -> None:
    from syncline.serving.scoring import processes

    class Dies(processes._ScoringPool):
        def _give(self, member: processes._ScoringProcess) -> None:
            super()._give(member)
            member.process.kill()

    pieces = [processes.ScoringPiece(0, 0, 0, GROUP)]
    pool = Dies(setup_of(folder, tmp_path), pieces)
    with pytest.raises(SynclineError) as refused:
        processes.run_to_the_end(pool, lambda piece: None)
    assert refused.value.code == "scoring-process-died"
    assert refused.value.facts["exit_code"] == -signal.SIGKILL


def setup_of(folder: Path, out: Path):
    from syncline.serving.scoring import score
    from syncline.serving.scoring.piece_scorer import Setup

    _, loaded, facts = score.load(folder / "m.onnx", (), None)
    job = score._job(str(folder / "rows"), facts, (), None, GROUP)
    return Setup(job=job, loaded=loaded, metadata=facts, out=str(out), threads=1)


def test_torch_and_onnxruntime_give_the_same_predictions(folder: Path, tmp_path: Path) -> None:
    one = folder / "rows" / "a.parquet"
    results = {
        runtime: syncline.score(folder / "run", one, tmp_path / runtime, workers=1, runtime=runtime)
        for runtime in ("torch", "onnx")
    }
    assert [done.runtime for done in results.values()] == ["torch", "onnx"]
    torchs, onnxs = (pq.read_table(done.path) for done in results.values())
    assert torchs["prediction"].equals(onnxs["prediction"])
    np.testing.assert_allclose(torchs["probability"].to_numpy(), onnxs["probability"].to_numpy(), atol=1e-6)
    assert not (tmp_path / "onnx" / "_model.onnx").exists()


def test_csv_files_are_scored_in_pieces(folder: Path, tmp_path: Path) -> None:
    table = pq.read_table(folder / "train.parquet")
    pyarrow.csv.write_csv(table, tmp_path / "rows.csv")
    done = syncline.score(folder / "m.onnx", tmp_path / "rows.csv", tmp_path / "out", workers=1, rows_per_piece=64)
    assert len(list(done.path.glob("part-*"))) == 4
    assert pq.read_table(done.path)["id"].to_pylist() == table["id"].to_pylist()


def test_a_bad_value_is_reported_with_its_place(folder: Path, tmp_path: Path) -> None:
    text = "id,x0,x1,x2\n1,1,2,3\n2,1,,3\n"
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(DataError, match="line 3"):
        syncline.score(folder / "m.onnx", tmp_path / "rows.csv", tmp_path / "out", workers=1)
    assert not list((tmp_path / "out").glob("part-*"))


def test_another_job_is_refused_in_the_same_folder(folder: Path, tmp_path: Path) -> None:
    one = folder / "rows" / "a.parquet"
    syncline.score(folder / "m.onnx", one, tmp_path / "out", workers=1)
    again = syncline.score(folder / "m.onnx", one, tmp_path / "out", workers=1)
    assert again.scored_rows == 0
    with pytest.raises(ConfigError) as other:
        syncline.score(folder / "m.onnx", folder / "rows", tmp_path / "out")
    assert (other.value.code, "files" in other.value.facts["changed"]) == ("other-scoring", True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("")
    for out, data, code in [
        (tmp_path / "mine", one, "scoring-place"),
        (tmp_path / "new", tmp_path / "out", "column-taken"),
    ]:
        with pytest.raises(ConfigError) as refused:
            syncline.score(folder / "m.onnx", data, out)
        assert refused.value.code == code
    with pytest.raises(UnknownName):
        syncline.score(folder / "m.onnx", one, tmp_path / "new", outputs=["fc1"])


def test_two_processes_never_score_into_the_same_folder(folder: Path, tmp_path: Path) -> None:
    from syncline.serving.scoring.places import place_for

    with place_for(tmp_path / "out").locked(), pytest.raises(ConfigError) as refused:
        syncline.score(folder / "m.onnx", folder / "rows", tmp_path / "out")
    assert refused.value.code == "scoring-in-use"


@pytest.mark.parametrize("kind", ["pandas", "arrow"])
def test_a_table_in_memory_gets_the_models_predictions(folder: Path, kind: str) -> None:
    table = pq.read_table(folder / "rows" / "a.parquet").slice(0, 500)
    if kind == "pandas":
        given = table.to_pandas().iloc[::-1]
        frame = syncline.score_frame(folder / "m.onnx", given)
        assert frame.index.tolist() == given.index.tolist()
        assert "prediction" not in given
        found = pa.Table.from_pandas(frame, preserve_index=False)
    else:
        found = syncline.score_frame(folder / "run", table, outputs=["logits"])
        assert found["logits"].type.value_type == pa.float32()
        assert syncline.score_frame(folder / "m.onnx", table.slice(0, 0))["prediction"].type == pa.string()
    probabilities = expected(folder, found)
    assert found["prediction"].to_pylist() == np.array(["no", "yes"])[probabilities.argmax(1)].tolist()
    np.testing.assert_allclose(found["probability"].to_numpy(), probabilities.max(1), atol=1e-5)
    with pytest.raises(ConfigError) as taken:
        syncline.score_frame(folder / "m.onnx", found)
    assert taken.value.code == "column-taken"
    with pytest.raises(ConfigError) as refused:
        syncline.score_frame(folder / "m.onnx", [1, 2])
    assert refused.value.code == "not-a-frame"


def test_an_unknown_engine_is_refused_before_anything_is_scored(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownName):
        syncline.score(folder / "m.onnx", folder / "rows", tmp_path / "out", engine="slurm")
    assert not list((tmp_path / "out").glob("part-*"))
