"""The model card of an export: what the model is, what it was trained on, and the proof, as JSON and as Markdown.

(M. Mitchell et al., "Model Cards for Model Reporting", 2019.) Not here: the metadata inside the file, which programs
use (`metadata.py`).
"""

from __future__ import annotations

import datetime
import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from syncline.serving.exporting.onnx_file import ExportedModel
from syncline.serving.exporting.proof import Proof
from syncline.serving.metadata import ModelMetadata, TensorFacts
from syncline.serving.trained import TrainedModel

NO_LICENSE = "not stated"


def card_of(
    model: TrainedModel,
    metadata: ModelMetadata,
    proof: Proof,
    file: Path,
    *,
    license: str | None,
    int8: dict[str, float] | None,
) -> dict[str, Any]:
    """The card as plain values; `file` is the exported one."""
    import torch

    facts = dict(model.facts)
    data = {"name": metadata.data, "train_samples": facts.pop("train_samples", None)}
    data["test_samples"] = facts.pop("test_samples", None)
    facts.pop("data", None)
    return {
        "model": metadata.name,
        "version": metadata.version,
        "precision": metadata.precision,
        "license": license or NO_LICENSE,
        "parameters": sum(p.numel() for p in model.module.parameters()),
        "weights_sha256": metadata.sha256,
        "file": file.name,
        "file_bytes": file.stat().st_size,
        "file_sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "inputs": [msgspec.to_builtins(one) for one in metadata.inputs],
        "outputs": [msgspec.to_builtins(one) for one in metadata.outputs],
        "class_names": list(metadata.class_names) if metadata.class_names else None,
        "data": data,
        "metrics": facts.pop("metrics", {}),
        "training": {name: value for name, value in facts.items() if value is not None},
        "proof": msgspec.to_builtins(proof),
        "int8": int8,
        "software": {"syncline": metadata.producer.removeprefix("syncline "), "torch": str(torch.__version__)},
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def write_card(card: dict[str, Any], done: ExportedModel) -> None:
    """Write both forms beside the exported file: model.onnx.card.md and model.onnx.card.json."""
    markdown, data = done.cards
    markdown.write_text(as_markdown(card))
    data.write_text(json.dumps(card, indent=1) + "\n")


def as_markdown(card: dict[str, Any]) -> str:
    """The card for people."""
    training = card["training"]
    lines = [
        f"# {card['model']}, version {card['version']}",
        "",
        f"{card['parameters']:,} parameters, {card['precision']}. License: {card['license']}.",
        "",
        *_table("File", [
            ("name", card["file"]),
            ("size", f"{card['file_bytes']:,} bytes"),
            ("SHA-256", card["file_sha256"]),
            ("SHA-256 of the weights", card["weights_sha256"]),
            *(("input", _tensor(one)) for one in card["inputs"]),
            *(("output", _tensor(one)) for one in card["outputs"]),
            ("classes", _shortened(card["class_names"])),
        ]),
        *_table("Data", [
            ("name", card["data"]["name"]),
            ("training samples", _count(card["data"]["train_samples"])),
            ("test samples", _count(card["data"]["test_samples"])),
        ]),
        *_table("Training", [(name.replace("_", " "), value) for name, value in training.items()]),
        *_table("Metrics of the run", [(name, f"{value:.4g}") for name, value in card["metrics"].items()]),
        *_table("Proof of the export", proof_rows(msgspec.convert(card["proof"], Proof))),
        *(_table("int8", [(name, f"{value:,.4g}") for name, value in card["int8"].items()]) if card["int8"] else []),
        f"Exported {card['created']} with Syncline {card['software']['syncline']} and torch "
        f"{card['software']['torch']}.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def proof_rows(proof: Proof) -> list[tuple[str, Any]]:
    """The proof as rows of a table, for the card and the terminal."""
    allowed = f"{proof.tolerance:g} allowed" if proof.tolerance is not None else "no limit for int8"
    rows: list[tuple[str, Any]] = [("compared on", f"{proof.samples:,} samples ({proof.data} data)")]
    rows += [
        (f"largest difference of {name}", f"{value:.1e} of its largest value ({allowed})")
        for name, value in proof.differences.items()
    ]
    if proof.measure is not None and proof.torch_score is not None and proof.exported_score is not None:
        shown = "{:.2%}" if proof.measure == "accuracy" else "{:.4f}"
        rows.append((f"{proof.measure} in torch", shown.format(proof.torch_score)))
        rows.append((f"{proof.measure} exported", shown.format(proof.exported_score)))
    if proof.agreement is not None:
        rows.append(("same class in both", f"{proof.agreement:.2%}"))
    return rows


def _table(title: str, rows: list[tuple[str, Any]]) -> list[str]:
    shown = [(name, value) for name, value in rows if value not in (None, "")]
    if not shown:
        return []
    return [f"## {title}", "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in shown), ""]


def _tensor(one: dict[str, Any]) -> str:
    facts = msgspec.convert(one, TensorFacts)
    return f"{facts.name}: {facts.dtype} (batch{''.join(f', {n}' for n in facts.shape)})"


def _shortened(names: list[str] | None) -> str | None:
    if names is None:
        return None
    shown = ", ".join(repr(name) if not name.strip() else name for name in names[:20])
    return shown if len(names) <= 20 else f"{shown} and {len(names) - 20} more"


def _count(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"
