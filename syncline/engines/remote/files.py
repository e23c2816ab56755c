"""The files of a run on nodes that do not share the driver's file system.

Here: `RunFilesCopy`, an agent's copy, and `chunks_of` and `write_chunk`, which both ends use. The driver sends the task
and the newest checkpoint; the agent sends back the workers' logs as they grow, and their checkpoints and predictions
when they are complete. Not here: when (`agent.py`, `agent_pool.py`). On a shared file system none of this is used.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from syncline.comms.control import RunFiles
from syncline.config.owned_files import file_mode, make_directory
from syncline.engines.remote.messages import FileChunk, FileRemoved

TASK = "task.bin"
"""The name of the task's file in a copy."""

_CHUNK_BYTES = 1024 * 1024
_PREDICTIONS = "predictions.json"
_KNOWN = re.compile(r"task\.bin|predictions\.json|logs/worker-\d+\.log|checkpoints/step-\d+\.(pt|json)")


def chunks_of(file: Path, name: str) -> Iterator[FileChunk]:
    """The file as it is now, to be written as `name` by `write_chunk`."""
    with file.open("rb") as stream:
        offset, data = 0, stream.read(_CHUNK_BYTES)
        while True:
            following = stream.read(_CHUNK_BYTES)
            yield FileChunk(name, offset, data, not following)
            if not following:
                return
            offset, data = offset + len(data), following


def write_chunk(folder: Path, chunk: FileChunk) -> None:
    """Write a chunk of a file. Logs are visible as they grow; other files appear when they are complete."""
    path = _path(folder, chunk.name)
    make_directory(path.parent)
    is_log = chunk.name.startswith("logs/")
    target = path if is_log else path.with_name(f".{path.name}.partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
    if chunk.offset == 0 and not is_log:  # a new file, not one that someone put there
        target.unlink(missing_ok=True)
        flags |= os.O_EXCL
    descriptor = os.open(target, flags, 0o600 if chunk.name == TASK else file_mode(path.parent))
    with os.fdopen(descriptor, "wb") as stream:
        stream.seek(chunk.offset)
        stream.write(chunk.data)
        if chunk.is_last and not is_log:
            stream.flush()
            os.fsync(stream.fileno())
    if chunk.is_last and not is_log:
        os.replace(target, path)


def remove(folder: Path, name: str) -> None:
    """Delete a checkpoint that is no longer kept."""
    _path(folder, name).unlink(missing_ok=True)


def checkpoints_wanted(files: RunFiles) -> list[Path]:
    """The files of the newest checkpoint and of the one to resume from, in the order in which they must arrive."""
    manifests = sorted(Path(files.run_dir, "checkpoints").glob("step-*.json"))[-1:]
    if files.checkpoint_path is not None:
        manifests.append(Path(files.checkpoint_path).with_suffix(".json"))
    return [file for manifest in dict.fromkeys(manifests) for file in (manifest.with_suffix(".pt"), manifest)]


def _path(folder: Path, name: str) -> Path:
    if not _KNOWN.fullmatch(name):
        raise ValueError(f"{name!r} is not a file of a run")
    return folder / name


class RunFilesCopy:
    """A run's files on an agent's node, in a folder created on first use: most nodes share the driver's files."""

    def __init__(self, make_folder: Callable[[], Path]) -> None:
        self._make_folder = make_folder
        self._sent: dict[str, int] = {}  # bytes of each log; modification time of other files
        self._is_made = False

    @functools.cached_property
    def folder(self) -> Path:
        self._is_made = True
        return self._make_folder()

    def write(self, chunk: FileChunk) -> None:
        """Write a chunk from the driver; it is not sent back."""
        write_chunk(self.folder, chunk)
        if chunk.is_last and chunk.name.startswith("checkpoints/"):
            self._sent[chunk.name] = _modified(self.folder / chunk.name)

    def changes(self) -> Iterator[FileChunk | FileRemoved]:
        """What workers have written and deleted since the last call."""
        if not self._is_made:
            return
        for log in sorted((self.folder / "logs").glob("worker-*.log")):
            name, sent = f"logs/{log.name}", self._sent.get(f"logs/{log.name}", 0)
            with log.open("rb") as stream:
                stream.seek(sent)
                while data := stream.read(_CHUNK_BYTES):
                    yield FileChunk(name, sent, data, True)
                    sent = self._sent[name] = sent + len(data)
        predictions = self.folder / _PREDICTIONS
        if predictions.exists() and self._sent.get(_PREDICTIONS) != _modified(predictions):
            self._sent[_PREDICTIONS] = _modified(predictions)
            yield from chunks_of(predictions, _PREDICTIONS)
        present = set[str]()
        for manifest in sorted((self.folder / "checkpoints").glob("step-*.json")):
            for file in (
                manifest.with_suffix(".pt"),
                manifest,
            ):  # the manifest comes last: it marks the checkpoint as complete
                name = f"checkpoints/{file.name}"
                present.add(name)
                if self._sent.get(name) != _modified(file):
                    self._sent[name] = _modified(file)
                    yield from chunks_of(file, name)
        for name in [n for n in self._sent if n.startswith("checkpoints/") and n not in present]:
            del self._sent[name]
            yield FileRemoved(name)


def _modified(file: Path) -> int:
    return file.stat().st_mtime_ns
