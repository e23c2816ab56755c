"""`Quiet`: what must not be missed on stderr, and at the end one line with the result."""

from __future__ import annotations

from typing import TextIO

from syncline.telemetry.events import Event, RunEnded, Summary, Warned, WentOn, WorkerFailure, WorkerLost, WorkerSlow
from syncline.view.state import RunState
from syncline.view.stream import unbreakable
from syncline.view.words import cause_first, clean, duration, headline, metric_words, rate

__all__ = ["Quiet"]


class Quiet:
    """Warnings and failures go to `errors`, the result to `stream`; nothing else is written."""

    def __init__(self, stream: TextIO, errors: TextIO) -> None:
        self._stream, self._errors = unbreakable(stream), unbreakable(errors)
        self._state = RunState()
        self._failure: WorkerFailure | None = None

    def on_event(self, event: Event) -> None:
        """Write it if it must not be missed."""
        self._state.apply(event)
        if isinstance(event, RunEnded):
            self._failure = None  # the end of the run tells it whole
        self._tell_failure()
        match event:
            case Warned():
                self._complain(f"warning: {event.message}".splitlines())
            case WorkerLost() | WentOn() | WorkerSlow():
                self._complain(self._state.news)
            case WorkerFailure():
                self._failure = event
            case RunEnded():
                self._complain(cause_first(event.message, self._state.failures) or [event.reason])
            case Summary():
                self._result(event)

    def close(self) -> None:
        """Tell what was held back."""
        self._tell_failure()

    def _tell_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            self._complain([f"worker {failure.rank} is lost: {headline(failure.message)}"])

    def _complain(self, lines: list[str]) -> None:
        self._errors.write("".join(f"{clean(line)}\n" for line in lines))
        self._errors.flush()

    def _result(self, event: Summary) -> None:
        speed = f"{rate(event.samples_per_s)} samples/s"
        parts = [*metric_words(event.metrics), f"{event.steps} steps", duration(event.seconds), speed, event.run_dir]
        if event.stopped_early:
            parts.append("stopped early")
        self._stream.write("  ".join(parts) + "\n")
        self._stream.flush()
