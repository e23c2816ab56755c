"""Checkpoints as files: written whole or not at all, and trusted only after their checksum agrees.

    checkpoints/step-00000412.pt     the state, as torch.save writes it
    checkpoints/step-00000412.json   format version, position, size and SHA-256; written last

A checkpoint exists when its JSON exists. Loading uses `weights_only=True`: a checkpoint cannot run code. Not here: when
to save, and what belongs to the state (`workers/`).
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from syncline.errors import CheckpointError

__all__ = ["FORMAT", "Checkpoint", "checkpoints_in", "load", "newest_sound", "save"]

FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, not loaded."""

    path: Path
    step: int
    size_bytes: int
    sha256: str
    format: int


def save(folder: Path, step: int, state: dict[str, Any], *, keep: int) -> Checkpoint:
    """Write `state` as the checkpoint of `step`, then remove all but the newest `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    stream = io.BytesIO()
    torch.save(state, stream)
    data = stream.getbuffer()
    path = folder / f"step-{step:08d}.pt"
    digest = hashlib.sha256(data).hexdigest()
    manifest = {"format": FORMAT, "step": step, "size_bytes": data.nbytes, "sha256": digest}
    try:
        _write_whole(path, data)
        _write_whole(path.with_suffix(".json"), memoryview(json.dumps(manifest).encode()))
    except OSError as error:
        raise CheckpointError(_explain(error, path, data.nbytes)) from error
    for old in checkpoints_in(folder)[:-keep]:
        old.path.with_suffix(".json").unlink(missing_ok=True)
        old.path.unlink(missing_ok=True)
    return Checkpoint(path, step, data.nbytes, digest, FORMAT)


def checkpoints_in(folder: Path) -> list[Checkpoint]:
    """The checkpoints that exist, oldest first; their contents are not looked at."""
    found = []
    for manifest in sorted(folder.glob("step-*.json")):
        try:
            data = json.loads(manifest.read_text())
            found.append(
                Checkpoint(
                    manifest.with_suffix(".pt"), data["step"], data["size_bytes"], data["sha256"], data["format"]
                )
            )
        except (OSError, ValueError, KeyError):
            continue  # not a checkpoint's manifest, or cut off
    return sorted(found, key=lambda c: c.step)


def load(checkpoint: Checkpoint) -> dict[str, Any]:
    """The state in a checkpoint; `CheckpointError` if it is not exactly what was written."""
    if checkpoint.format != FORMAT:
        raise CheckpointError(
            f"{checkpoint.path} has format {checkpoint.format}, but this version of Syncline reads format {FORMAT}. "
            "Use the version that wrote it."
        )
    try:
        data = checkpoint.path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{checkpoint.path} cannot be read: {error.strerror}.") from error
    if len(data) != checkpoint.size_bytes:
        raise CheckpointError(
            f"{checkpoint.path} is truncated: it has {len(data):,} bytes and should have {checkpoint.size_bytes:,}."
        )
    if hashlib.sha256(data).hexdigest() != checkpoint.sha256:
        raise CheckpointError(f"{checkpoint.path} is corrupt: its checksum does not agree with what was written.")
    state: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    return state


def newest_sound(folder: Path) -> tuple[Checkpoint, dict[str, Any], list[str]]:
    """The newest checkpoint that loads, its state, and what was wrong with each newer one."""
    problems: list[str] = []
    for checkpoint in reversed(checkpoints_in(folder)):
        try:
            return checkpoint, load(checkpoint), problems
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(" ".join(problems) + f" No other checkpoint is left in {folder}: start the run anew.")
    raise CheckpointError(f"There is no checkpoint in {folder}: the run ended before its first one. Start it anew.")


def _write_whole(path: Path, data: memoryview) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make the new name itself survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explain(error: OSError, path: Path, size_bytes: int) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(path.parent).free
        return (
            f"The checkpoint {path.name} could not be written: the disk of {path.parent} is full "
            f"({size_bytes / 1e6:.1f} MB needed, {free / 1e6:.1f} MB free). Earlier checkpoints are intact. "
            "Free some space."
        )
    return f"The checkpoint {path} could not be written: {error.strerror or error}. Earlier checkpoints are intact."
