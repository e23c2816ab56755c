"""`syncline.score`: predictions for all rows of Parquet, Arrow or CSV files.

Here: from a model and a location to a job, and its order. Not here: the job on disk (`job.py`), where it runs
(`engines.py`), the columns (`tables.py`).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
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
from syncline.serving.scoring.engines import scoring_engine
from syncline.serving.scoring.job import InputFile, JobFolder, ScoringJob
from syncline.serving.scoring.piece_scorer import Setup
from syncline.serving.scoring.pieces import ROWS, ScoringPiece
from syncline.serving.scoring.places import place_for
from syncline.serving.scoring.tables import PREDICTION, PROBABILITY, columns_for, outputs_to_run

__all__ = ["Scored", "score"]

Progress = Callable[[int, int], None]
"""Called with the rows that are scored, and all of them."""


@dataclass(frozen=True)
class Scored:
    """A finished scoring job."""

    path: Path | str
    """The folder with the Parquet files; a `str` if it is a URL."""
    rows: int
    scored_rows: int
    """How many of them this call has scored; the others were there."""
    seconds: float
    runtime: str
    """What ran the model: `onnx` or `torch`."""
    reason: str
    """Why that was chosen."""
    engine: str = "local"
    """Where it ran."""


def score(
    model: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    outputs: Sequence[str] = (),
    features: Sequence[str] | None = None,
    engine: str = "local",
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
        out: A folder or a URL; new, or that of the same job. With Ray and Spark, all machines must see it.
        outputs: Outputs or layers to add as columns of lists, such as `probabilities` or `fc1`.
        features: The input columns. Default: those of the training data.
        engine: `local`, `ray`, `ray://HOST:PORT`, `spark`, `spark://HOST:PORT` or `spark-local[N]`.
        workers: The number of processes. Default: one for each core, of this machine or of the cluster.
        runtime: `onnx`, `torch`, or `auto` for the faster one.
        checkpoint: The step of the checkpoint. Default: the newest.
        rows_per_piece: The most rows that are written at once, and repeated after a failure.
        on_progress: Called with the number of rows that are scored, and of all rows.
    """
    if workers is not None and workers < 1:
        raise ConfigError.for_setting("workers", workers, "1 or more")
    if rows_per_piece < 1:
        raise ConfigError.for_setting("rows_per_piece", rows_per_piece, "1 or more")
    start = time.perf_counter()
    with boundary.guarding(), tempfile.TemporaryDirectory(prefix="syncline-scoring-") as scratch:
        place = place_for(out)
        with place.locked():
            source, loaded, metadata = load(model, outputs, checkpoint)
            job = _job(os.fspath(data), metadata, outputs, features, rows_per_piece)
            folder = JobFolder(place)
            left = folder.begin(job)
            to_do = sum(piece.rows for piece in left)
            reason = "nothing was left to score"
            # Where a job that is killed leaves it for the next one, if that is a folder.
            exported = Path(place.shown if place.is_on_this_machine else scratch, "_model.onnx")
            if left:
                with contextlib.closing(scoring_engine(engine, workers)) as runner:
                    loaded, reason = pick_runtime(runtime, source, loaded, metadata, to_do, runner.slots, exported)
                    setup = Setup(
                        job=job, loaded=loaded.with_content() if runner.is_remote else loaded, metadata=metadata,
                        out=place.shown, threads=runner.threads,
                    )  # fmt: skip
                    runner.score_all(setup, left, _counting(job.rows, job.rows - to_do, on_progress))
            folder.finish(job)
            with contextlib.suppress(OSError):
                exported.unlink(missing_ok=True)
    where = Path(place.shown) if place.is_on_this_machine else place.shown
    return Scored(where, job.rows, to_do, time.perf_counter() - start, loaded.runtime, reason, engine)


def load(model: str | Path, outputs: Sequence[str], checkpoint: int | None) -> tuple[Path, Loaded, ModelMetadata]:
    """Where processes find the model, and what it says about itself."""
    path = Path(model)
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
    refuse_taken(file.schema.names, outputs, shown)
    return columns_for(file.schema, metadata, features, shown).features


def refuse_taken(names: Sequence[str], outputs: Sequence[str], shown: str) -> None:
    """`ConfigError` if a table has a column by the name of a new one."""
    taken = [name for name in (PREDICTION, PROBABILITY, *outputs) if name in names]
    if taken:
        raise ConfigError(
            f"{shown} already has a column {taken[0]!r}. Rename or drop it before scoring.",
            code="column-taken", column=taken[0], path=shown,
        )  # fmt: skip


def pick_runtime(
    wanted: Runtime, source: Path, loaded: Loaded, metadata: ModelMetadata, rows: int, processes: int, path: Path
) -> tuple[Loaded, str]:
    """What runs the model, and why; `path`: where to put an exported file."""
    if loaded.runtime == "onnx":
        if wanted == "torch":
            raise ConfigError(f"{source} is an ONNX file, which torch does not run.", code="runtime", path=str(source))
        return loaded, "the model is an ONNX file"
    if wanted == "torch":
        return loaded, "it was asked for"
    if wanted == "onnx":
        return export_to(source, path, loaded), "it was asked for"
    return choose(source, loaded, metadata, rows, processes, path)


def _counting(rows: int, done: int, on_progress: Progress | None) -> Callable[[ScoringPiece], None]:
    def on_done(piece: ScoringPiece) -> None:
        nonlocal done
        done += piece.rows
        if on_progress is not None:
            on_progress(done, rows)

    return on_done
