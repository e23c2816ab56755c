from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace

from syncline.driver import _Emitter
from syncline.telemetry.events import Event, WarningMessage, WorkerOutput
from syncline.telemetry.run_dir import RunDir


class FullDisk:
    def write(self, event: Event) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


class Seen:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


def test_events_that_cannot_be_written_are_still_shown_and_the_user_is_warned_once():
    view = Seen()
    forecaster = SimpleNamespace(on_event=lambda event: None)
    emit = _Emitter(FullDisk(), view, RunDir(Path("run")), forecaster)  # type: ignore[arg-type]
    for number in range(3):
        emit(WorkerOutput(worker_id=0, text=str(number)))
    assert [e.text for e in view.events if isinstance(e, WorkerOutput)] == ["0", "1", "2"]
    warnings = [e.message for e in view.events if isinstance(e, WarningMessage)]
    (warning,) = warnings
    assert "events.jsonl" in warning
    assert "No space left on device" in warning
