"""`Exporter`: a process beside the server that makes ONNX files of runs, so that the server needs no torch.

Here: the supervisor's end, which never waits. Not here: the process itself (`exporter_process.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from syncline.errors import SynclineError

__all__ = ["Ask", "ExportFailed", "Exported", "Exporter", "Follow"]


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Export the newest checkpoint of a run into a new folder."""

    number: int
    what: str
    folder: str


class Follow(msgspec.Struct, frozen=True, tag=True):
    """From now on, export every new checkpoint of these runs into new folders inside of this one."""

    runs: list[str]
    folder: str


class Exported(msgspec.Struct, frozen=True, tag=True):
    """A file was made; `number` is 0 if no request asked for this one."""

    number: int
    what: str
    path: str
    step: int | None
    note: str = ""
    """What the user should know about it."""


class ExportFailed(msgspec.Struct, frozen=True, tag=True):
    """It could not be made."""

    number: int
    what: str
    reason: str


Made = Callable[[Exported | ExportFailed], None]
_answers: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Exported | ExportFailed)


class Exporter:
    """Starts the process; it ends when its input is closed."""

    def __init__(self, on_followed: Made) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "syncline.serving.server.exporter_process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input = self._process.stdin
        self.output = self._process.stdout.fileno()
        os.set_blocking(self.output, False)
        self._on_followed = on_followed
        self._pending: dict[int, tuple[str, Made]] = {}
        self._asked = 0
        self._partial = b""

    def ask(self, what: str, folder: Path, made: Made) -> None:
        """Export a run; `made` is called by `receive`."""
        self._asked += 1
        self._pending[self._asked] = (what, made)
        self._write(Ask(self._asked, what, str(folder)))

    def follow(self, runs: Sequence[str], folder: Path) -> None:
        self._write(Follow(list(runs), str(folder)))

    def receive(self) -> bool:
        """Pass on what the process has reported; False if it has ended."""
        try:
            data = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return True
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            answer: Exported | ExportFailed = _answers.decode(line)
            _, made = self._pending.pop(answer.number, ("", self._on_followed))
            made(answer)
        if not data:
            self._fail_pending()
        return bool(data)

    def forget(self) -> None:
        """In a child of the supervisor: close our copies of its pipes."""
        self._input.close()
        os.close(self.output)

    def close(self) -> None:
        self._input.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _write(self, message: Ask | Follow) -> None:
        try:
            self._input.write(msgspec.json.encode(message) + b"\n")
            self._input.flush()
        except OSError as error:
            raise SynclineError("The process that exports runs has ended.", code="exporter-ended") from error

    def _fail_pending(self) -> None:
        pending, self._pending = self._pending, {}
        for number, (what, made) in pending.items():
            made(ExportFailed(number, what, "The process that exports runs has ended; its error is above."))
