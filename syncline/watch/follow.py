"""Following a run as it goes: its record, brought up to date by what was written since the last look.

Here: `Follower`. Not here: what becomes of events (`report/record.py`), who looks (`server.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from syncline.report.record import RunRecord
from syncline.telemetry.events import from_dict
from syncline.telemetry.predictions import read_predictions
from syncline.telemetry.run_dir import RunDir

__all__ = ["Follower"]


class Follower:
    """One run. `is_live` says whether somebody works on it."""

    def __init__(self, run_dir: RunDir, is_live: Callable[[Path], bool]) -> None:
        self.run_dir = run_dir
        self._is_live = is_live
        self._read = self._predictions_of = 0
        self.record = RunRecord(run_dir.path.resolve().name)

    def refresh(self) -> str:
        """Take in what is new. The same text as before means that nothing is."""
        path, record = self.run_dir.events, self.record
        size = path.stat().st_size if path.exists() else 0
        if size < self._read:
            self._read = self._predictions_of = 0  # another run has taken the place of this one
            self.record = record = RunRecord(record.name)
        if size > self._read:
            self._take_in(path)
        predictions = self.run_dir.predictions
        written = predictions.stat().st_mtime_ns if predictions.exists() else 0
        if written != self._predictions_of:
            record.predictions, self._predictions_of = read_predictions(predictions), written
        record.is_live = self._is_live(self.run_dir.path)
        return f"{self._read}-{written}-{int(record.is_live)}"

    def _take_in(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]  # what follows the last line end is still being written
        self._read += len(whole)
        for line in whole.splitlines():
            try:
                event = from_dict(msgspec.json.decode(line))
            except (msgspec.DecodeError, msgspec.ValidationError):
                continue
            self.record.apply(event)
