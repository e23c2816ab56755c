"""Score with an exported model. Needs only NumPy and onnxruntime: no torch, no Syncline.

python scorer.py images.npy                       one line per row: the class and its probability, as CSV
python scorer.py table.csv --output logits        all numbers of an output
python scorer.py images.npy --out answers.npz     all outputs as arrays

from scorer import Scorer
Scorer("model.onnx").score(rows)                  a dict of arrays
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before the import: it would report to its vendor
import onnxruntime


class Scorer:
    """An ONNX file that Syncline exported."""

    def __init__(self, path: str | Path = "model.onnx", threads: int = 0) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.about: dict[str, Any] = json.loads(self.session.get_modelmeta().custom_metadata_map["syncline"])
        self.outputs = [output["name"] for output in self.about["outputs"]]

    def score(self, *inputs: Any, outputs: list[str] | None = None, batch: int = 256) -> dict[str, np.ndarray]:
        """The outputs for all rows; each input has the rows along its first dimension."""
        given = [self._checked(one, value) for one, value in zip(self.about["inputs"], inputs, strict=True)]
        names = list(outputs or self.outputs)
        parts = []
        for start in range(0, max(len(given[0]), 1), batch):
            feed = {one["name"]: v[start : start + batch] for one, v in zip(self.about["inputs"], given, strict=True)}
            parts.append(self.session.run(names, feed))
        return {name: np.concatenate([part[k] for part in parts]) for k, name in enumerate(names)}

    def labels(self, outputs: dict[str, np.ndarray]) -> list[tuple[str, float]] | None:
        """The most likely class of each row and its probability; None if the model is no classifier."""
        scores = outputs.get("probabilities")
        if scores is None or self.about["answers"] != "classes" or scores.ndim != 2:
            return None
        best = scores.argmax(1)
        names = self.about["class_names"] or [str(k) for k in range(scores.shape[1])]
        return [(names[k], float(f"{row[k]:.6g}")) for k, row in zip(best, scores, strict=True)]

    def _checked(self, one: dict[str, Any], value: Any) -> np.ndarray:
        value = np.asarray(value)
        shape = tuple(one["shape"])
        if value.dtype == object or value[:1].size != np.prod(shape, dtype=int) * len(value[:1]):
            raise ValueError(f"{one['name']} has rows of shape {value.shape[1:]}, but the model takes {shape}.")
        wanted = np.dtype(one["dtype"])
        if wanted.kind in "iu" and value.dtype.kind == "f" and (value != np.trunc(value)).any():
            raise ValueError(f"{one['name']} holds fractions, but the model takes {wanted}: pixels are 0 to 255.")
        if wanted == np.uint8 and value.size and (value.min() < 0 or value.max() > 255):
            raise ValueError(f"{one['name']} holds {value.min()} to {value.max()}, but pixels are 0 to 255.")
        return np.ascontiguousarray(value.astype(wanted).reshape(-1, *shape))


def read(path: Path, about: dict[str, Any]) -> np.ndarray:
    """Rows from an .npy file, or from a CSV file with a header."""
    if path.suffix == ".npy":
        return np.asarray(np.load(path, allow_pickle=False))
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    columns = about["columns"] or header
    return np.array([[float(row[header.index(name)]) for name in columns] for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description="Score with an exported model.")
    parser.add_argument("data", type=Path, help="an .npy file, or a CSV file with a header")
    parser.add_argument("--model", type=Path, default=Path(__file__).with_name("model.onnx"))
    parser.add_argument("--output", help="print all numbers of this output")
    parser.add_argument("--out", type=Path, help="write all outputs to this .npz file instead")
    given = parser.parse_args()
    scorer = Scorer(given.model)
    found = scorer.score(read(given.data, scorer.about))
    if given.out:
        np.savez(given.out, **found)  # type: ignore[arg-type]  # names of outputs are no options of savez
        return
    labels = None if given.output else scorer.labels(found)
    table = csv.writer(sys.stdout)
    rows = found[given.output or scorer.outputs[0]]
    table.writerows(rows.reshape(len(rows), -1).tolist() if labels is None else [("class", "probability"), *labels])


if __name__ == "__main__":
    main()
