"""`syncline.export`: from a run to a file, in any of the formats, with a proof and a model card.

Here: the order of things. Everything is written to a temporary folder first; what fails leaves nothing at its place.
Not here: the formats (one file each), and the proof (`proof.py`).
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from syncline import boundary
from syncline.errors import ConfigError, ExportError
from syncline.models.graph_networks.network import GraphNetwork
from syncline.serving.exporting import bundle
from syncline.serving.exporting.card import card_of, write_card
from syncline.serving.exporting.graph import default_outputs, example_of, graph_of, metadata_for
from syncline.serving.exporting.onnx_file import ExportedModel, export_onnx, runner
from syncline.serving.exporting.proof import MOST_SAMPLES, prove
from syncline.serving.exporting.quantize import quantize
from syncline.serving.exporting.speed import medians_ms
from syncline.serving.exporting.torch_program import program_runner, save_program
from syncline.serving.exporting.weights_file import save_weights, weights_runner
from syncline.serving.metadata import require
from syncline.serving.trained import TrainedModel, trained_model
from syncline.task import Task

__all__ = ["Format", "export"]

Format = Literal["onnx", "torch", "bundle", "safetensors"]

DEFAULT_PATHS = {"onnx": "model.onnx", "torch": "model.pt2", "bundle": "bundle", "safetensors": "model.safetensors"}
_BY_SUFFIX: dict[str, Format] = {".onnx": "onnx", ".pt2": "torch", ".zip": "bundle", ".safetensors": "safetensors"}


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    format: Format
    int8: bool
    max_drop: float
    outputs: Sequence[str] | None
    license: str | None
    most_samples: int


def export(
    run: str | Path,
    path: str | Path | None = None,
    *,
    format: Format | None = None,
    int8: bool = False,
    max_drop: float = 0.5,
    outputs: Sequence[str] | str | None = None,
    checkpoint: int | None = None,
    task: Task | None = None,
    license: str | None = None,
    samples: int = MOST_SAMPLES,
    data_dir: str | Path | None = None,
) -> ExportedModel:
    """Export the model of a run, prove the file equal to it, and write a model card beside it.

    >>> syncline.export("runs/lenet-mnist-20260101-120000", "model.onnx", int8=True)   # doctest: +SKIP

    Args:
        run: A run directory, or a model whose weights ship with Syncline.
        path: What to write. Default: model.onnx, model.pt2, model.safetensors or a folder `bundle`.
        format: `onnx`, `torch` (a program of torch.export), `safetensors` (weights only), or `bundle` (a folder or
            zip file that scores with NumPy and onnxruntime alone). Default: by the suffix of `path`.
        int8: Quantize to 8 bits, calibrated on training samples.
        max_drop: Refuse an int8 model whose accuracy is lower by more than this many percentage points.
        outputs: Names of outputs or of layers. Default: what the model returns, and probabilities.
        checkpoint: The step of the checkpoint. Default: the newest.
        task: The model and its data, for the run of a script.
        license: For the model card.
        samples: The most test samples for the proof.
        data_dir: Folder to search for the data of `task` first.
    """
    wanted = _Wanted(
        format=_format_of(format, path), int8=int8, max_drop=max_drop, license=license, most_samples=samples,
        outputs=[name.strip() for name in outputs.split(",")] if isinstance(outputs, str) else outputs,
    )  # fmt: skip
    _check(wanted)
    target = Path(path if path is not None else DEFAULT_PATHS[wanted.format])
    with boundary.guarding():
        if wanted.format == "bundle":
            bundle.check_place(target)
        start = time.perf_counter()
        folder_of_data = Path(data_dir) if data_dir is not None else None
        model = trained_model(run, checkpoint=checkpoint, task=task, data_dir=folder_of_data)
        _check_inputs(model, wanted)
        target.absolute().parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the last step is a rename on the same file system.
        folder = Path(tempfile.mkdtemp(prefix=".syncline-export-", dir=target.absolute().parent))
        try:
            done = _place(_exported(model, wanted, folder, target), wanted, folder, target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return replace(done, seconds=time.perf_counter() - start)


def _check_inputs(model: TrainedModel, wanted: _Wanted) -> None:
    """Refuse a file that would have to contain a graph."""
    if isinstance(model.module, GraphNetwork) and wanted.format != "safetensors":
        raise ConfigError(
            f"{model.name} is a graph network: it computes with the neighbors of a node, which a file of the format "
            f"{wanted.format} does not have. Use result.model in Python, or export the weights with --format "
            "safetensors.",
            code="graph-network", model=model.name, format=wanted.format,
        )  # fmt: skip


def _format_of(format: Format | None, path: str | Path | None) -> Format:
    if format is None:
        suffix = Path(path).suffix if path is not None else ".onnx"
        if suffix not in _BY_SUFFIX:
            raise ConfigError(
                f"The format of {path} is not known by its suffix. Use {', '.join(_BY_SUFFIX)}, or set the format: "
                f"{', '.join(get_args(Format))}.",
                code="unknown-format", path=str(path),
            )  # fmt: skip
        return _BY_SUFFIX[suffix]
    if format not in get_args(Format):
        raise ConfigError.for_setting("format", format, f"one of {', '.join(get_args(Format))}")
    return format


def _check(wanted: _Wanted) -> None:
    """Refuse what cannot be, before the model is loaded."""
    if wanted.int8 and wanted.format not in ("onnx", "bundle"):
        raise ConfigError(
            f"int8 is a form of ONNX, but the format is {wanted.format}. Use --format onnx or bundle.",
            code="int8-format", format=wanted.format,
        )  # fmt: skip
    if not wanted.max_drop >= 0:
        raise ConfigError.for_setting("max_drop", wanted.max_drop, "0 or more, in percentage points")
    if wanted.most_samples < 1:
        raise ConfigError.for_setting("samples", wanted.most_samples, "1 or more")
    packages = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "torch": (), "safetensors": ("safetensors",)}
    for package in packages.get(wanted.format, packages["onnx"]):
        require(package, f"Export to {wanted.format}")


def _exported(model: TrainedModel, wanted: _Wanted, folder: Path, target: Path) -> ExportedModel:
    """The file and its card, in `folder`."""
    names = list(wanted.outputs) if wanted.outputs is not None else default_outputs(model)
    name = bundle.MODEL if wanted.format == "bundle" else target.name
    file = folder / name
    int8_facts = None
    if wanted.format in ("onnx", "bundle"):
        done = export_onnx(model, file, outputs=names, most_samples=wanted.most_samples)
        if wanted.int8:
            done, int8_facts = _to_int8(model, done, wanted)
    else:
        metadata = metadata_for(model, names, graph_of(model, names))
        if wanted.format == "torch":
            save_program(model, names, metadata, file)
            run = program_runner(file, names)
        else:
            save_weights(model, metadata, file)
            run = weights_runner(model, names, file)
        proof = prove(model, names, run, most=wanted.most_samples)
        done = ExportedModel(path=file, metadata=metadata, proof=proof, seconds=0.0)
    write_card(card_of(model, done.metadata, done.proof, file, license=wanted.license, int8=int8_facts), done)
    return replace(done, int8=int8_facts)


def _to_int8(model: TrainedModel, exact: ExportedModel, wanted: _Wanted) -> tuple[ExportedModel, dict[str, float]]:
    """Replace an exported file by its int8 version, unless that is worse by more than `max_drop`."""
    names = exact.metadata.output_names
    small = exact.path.with_name(f"int8-{exact.path.name}")
    metadata = quantize(exact.path, small, exact.metadata, model)
    proof = prove(model, names, runner(small, names), tolerance=None, most=wanted.most_samples)
    if proof.drop_points is None or proof.data != "test":
        raise ExportError(
            "int8 was refused: without test data and one of its main outputs, nothing shows what it costs. Train with "
            "test data, for instance with test_share=0.1, and keep the model's own output among --outputs.",
            code="int8-unproven", data=proof.data, outputs=names,
        )  # fmt: skip
    if proof.drop_points > wanted.max_drop:
        raise ExportError(
            f"int8 was refused: the {proof.measure} falls by {proof.drop_points:.2f} points, from "
            f"{proof.torch_score:.2%} to {proof.exported_score:.2%}, and {wanted.max_drop:g} are allowed. Export "
            "without --int8, or allow more with --max-drop.",
            code="int8-worse", drop=proof.drop_points, max_drop=wanted.max_drop, measure=proof.measure,
            before=proof.torch_score, after=proof.exported_score,
        )  # fmt: skip
    sample = tuple(value[:1] for value in example_of(model))
    both = [runner(path, names, threads=1) for path in (exact.path, small)]
    before_ms, after_ms = medians_ms(both, sample)
    facts = {
        "float32_bytes": float(exact.size_bytes), "int8_bytes": float(small.stat().st_size),
        "float32_ms": before_ms, "int8_ms": after_ms, "drop_points": proof.drop_points,
    }  # fmt: skip
    small.replace(exact.path)
    return replace(exact, metadata=metadata, proof=proof), facts


def _place(done: ExportedModel, wanted: _Wanted, folder: Path, target: Path) -> ExportedModel:
    """Move what is complete to its place."""
    if wanted.format == "bundle":
        inner = folder / "bundle"
        inner.mkdir()
        for file in (done.path, *done.cards):
            file.rename(inner / file.name)
        bundle.finish(inner, target)
        return replace(done, path=target)
    for file in (*done.cards, done.path):  # the model last: with it, the card is there
        file.replace(target.with_name(file.name))
    return replace(done, path=target)
