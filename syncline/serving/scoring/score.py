"""`syncline.score`: predictions for all rows of Parquet, Arrow or CSV files.

Here: from a model and a location to a job, and its order. Not here: the job on disk (`job.py`), the processes
(`processes.py`), the columns (`tables.py`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from syncline import boundary
from syncline.data.files.find import format_named, of_one_format
from syncline.data.files.store import Store
from syncline.data.files.table import TableFile, TableFormat
from syncline.errors import ConfigError, UnknownName
from syncline.serving.metadata import ModelMetadata, read_metadata
from syncline.serving.scoring.engine import Loaded, Runtime, choose, export_to
from syncline.serving.scoring.job import InputFile, JobFolder, ScoringJob
from syncline.serving.scoring.piece_scorer import Setup
from syncline.serving.scoring.pieces import ROWS, ScoringPiece
from syncline.serving.scoring.processes import score_all
from syncline.serving.scoring.tables import PREDICTION, PROBABILITY, columns_for, outputs_to_run

__all__ = ["Scored", "score"]

Progress = Callable[[int, int], None]
"""Called with the rows that are scored, and all of them."""


@dataclass(frozen=True)
class Scored:
    """A finished scoring job."""

    path: Path
    """The folder with the Parquet files."""
    rows: int
    scored_rows: int
    """How many of them this call has scored; the others were there."""
    seconds: float
    runtime: str
    """What ran the model: `onnx` or `torch`."""
    reason: str
    """Why that was chosen."""


def score(
    model: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    outputs: Sequence[str] = (),
    features: Sequence[str] | None = None,
    workers: int | None = None,
    runtime: Runtime = "auto",
    checkpoint: int | None = None,
    rows_per_piece: int = ROWS,
    on_progress: Progress | None = None,
) -> Scored:
    """Score all rows of Parquet, Arrow or CSV files, and write them with predictions to a folder of Parquet files.

    The same call continues a job that was killed. Every row is written exactly once.

    Args:
        model: A run directory, an exported ONNX file or bundle, or a model whose weights ship with Syncline.
        data: A file, a folder or a URL.
        out: A folder; new, or that of the same job.
        outputs: Outputs or layers to add as columns of lists, such as `probabilities` or `fc1`.
        features: The input columns. Default: those of the training data.
        workers: The number of processes. Default: one for each core.
        runtime: `onnx`, `torch`, or `auto` for the faster one.
        checkpoint: The step of the checkpoint. Default: the newest.
        rows_per_piece: The most rows that are written at once, and repeated after a failure.
        on_progress: Called with the number of rows that are scored, and of all rows.
    """
    if "://" in os.fspath(out):
        raise ConfigError(f"--out is {out}, but must be a folder on this machine.", code="remote-out", out=str(out))
    if workers is not None and workers < 1:
        raise ConfigError.for_setting("workers", workers, "1 or more")
    if rows_per_piece < 1:
        raise ConfigError.for_setting("rows_per_piece", rows_per_piece, "1 or more")
    start = time.perf_counter()
    folder = JobFolder(Path(out).absolute())
    with boundary.guarding(), folder.locked():
        source, loaded, metadata = _model(Path(model), outputs, checkpoint)
        job = _job(os.fspath(data), metadata, outputs, features, rows_per_piece)
        left = folder.begin(job)
        processes = workers or len(os.sched_getaffinity(0))
        to_do = sum(piece.rows for piece in left)
        loaded, reason = _runtime(runtime, source, loaded, metadata, to_do, processes, folder.path)
        threads = max(1, len(os.sched_getaffinity(0)) // processes)
        setup = Setup(job=job, loaded=loaded, metadata=metadata, out=str(folder.path), threads=threads)
        if left:
            score_all(setup, left, processes, _counting(job.rows, job.rows - to_do, on_progress))
        folder.finish(job)
        with contextlib.suppress(OSError):
            (folder.path / "_model.onnx").unlink(missing_ok=True)
    return Scored(folder.path, job.rows, to_do, time.perf_counter() - start, loaded.runtime, reason)


def _model(path: Path, outputs: Sequence[str], checkpoint: int | None) -> tuple[Path, Loaded, ModelMetadata]:
    """Where processes find the model, and what it says about itself."""
    if path.is_dir() and not (path / "plan.json").exists() and (path / "model.onnx").exists():
        path = path / "model.onnx"  # a bundle
    if path.suffix == ".onnx":
        metadata = read_metadata(path)
        for name in outputs:
            if name not in metadata.output_names:
                more = f"Export the run again with --outputs {','.join([*metadata.output_names, name])}."
                raise UnknownName.among("output", name, metadata.output_names, more=more)
        names = tuple(outputs_to_run(metadata, outputs))
        return path, Loaded(runtime="onnx", path=str(path.absolute()), names=names), metadata
    from syncline.serving.exporting.graph import default_outputs, graph_of, metadata_for
    from syncline.serving.trained import trained_model

    trained = trained_model(path, checkpoint=checkpoint)
    every = list(dict.fromkeys([*default_outputs(trained), *outputs]))
    metadata = metadata_for(trained, every, graph_of(trained, every))
    names = tuple(outputs_to_run(metadata, outputs))
    where = str(path.absolute()) if path.is_dir() else str(path)
    # The checkpoint that was just read: a live run may write another one in the meantime.
    step = int(trained.version) if path.is_dir() else None
    return path, Loaded(runtime="torch", path=where, names=names, checkpoint=step), metadata


def _job(
    data: str, metadata: ModelMetadata, outputs: Sequence[str], features: Sequence[str] | None, rows_per_piece: int
) -> ScoringJob:
    store = Store(data)
    name, paths = of_one_format(store, None)
    table_format = format_named(name)
    if not isinstance(table_format, TableFormat):
        raise ConfigError(
            f"{data} holds {name}, but tables can be scored: Parquet, Arrow or CSV. For image files: "
            "syncline predict RUN IMAGE...",
            code="not-a-table", format=name,
        )  # fmt: skip
    files, columns = [], None
    for path in paths:
        with contextlib.closing(table_format.open(store, path)) as file:
            columns = _checked(file, metadata, outputs, features, store.shown(path))
            size = store.size(path)
            files.append(InputFile(path=path, size_bytes=size, group_rows=file.group_rows))
    return ScoringJob(
        model_sha256=metadata.sha256, precision=metadata.precision, location=store.location, format=name,
        features=columns or (), outputs=tuple(outputs), rows_per_piece=rows_per_piece, files=tuple(files),
    )  # fmt: skip


def _checked(
    file: TableFile, metadata: ModelMetadata, outputs: Sequence[str], features: Sequence[str] | None, shown: str
) -> tuple[str, ...]:
    taken = [name for name in (PREDICTION, PROBABILITY, *outputs) if name in file.schema.names]
    if taken:
        raise ConfigError(
            f"{shown} already has a column {taken[0]!r}. Rename or drop it before scoring.",
            code="column-taken", column=taken[0], path=shown,
        )  # fmt: skip
    return columns_for(file.schema, metadata, features, shown).features


def _runtime(
    wanted: Runtime, source: Path, loaded: Loaded, metadata: ModelMetadata, rows: int, processes: int, folder: Path
) -> tuple[Loaded, str]:
    if loaded.runtime == "onnx":
        if wanted == "torch":
            raise ConfigError(f"{source} is an ONNX file, which torch does not run.", code="runtime", path=str(source))
        return loaded, "the model is an ONNX file"
    if wanted == "torch" or not rows:
        return loaded, "it was asked for" if rows else "nothing was left to score"
    if wanted == "onnx":
        return export_to(source, folder / "_model.onnx", loaded), "it was asked for"
    return choose(source, loaded, metadata, rows, processes, folder)


def _counting(rows: int, done: int, on_progress: Progress | None) -> Callable[[ScoringPiece], None]:
    def on_done(piece: ScoringPiece) -> None:
        nonlocal done
        done += piece.rows
        if on_progress is not None:
            on_progress(done, rows)

    return on_done
