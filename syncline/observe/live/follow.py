"""`Follower`: the record of a live run, updated with the events written since the last refresh.

Not here: the fold over events (`observe/report/record.py`), serving it (`server.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from syncline.config.owned_files import open_regular
from syncline.observe.report.record import RunRecord
from syncline.telemetry.predictions import read_predictions
from syncline.telemetry.run_dir import RunDir, read_lines


class Follower:
    """Follows one run; `is_live` checks whether it is still training."""

    def __init__(self, run_dir: RunDir, is_live: Callable[[Path], bool]) -> None:
        self.run_dir = run_dir
        self._is_live = is_live
        self._read = self._predictions_of = 0
        self.record = RunRecord(run_dir.path.resolve().name)

    def refresh(self) -> str:
        """Read new events and predictions. Returns a tag that changes if there was something new."""
        path, record = self.run_dir.events, self.record
        size = path.stat().st_size if path.exists() else 0
        if size < self._read:
            self._read = self._predictions_of = 0  # another run has replaced this one
            self.record = record = RunRecord(record.name)
        if size > self._read:
            self._read_events(path)
        predictions = self.run_dir.predictions
        written = predictions.stat().st_mtime_ns if predictions.exists() else 0
        if written != self._predictions_of:
            record.predictions, self._predictions_of = read_predictions(predictions), written
        record.is_live = self._is_live(self.run_dir.path)
        return f"{self._read}-{written}-{int(record.is_live)}"

    def _read_events(self, path: Path) -> None:
        with open_regular(path) as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]  # the rest is still being written
        self._read += len(whole)
        for event in read_lines(whole.splitlines()):
            self.record.apply(event)
