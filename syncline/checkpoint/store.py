"""Checkpoints as files: written atomically, and loaded only if their checksum matches.

    checkpoints/step-00000412.pt     the state, as torch.save writes it
    checkpoints/step-00000412.json   version, step, size and SHA-256; written last

A checkpoint exists when its JSON exists. Saving has two halves: `stage` writes the state to a temporary file, and reads
no tensor afterwards; `commit` waits for the disk, takes the checksum, and renames the file into place.

Loading uses `weights_only=True`: a checkpoint cannot run code. Files of other users are refused all the same
(`config/owned_files.py`): its writer chose the model. Not here: what the state holds (`schema.py`), and when to save
(`workers/checkpoints.py`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import torch

from syncline.boundary import advice_on
from syncline.checkpoint.direct_writer import DirectWriter
from syncline.checkpoint.schema import VERSION, check_version
from syncline.checkpoint.snapshot import bytes_in
from syncline.config.owned_files import create_new, make_directory, open_owned, read_owned, temporary_name
from syncline.errors import CheckpointError, ConfigError

_READ_BYTES = 2**20


class Digest(Protocol):
    """A checksum of hashlib."""

    def update(self, data: memoryview, /) -> None: ...


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    path: Path
    step: int
    size_bytes: int
    sha256: str
    version: int
    run_id: str = ""


@dataclass(frozen=True)
class StagedFile:
    """A state that is written completely, but is not a checkpoint yet."""

    temporary: Path
    path: Path
    step: int
    size_bytes: int
    run_id: str

    def discard(self) -> None:
        """Remove the file; of no effect after `commit`."""
        with contextlib.suppress(OSError):  # the next checkpoint removes what is left
            self.temporary.unlink(missing_ok=True)


def save(folder: Path, step: int, state: dict[str, Any], *, keep: int) -> Checkpoint:
    """Write `state` as the checkpoint of `step`, then remove all but the newest `keep`."""
    return commit(stage(folder, step, state), keep=keep)


def stage(folder: Path, step: int, state: dict[str, Any]) -> StagedFile:
    """Write `state` to a temporary file, each tensor straight from its memory; it may change when this returns.

    It may lie in the system's cache then, in part or as a whole, and not be on disk.
    """
    path = folder / f"step-{step:08d}.pt"
    temporary = temporary_name(path)
    with _explained(path, lambda: bytes_in(state)):
        make_directory(folder)
        _remove_unfinished(folder)
        try:
            with create_new(temporary) as file:
                _serialize(state, file, temporary)
            size_bytes = temporary.stat().st_size
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    return StagedFile(temporary, path, step, size_bytes, str(state.get("run_id", "")))


def commit(
    staged: StagedFile, *, keep: int, digest: Callable[[BinaryIO], str] = lambda file: sha256_of(file)
) -> Checkpoint:
    """Make a staged state the checkpoint of its step, then remove all but the newest `keep`."""
    path, step = staged.path, staged.step
    with _explained(path, lambda: staged.size_bytes):
        try:
            with open_owned(staged.temporary) as file:
                found = digest(file)
                os.fsync(file.fileno())
            manifest = {
                "version": VERSION, "step": step, "size_bytes": staged.size_bytes, "sha256": found,
                "run_id": staged.run_id,
            }  # fmt: skip
            _put_in_place(staged.temporary, path, json.dumps(manifest).encode())
        finally:
            staged.discard()
    # Later checkpoints can exist, too, if the run resumed from an earlier one because they were damaged. They must not
    # displace this one.
    for old in [c for c in checkpoints_in(path.parent) if c.step <= step][:-keep]:
        with contextlib.suppress(OSError):  # the new checkpoint is saved anyway
            old.path.with_suffix(".json").unlink(missing_ok=True)
            old.path.unlink(missing_ok=True)
    return Checkpoint(path, step, staged.size_bytes, found, VERSION, staged.run_id)


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
    """The state in a checkpoint; `CheckpointError` unless it is exactly what was written, `ConfigError` if not ours.

    Its tensors are mapped from the file, so they take no memory until they are read: copy those that are kept.
    """
    check_version(checkpoint.version, checkpoint.path)
    try:
        with open_owned(checkpoint.path) as file:
            _check_content(checkpoint, file)
            return _loaded(checkpoint, file)
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint.path} cannot be read: {error.strerror}.",
            code="checkpoint-unreadable",
            path=str(checkpoint.path),
        ) from error


def _check_content(checkpoint: Checkpoint, file: BinaryIO) -> None:
    """`CheckpointError` unless `file` is what was written."""
    size_bytes = os.fstat(file.fileno()).st_size
    if size_bytes != checkpoint.size_bytes:
        raise CheckpointError(
            f"{checkpoint.path} is truncated: it has {size_bytes:,} bytes and should have {checkpoint.size_bytes:,}.",
            code="checkpoint-truncated",
            path=str(checkpoint.path),
            size_bytes=size_bytes,
            expected_bytes=checkpoint.size_bytes,
        )
    if sha256_of(file) != checkpoint.sha256:
        raise CheckpointError(
            f"{checkpoint.path} is corrupt: its checksum does not match the manifest.",
            code="checkpoint-corrupt",
            path=str(checkpoint.path),
        )


def _loaded(checkpoint: Checkpoint, file: BinaryIO) -> dict[str, Any]:
    try:
        return _mapped(file)
    except Exception as error:
        raise CheckpointError(
            f"{checkpoint.path} is refused: it holds more than tensors and plain values, and loading that could run "
            "code.",
            code="checkpoint-unsafe",
            path=str(checkpoint.path),
        ) from error


def _mapped(file: BinaryIO) -> dict[str, Any]:
    """The state in a file, with tensors that are mapped from it where the system can do that."""
    by_descriptor = f"/proc/self/fd/{file.fileno()}"  # the name may belong to another file since
    if os.path.exists(by_descriptor):
        with contextlib.suppress(RuntimeError):  # some network drives cannot map files
            mapped: dict[str, Any] = torch.load(by_descriptor, weights_only=True, map_location="cpu", mmap=True)
            return mapped
    file.seek(0)
    read: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu")
    return read


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


def sha256_of(file: BinaryIO) -> str:
    """The checksum of an open file, from its beginning."""
    file.seek(0)
    digest = hashlib.sha256()
    feed(digest, file)
    return digest.hexdigest()


def feed(digest: Digest, file: BinaryIO, *, until_s: float = math.inf) -> None:
    """Add the rest of a file to a checksum, up to the time `until_s` of the monotonic clock."""
    view = memoryview(bytearray(_READ_BYTES))
    while time.monotonic() < until_s and (count := file.readinto(view)):  # type: ignore[attr-defined]  # real files do
        digest.update(view[:count])


def _serialize(state: dict[str, Any], file: BinaryIO, path: Path) -> None:
    """Write `state`; `CheckpointError` if `load` would refuse it, before any work depends on it."""
    try:
        direct = DirectWriter(file)
        with _without_crc32():
            torch.save(state, cast(BinaryIO, direct))  # of a file, torch only writes and flushes
        direct.finish()
        refused = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except OSError:
        raise
    except Exception as error:
        if isinstance(error.__context__, OSError):  # torch's writer fails because the file's failed
            raise error.__context__ from error
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


@contextlib.contextmanager
def _without_crc32() -> Iterator[None]:
    """torch.load does not check these sums, which take as long as writing. The manifest has a better one."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _remove_unfinished(folder: Path) -> None:
    """Remove the files of a writer that was killed. There is one writer at a time, so these are not in use."""
    for left in [*folder.glob(".step-*.tmp"), *folder.glob("step-*.pt")]:
        if left.suffix == ".tmp" or not left.with_suffix(".json").exists():
            left.unlink(missing_ok=True)


def _put_in_place(written: Path, path: Path, manifest: bytes) -> None:
    """Rename each file into place only when both are on disk: a full disk changes nothing."""
    marker = path.with_suffix(".json")
    temporary = temporary_name(marker)
    try:
        with create_new(temporary) as file:
            file.write(manifest)
            file.flush()
            os.fsync(file.fileno())
        for source, target in ((written, path), (temporary, marker)):
            os.replace(source, target)
            _sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    """Make the rename survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _explained(path: Path, size_bytes: Callable[[], int]) -> Iterator[None]:
    """Raise what the file system or the folder's owner does not allow as a `CheckpointError`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(_explain(error, path, size_bytes())) from error
    except ConfigError as error:  # the folder is not ours
        raise CheckpointError(str(error), code=error.code, **error.facts) from error


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
