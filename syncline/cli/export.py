"""`syncline export RUN`: what the command takes and prints. Not here: the work (`serving/exporting/`)."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from syncline.serving.exporting.onnx_file import ExportedModel
    from syncline.task import Task


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run directory, or model with built-in weights (lenet).")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Output file or folder. Default: model.onnx, or as the format needs."),
    ] = None,
    format: Annotated[
        Literal["onnx", "torch", "bundle", "safetensors"] | None,
        typer.Option(help="File format. Default: by the suffix of --out, else onnx."),
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Quantize to 8 bits, calibrated on training samples.")] = False,
    max_drop: Annotated[
        float, typer.Option(metavar="POINTS", help="Refuse an int8 model that loses more accuracy than this.")
    ] = 0.5,
    outputs: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Outputs or layers, such as fc1,logits. See: syncline show RUN"),
    ] = None,
    checkpoint: Annotated[int | None, typer.Option(metavar="STEP", help="Checkpoint. Default: the newest.")] = None,
    task: Annotated[
        str | None, typer.Option(metavar="TASK", help="Model and data of a script's run: my_task.py:task.")
    ] = None,
    license: Annotated[str | None, typer.Option(help="License, for the model card.")] = None,
    samples: Annotated[int, typer.Option(metavar="N", help="Most test samples for the proof.")] = 10_000,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Export the model of a run, and prove the file equal on the run's test data.

    A model card is written beside it. A bundle is a folder or zip file that
    scores with NumPy and onnxruntime alone.

    syncline export runs/lenet-mnist-20260101-120000
    syncline export RUN --int8 --out small.onnx
    syncline export RUN --format bundle --out digits.zip
    """
    from syncline.serving.exporting.export import export as export_model

    done = export_model(
        run, _place_of(out, format), format=format, int8=int8, max_drop=max_drop, outputs=outputs,
        checkpoint=checkpoint, task=_task_of(task), license=license, samples=samples,
    )  # fmt: skip
    typer.echo(_as_json(done) if json else _as_text(done))


def _place_of(out: Path | None, format: str | None) -> Path | None:
    """A folder that exists gets the file; a bundle is a folder itself."""
    from syncline.serving.exporting.export import DEFAULT_PATHS

    if out is not None and out.is_dir() and format != "bundle":
        return out / DEFAULT_PATHS[format or "onnx"]
    return out


def _task_of(what: str | None) -> Task | None:
    if what is None:
        return None
    from syncline.cli.tasks import find_task

    return find_task(what, {}, {}).task


def _as_text(done: ExportedModel) -> str:
    from syncline.serving.exporting.card import proof_rows

    rows = proof_rows(done.proof)
    if done.int8 is not None:
        small, large = done.int8["int8_bytes"], done.int8["float32_bytes"]
        rows.append(("size", f"{small:,.0f} bytes, {large / small:.1f} times smaller than float32"))
        fast, slow = done.int8["int8_ms"], done.int8["float32_ms"]
        rows.append(("one answer", f"{fast:.3g} ms, {slow / fast:.2g} times as fast as float32"))
    widest = max(len(name) for name, _ in rows)
    metadata = done.metadata
    head = (
        f"{metadata.name}, version {metadata.version}, {metadata.precision}: outputs {', '.join(metadata.output_names)}"
    )
    lines = [f"Wrote {done.path} ({done.size_bytes:,} bytes) in {done.seconds:.1f} s.", head]
    return "\n".join([*lines, *(f"  {name:<{widest}}  {value}" for name, value in rows)])


def _as_json(done: ExportedModel) -> str:
    import msgspec

    return json_format.dumps({
        "path": str(done.path), "size_bytes": done.size_bytes, "seconds": done.seconds, "int8": done.int8,
        "metadata": msgspec.to_builtins(done.metadata), "proof": msgspec.to_builtins(done.proof),
    })  # fmt: skip
