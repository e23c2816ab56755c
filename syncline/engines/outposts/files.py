"""The files of a run where the driver's are not seen: a copy of what workers need, and the way back of what they write.

Here: `Copy`, an outpost's, and `pieces_of` and `put`, which both ends use. To the outpost go the task and the newest
checkpoint; back come what workers print, as it grows, and their checkpoints and predictions, whole. Not here: when
(`outpost.py`, `engine.py`). Where driver and outpost see the same files, nothing of this is used.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from syncline.comms.control import RunFiles
from syncline.engines.outposts.messages import Piece, Removed

__all__ = ["TASK", "Copy", "checkpoints_wanted", "pieces_of", "put", "remove"]

TASK = "task.payload"
"""What the task is called in a copy."""

_PIECE_BYTES = 1024 * 1024
_PREDICTIONS = "predictions.json"
_KNOWN = re.compile(r"task\.payload|predictions\.json|logs/worker-\d+\.log|checkpoints/step-\d+\.(pt|json)")


def pieces_of(file: Path, name: str) -> Iterator[Piece]:
    """A file as it is now, to be `put` under `name` elsewhere."""
    with file.open("rb") as stream:
        offset, data = 0, stream.read(_PIECE_BYTES)
        while True:
            following = stream.read(_PIECE_BYTES)
            yield Piece(name, offset, data, not following)
            if not following:
                return
            offset, data = offset + len(data), following


def put(folder: Path, piece: Piece) -> None:
    """Write a piece of a file. Only logs grow before one's eyes; anything else is there when it is whole."""
    path = _path(folder, piece.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    is_log = piece.name.startswith("logs/")
    target = path if is_log else path.with_name(f".{path.name}.coming")
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if piece.offset == 0 and not is_log else 0)
    descriptor = os.open(target, flags, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.seek(piece.offset)
        stream.write(piece.data)
        if piece.is_last and not is_log:
            stream.flush()
            os.fsync(stream.fileno())
    if piece.is_last and not is_log:
        os.replace(target, path)


def remove(folder: Path, name: str) -> None:
    """A checkpoint that is not kept any more."""
    _path(folder, name).unlink(missing_ok=True)


def checkpoints_wanted(files: RunFiles) -> list[Path]:
    """The files of the newest checkpoint and of the one to go on from, in the order in which they must arrive."""
    manifests = sorted(Path(files.run_dir, "checkpoints").glob("step-*.json"))[-1:]
    if files.checkpoint_path is not None:
        manifests.append(Path(files.checkpoint_path).with_suffix(".json"))
    return [file for manifest in dict.fromkeys(manifests) for file in (manifest.with_suffix(".pt"), manifest)]


def _path(folder: Path, name: str) -> Path:
    if not _KNOWN.fullmatch(name):
        raise ValueError(f"{name!r} is no file of a run")
    return folder / name


class Copy:
    """A run's files at an outpost, in a folder that is made when the first comes: most outposts see the driver's."""

    def __init__(self, make_folder: Callable[[], Path]) -> None:
        self._make_folder = make_folder
        self._told: dict[str, int] = {}  # of logs, how much; of checkpoints, which
        self._is_made = False

    @functools.cached_property
    def folder(self) -> Path:
        """Where the files are."""
        self._is_made = True
        return self._make_folder()

    def put(self, piece: Piece) -> None:
        """From the driver, who need not be told of it."""
        put(self.folder, piece)
        if piece.is_last and piece.name.startswith("checkpoints/"):
            self._told[piece.name] = _when(self.folder / piece.name)

    def news(self) -> Iterator[Piece | Removed]:
        """What workers have written and removed since the last time."""
        if not self._is_made:
            return
        for log in sorted((self.folder / "logs").glob("worker-*.log")):
            name, told = f"logs/{log.name}", self._told.get(f"logs/{log.name}", 0)
            with log.open("rb") as stream:
                stream.seek(told)
                while data := stream.read(_PIECE_BYTES):
                    yield Piece(name, told, data, True)
                    told = self._told[name] = told + len(data)
        predictions = self.folder / _PREDICTIONS
        if predictions.exists() and self._told.get(_PREDICTIONS) != _when(predictions):
            self._told[_PREDICTIONS] = _when(predictions)
            yield from pieces_of(predictions, _PREDICTIONS)
        there = set[str]()
        for manifest in sorted((self.folder / "checkpoints").glob("step-*.json")):
            for file in (manifest.with_suffix(".pt"), manifest):  # the manifest says that all is there
                name = f"checkpoints/{file.name}"
                there.add(name)
                if self._told.get(name) != _when(file):
                    self._told[name] = _when(file)
                    yield from pieces_of(file, name)
        for name in [n for n in self._told if n.startswith("checkpoints/") and n not in there]:
            del self._told[name]
            yield Removed(name)


def _when(file: Path) -> int:
    return file.stat().st_mtime_ns
