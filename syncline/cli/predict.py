"""`syncline predict`: what the command takes and prints. Not here: the work (`prediction.py`, `serving/scoring/`)."""

from __future__ import annotations

import json as json_format
import sys
import time
from pathlib import Path
from typing import Annotated, Literal, TextIO

import typer

from syncline.errors import ConfigError

_FILES = "Files of rows"


def predict(
    what: Annotated[
        str,
        typer.Argument(metavar="WHAT", help="Run directory, exported model, or model with built-in weights (lenet)."),
    ],
    images: Annotated[
        list[Path] | None, typer.Argument(metavar="[IMAGE]...", help="Image files, or folders of images.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Also these outputs or layers, such as fc1. See: syncline show RUN"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per line, with all probabilities.")] = False,
    data: Annotated[
        str | None,
        typer.Option(metavar="FILES", help="Parquet, Arrow or CSV: a file, folder or URL.", rich_help_panel=_FILES),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Where to write the scored rows: a folder or URL.", rich_help_panel=_FILES),
    ] = None,
    features: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Input columns. Default: those of the training data.", rich_help_panel=_FILES
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="Where to score: local, ray, ray://HOST:PORT, spark, ...", rich_help_panel=_FILES)
    ] = "local",
    workers: Annotated[
        int | None, typer.Option(help="Number of processes. Default: one per core.", rich_help_panel=_FILES)
    ] = None,
    runtime: Annotated[
        Literal["auto", "onnx", "torch"], typer.Option(help="What runs the model.", rich_help_panel=_FILES)
    ] = "auto",
) -> None:
    """Classify images, or score files of rows, with a trained model.

    Images may have any size and color mode. Rows are written with their
    predictions to a folder of Parquet files. If the command is killed, the same
    command continues: every row is scored exactly once.

    syncline predict lenet seven.png
    syncline predict runs/lenet-mnist-20260101-120000 scans/ more/eight.jpg
    syncline predict RUN --data rows.parquet --out scores
    """
    names = _names(output)
    if images and data is None and out is None:
        _classify_images(what, images, names, json=json)
    elif images or data is None or out is None:
        raise _refusal(wants_files=data is not None or out is not None)
    else:
        _score_files(what, data, out, names, _names(features), engine, workers, runtime, json=json)


def _refusal(*, wants_files: bool) -> ConfigError:
    if wants_files:
        text = (
            "Scoring files needs --data and --out, and no images: syncline predict RUN --data rows.parquet --out scores"
        )
    else:
        text = "There is nothing to predict. Pass images, or files of rows with --data and --out."
    return ConfigError(text, code="predict-what")


def _classify_images(what: str, images: list[Path], outputs: list[str], *, json: bool) -> None:
    from syncline.prediction import predict as predict_images

    found = predict_images(what, images, outputs=outputs)
    widest = max(len(str(one.image)) for one in found)
    for one in found:
        values = {name: value.tolist() for name, value in one.outputs.items()}
        if json:
            prediction = {"image": str(one.image), "class": one.label, "probability": one.probability,
                    "probabilities": one.probabilities, **({"outputs": values} if values else {})}  # fmt: skip
            typer.echo(json_format.dumps(prediction))
        else:
            typer.echo(f"{one.image!s:<{widest}}  {one.label}  {one.probability:.1%}")
            for name, value in one.outputs.items():
                typer.echo(f"  {name} {tuple(value.shape)}: {' '.join(f'{x:.4g}' for x in value.flat)}")


def _score_files(
    what: str,
    data: str,
    out: str,
    outputs: list[str],
    features: list[str],
    engine: str,
    workers: int | None,
    runtime: Literal["auto", "onnx", "torch"],
    *,
    json: bool,
) -> None:
    from syncline.serving.scoring.score import score

    progress = None if json else _RowProgress(sys.stderr)
    done = score(
        what, data, out, outputs=outputs, features=features or None, engine=engine, workers=workers,
        runtime=runtime, on_progress=progress,
    )  # fmt: skip
    if json:
        typer.echo(json_format.dumps({**vars(done), "path": str(done.path)}))
        return
    speed = f"{done.scored_rows / done.seconds:,.0f} rows/s"
    there = f" ({done.rows - done.scored_rows:,} were there)" if done.scored_rows < done.rows else ""
    typer.echo(
        f"Scored {done.scored_rows:,} of {done.rows:,} rows{there} in {done.seconds:.1f} s, {speed}: {done.path}"
    )
    where = "" if engine == "local" else f" on {engine}"
    typer.echo(f"  ran with {done.runtime}{where}: {done.reason}")


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()] if text else []


class _RowProgress:
    """On a terminal a line that is redrawn; elsewhere a line every few seconds."""

    _EVERY_S = 10.0

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._is_terminal = stream, stream.isatty()
        self._said = time.monotonic()

    def __call__(self, done: int, rows: int) -> None:
        now = time.monotonic()
        if not self._is_terminal and now - self._said < self._EVERY_S:
            return
        self._said = now
        text = f"{done:,} of {rows:,} rows ({done / rows:.0%})"
        end = "" if self._is_terminal and done < rows else "\n"
        self._stream.write(f"\r\033[K{text}{end}" if self._is_terminal else f"{text}\n")
        self._stream.flush()
