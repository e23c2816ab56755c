"""Checkpoints as files: written atomically, and loaded only if their checksum matches.

    checkpoints/step-00000412.pt     the state, as torch.save writes it
    checkpoints/step-00000412.json   version, step, size and SHA-256; written last

A checkpoint exists when its JSON exists. Loading uses `weights_only=True`: a checkpoint cannot run code. Files of other
users are refused all the same (`config/owned_files.py`): its writer chose the model. Not here: what the state
holds (`schema.py`), and when to save (`workers/checkpoints.py`).
"""

from __future__ import annotations

import contextlib
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

from syncline.boundary import advice_on
from syncline.checkpoint.schema import VERSION, check_version
from syncline.config.owned_files import create_new, make_directory, read_owned, temporary_name
from syncline.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    path: Path
    step: int
    size_bytes: int
    sha256: str
    version: int
    run_id: str = ""


def save(folder: Path, step: int, state: dict[str, Any], *, keep: int) -> Checkpoint:
    """Write `state` as the checkpoint of `step`, then remove all but the newest `keep`."""
    path = folder / f"step-{step:08d}.pt"
    data = _serialized(state)
    digest = hashlib.sha256(data).hexdigest()
    run_id = str(state.get("run_id", ""))
    manifest = {"version": VERSION, "step": step, "size_bytes": data.nbytes, "sha256": digest, "run_id": run_id}
    try:
        make_directory(folder)
        _remove_unfinished(folder)
        _write_whole((path, data), (path.with_suffix(".json"), memoryview(json.dumps(manifest).encode())))
    except OSError as error:
        raise CheckpointError(_explain(error, path, data.nbytes)) from error
    except ConfigError as error:  # the folder is not ours
        raise CheckpointError(str(error), code=error.code, **error.facts) from error
    # Later checkpoints can exist, too, if the run resumed from an earlier one because they were damaged. They must not
    # displace this one.
    for old in [c for c in checkpoints_in(folder) if c.step <= step][:-keep]:
        with contextlib.suppress(OSError):  # the new checkpoint is saved anyway
            old.path.with_suffix(".json").unlink(missing_ok=True)
            old.path.unlink(missing_ok=True)
    return Checkpoint(path, step, data.nbytes, digest, VERSION, run_id)


def checkpoints_in(folder: Path) -> list[Checkpoint]:
    """The checkpoints that exist, oldest first; their contents are not checked, only whose they are."""
    found = []
    for manifest in sorted(folder.glob("step-*.json")):
        try:
            data = json.loads(read_owned(manifest))
            if int(data["step"]) != int(manifest.stem.removeprefix("step-")):
                continue  # of another checkpoint, or damaged
            found.append(
                Checkpoint(
                    manifest.with_suffix(".pt"),
                    int(data["step"]),
                    int(data["size_bytes"]),
                    data["sha256"],
                    data["version"],
                    str(data.get("run_id", "")),
                )
            )
        except ConfigError:
            raise  # not ours
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue  # not a checkpoint's manifest, or truncated
    return sorted(found, key=lambda c: c.step)


def load(checkpoint: Checkpoint) -> dict[str, Any]:
    """The state in a checkpoint; `CheckpointError` unless it is exactly what was written, `ConfigError` if not ours."""
    check_version(checkpoint.version, checkpoint.path)
    try:
        data = read_owned(checkpoint.path)
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint.path} cannot be read: {error.strerror}.",
            code="checkpoint-unreadable",
            path=str(checkpoint.path),
        ) from error
    if len(data) != checkpoint.size_bytes:
        raise CheckpointError(
            f"{checkpoint.path} is truncated: it has {len(data):,} bytes and should have {checkpoint.size_bytes:,}.",
            code="checkpoint-truncated",
            path=str(checkpoint.path),
            size_bytes=len(data),
            expected_bytes=checkpoint.size_bytes,
        )
    if hashlib.sha256(data).hexdigest() != checkpoint.sha256:
        raise CheckpointError(
            f"{checkpoint.path} is corrupt: its checksum does not match the manifest.",
            code="checkpoint-corrupt",
            path=str(checkpoint.path),
        )
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:
        raise CheckpointError(
            f"{checkpoint.path} is refused: it holds more than tensors and plain values, and loading that could run "
            "code.",
            code="checkpoint-unsafe",
            path=str(checkpoint.path),
        ) from error
    return state


def newest_sound(folder: Path, run_id: str | None = None) -> tuple[Checkpoint, dict[str, Any], list[str]]:
    """The newest checkpoint that loads, its state, and what is wrong with each newer one.

    With a `run_id`, one that another run has written counts as wrong, too.
    """
    problems: list[str] = []
    for checkpoint in reversed(checkpoints_in(folder)):
        try:
            state = load(checkpoint)
            if run_id is not None:
                check_run(state.get("run_id"), run_id, checkpoint.path)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            return checkpoint, state, [*_unreadable_after(checkpoint), *problems]
    if problems:
        raise CheckpointError(
            " ".join(problems) + f" No other checkpoint is left in {folder}: start a new run.",
            code="no-sound-checkpoint",
            folder=str(folder),
            problems=problems,
        )
    raise CheckpointError(
        f"There is no checkpoint in {folder}: the run ended before its first one. Start a new run.",
        code="no-checkpoint",
        folder=str(folder),
    )


def at_step(folder: Path, step: int, run_id: str | None = None) -> tuple[Checkpoint, dict[str, Any]]:
    """The checkpoint of this step and its state; `CheckpointError` if there is none, or it does not load."""
    there = {checkpoint.step: checkpoint for checkpoint in checkpoints_in(folder)}
    if step not in there:
        shown = ", ".join(map(str, there)) or "none"
        raise CheckpointError(
            f"There is no checkpoint of step {step} in {folder}. There are: {shown}.",
            code="no-checkpoint", folder=str(folder), step=step, steps=list(there),
        )  # fmt: skip
    state = load(there[step])
    if run_id is not None:
        check_run(state.get("run_id"), run_id, there[step].path)
    return there[step], state


def check_run(found: object, run_id: str, path: Path) -> None:
    """`CheckpointError` if a checkpoint was written by another run."""
    if found != run_id:
        raise CheckpointError(
            f"{path} was written by another run ({found}, not {run_id}).",
            code="checkpoint-of-other-run", path=str(path), run_id=run_id, found=found,
        )  # fmt: skip


def _unreadable_after(checkpoint: Checkpoint) -> list[str]:
    """What is wrong with newer manifests that are damaged: without saying so, an older state would be used."""
    folder = checkpoint.path.parent
    readable = {known.path.stem for known in checkpoints_in(folder)}
    names = sorted(manifest.stem for manifest in folder.glob("step-*.json"))
    return [
        f"{folder / name}.json is damaged." for name in names if name > checkpoint.path.stem and name not in readable
    ]


def _serialized(state: dict[str, Any]) -> memoryview:
    """The bytes of `state`; `CheckpointError` if `load` would refuse them, before any work depends on them."""
    stream = io.BytesIO()
    try:
        torch.save(state, stream)
        stream.seek(0)
        refused = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(stream))
    except Exception as error:
        raise CheckpointError(
            f"The state cannot be saved: {type(error).__name__}: {error}.", code="unsavable"
        ) from error
    if refused:
        raise CheckpointError(
            f"The state cannot be saved: it holds {', '.join(refused)}. A checkpoint holds tensors and plain values, "
            "so that loading it cannot run code.",
            code="unsavable",
            types=refused,
        )
    return stream.getbuffer()


def _remove_unfinished(folder: Path) -> None:
    """Remove the files of a writer that was killed. There is one writer at a time, so these are not in use."""
    for left in [*folder.glob(".step-*.tmp"), *folder.glob("step-*.pt")]:
        if left.suffix == ".tmp" or not left.with_suffix(".json").exists():
            left.unlink(missing_ok=True)


def _write_whole(*files: tuple[Path, memoryview]) -> None:
    """Rename each file into place only when all of them are on disk: a full disk changes nothing."""
    temporaries = [temporary_name(path) for path, _ in files]
    try:
        for temporary, (_, data) in zip(temporaries, files, strict=True):
            with create_new(temporary) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        for temporary, (path, _) in zip(temporaries, files, strict=True):
            os.replace(temporary, path)
            _sync_folder(path.parent)
    except BaseException:
        for temporary in temporaries:
            temporary.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    """Make the rename survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explain(error: OSError, path: Path, size_bytes: int) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(next(p for p in path.parents if p.exists())).free
        return (
            f"The checkpoint {path.name} could not be written: the disk of {path.parent} is full "
            f"({size_bytes / 1e6:.1f} MB needed, {free / 1e6:.1f} MB free). Earlier checkpoints are intact. "
            "Free disk space."
        )
    what = f"The checkpoint {path} could not be written: {error.strerror or error}. Earlier checkpoints are intact."
    return f"{what} {advice_on(error)}".rstrip()
