"""`Quiet`: warnings and failures on stderr, and one line with the result on stdout."""

from __future__ import annotations

from typing import TextIO

from syncline.observe.formatting import cause_first, clean, duration, headline, metric_texts, speed
from syncline.observe.state import RunState
from syncline.observe.stream import unbreakable
from syncline.telemetry.events import (
    Event,
    FatalFailure,
    GroupTrains,
    Recovered,
    RunEnded,
    Summary,
    WarningMessage,
    WorkerFailure,
    WorkerSlow,
)


class Quiet:
    """Warnings and failures go to `errors`, the result to `stream`; nothing else is written."""

    def __init__(self, stream: TextIO, errors: TextIO) -> None:
        self._stream, self._errors = unbreakable(stream), unbreakable(errors)
        self._state = RunState()
        self._failure: FatalFailure | None = None

    def on_event(self, event: Event) -> None:
        self._state.apply(event)
        if isinstance(event, RunEnded):
            self._failure = None  # the RunEnded message contains it
        self._report_failure()
        match event:
            case WarningMessage():
                self._write_errors(f"warning: {event.message}".splitlines())
            case WorkerFailure() | Recovered() | WorkerSlow() | GroupTrains():
                self._write_errors(self._state.notices)
            case FatalFailure():
                self._failure = event
            case RunEnded():
                self._write_errors(cause_first(event.message, self._state.failures) or [event.reason])
            case Summary():
                self._result(event)

    def close(self) -> None:
        """Report a failure that no RunEnded event followed."""
        self._report_failure()

    def _report_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            self._write_errors([f"worker {failure.worker_id} failed: {headline(failure.message)}"])

    def _write_errors(self, lines: list[str]) -> None:
        self._errors.write("".join(f"{clean(line)}\n" for line in lines))
        self._errors.flush()

    def _result(self, event: Summary) -> None:
        seconds = duration(event.seconds)
        seen = [f"{event.steps} steps", seconds, *speed(event.samples_per_s)] if event.has_steps else [seconds]
        parts = [*metric_texts(event.metrics), *seen, event.run_dir]
        if event.stopped_early:
            parts.append("stopped early")
        self._stream.write("  ".join(parts) + "\n")
        self._stream.flush()
