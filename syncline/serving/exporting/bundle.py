"""A bundle: one folder or zip file that scores with NumPy and onnxruntime alone, for machines without torch.

    model.onnx  model.onnx.card.md  model.onnx.card.json  scorer.py  requirements.txt

Here: putting it together. Not here: the scorer, which is copied as it is (`scorer.py`).
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import zipfile
from pathlib import Path

from syncline.errors import ConfigError

MODEL = "model.onnx"
_SCORER = Path(__file__).with_name("scorer.py")
_OURS = {MODEL, "model.onnx.card.md", "model.onnx.card.json", "scorer.py", "requirements.txt"}


def check_place(path: Path) -> None:
    """Refuse a folder with files that are not a bundle's, before it would be replaced."""
    if path.suffix == ".zip":
        return
    if path.is_file():
        raise ConfigError(
            f"{path} is a file. A bundle is a folder, or a file whose name ends in .zip.",
            code="bundle-place", path=str(path),
        )  # fmt: skip
    others = sorted({one.name for one in path.iterdir()} - _OURS) if path.is_dir() else []
    if others:
        raise ConfigError(
            f"The folder {path} has other files, such as {others[0]}. Choose a new folder for the bundle.",
            code="bundle-place", path=str(path), others=others,
        )  # fmt: skip


def finish(folder: Path, path: Path) -> None:
    """Add scorer and requirements to a folder with model and card, and move it to `path`, zipped if that is a .zip."""
    shutil.copyfile(_SCORER, folder / "scorer.py")
    (folder / "requirements.txt").write_text(
        "".join(f"{name}>={_major_minor(importlib.metadata.version(name))}\n" for name in ("numpy", "onnxruntime"))
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".zip":
        if path.is_dir():
            shutil.rmtree(path)
        os.rename(folder, path)
        return
    packed = folder.with_suffix(".zip")
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.iterdir()):
            archive.write(file, file.name)
    os.replace(packed, path)


def _major_minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
