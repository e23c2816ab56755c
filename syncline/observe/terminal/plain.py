"""`PlainLines`: a run as lines of text, for logs, CI and cron, without escape codes.

Here: which events print a line, and when. Not here: the state they are computed from (`state.py`).
"""

from __future__ import annotations

from functools import partial
from typing import TextIO

from syncline.observe.division_text import division_text
from syncline.observe.formatting import (
    accuracy,
    cause_first,
    clean,
    count,
    duration,
    headline,
    metric,
    metric_texts,
    number,
    peak_memory,
    size,
    speed,
)
from syncline.observe.state import MOST_WARNINGS, RunState
from syncline.observe.stream import unbreakable
from syncline.observe.terminal.curve import chart
from syncline.observe.terminal.highlights import next_steps, result_series
from syncline.telemetry.events import (
    Evaluated,
    Event,
    FatalFailure,
    GraphDivided,
    GroupTrains,
    InfoMessage,
    Progress,
    Recovered,
    RunEnded,
    RunStarted,
    StrategySwitched,
    Summary,
    WarningMessage,
    WorkerFailure,
    WorkerOutput,
    WorkerSlow,
)

_EVERY_S = 10.0
_CHART = (60, 5)


class PlainLines:
    """A line at the start, per epoch or every ten seconds, for each warning or failure, and the result.

    The reason for an early end goes to `errors`, if given.
    """

    def __init__(self, stream: TextIO, errors: TextIO | None = None) -> None:
        self._stream = unbreakable(stream)
        self._errors = unbreakable(errors) if errors is not None else self._stream
        self._state = RunState()
        self._last_line_time: float | None = None
        self._last_line_step = -1
        self._failure: FatalFailure | None = None

    def on_event(self, event: Event) -> None:
        state = self._state
        state.apply(event)
        if isinstance(event, RunEnded):
            self._failure = None  # the RunEnded message contains it
        self._report_failure()
        match event:
            case RunStarted():
                self._started(event)
            case Progress():
                self._progress(event)
            case Evaluated():
                results = [*metric_texts(event.metrics), f"evaluated in {duration(event.seconds)}"]
                self._line(f"epoch {event.epoch}/{state.plan.epochs}", *results)
            case StrategySwitched():
                self._text(f"strategy from step {event.step}: {event.strategy}")
            case InfoMessage():
                self._text(event.message)
            case GraphDivided():
                self._text(division_text(event))
            case WarningMessage() if state.warning_count <= MOST_WARNINGS:
                who = f" (worker {event.worker_id})" if event.worker_id is not None else ""
                self._text(f"warning{who}: {event.message}")
            case WarningMessage() if state.warning_count == MOST_WARNINGS + 1:
                self._text(f"further warnings: {state.run_dir}/events.jsonl")
            case WorkerOutput():
                self._line(f"[worker {event.worker_id}] {clean(event.text)}" if event.worker_id else clean(event.text))
            case WorkerFailure() | Recovered() | WorkerSlow() | GroupTrains():
                for line in state.notices:
                    self._text(line)
            case FatalFailure():
                self._failure = event
            case RunEnded():
                self._checkpoint()
                self._errors.write("".join(f"{clean(line)}\n" for line in cause_first(event.message, state.failures)))
                self._errors.flush()
            case Summary():
                self._summary(event)

    def close(self) -> None:
        """Report a failure that no RunEnded event followed."""
        self._report_failure()

    def _started(self, event: RunStarted) -> None:
        plan = self._state.plan
        length = "until it has converged" if plan.kind in ("fit", "graph") else "length set by the script"
        if not plan.is_own_loop:
            length = f"{count(plan.epochs, 'epoch')} of {plan.train_samples:,} samples, {plan.total_steps} steps"
        self._line(f"{', '.join(self._state.title)}: {length}")
        for note in plan.notes:
            self._text(f"note: {note}")
        self._line(f"run directory: {event.run_dir}")
        self._last_line_time = event.time

    def _progress(self, event: Progress) -> None:
        state = self._state
        if event.worker_id != state.reporter_id:
            return
        if self._last_line_time is None:
            self._last_line_time = event.time - event.seconds
        is_due = state.latest_time - self._last_line_time >= _EVERY_S
        epoch_ended = state.is_between_epochs and not state.plan.is_own_loop
        if not (is_due or epoch_ended) or state.step == self._last_line_step:
            return
        self._last_line_time, self._last_line_step = state.latest_time, state.step
        total = state.plan.total_steps
        parts = [f"epoch {state.epoch}/{state.plan.epochs}"] if state.epoch is not None else []
        parts += [
            f"step {state.step}/{total}" if total else f"step {state.step}",
            *speed(state.samples_per_s),
        ]
        if not state.plan.is_own_loop and state.loss is not None:
            parts.append(f"loss {number(state.loss)}")
        if state.accuracy is not None:
            parts.append(f"accuracy {accuracy(state.accuracy)}")
        if state.plan.is_own_loop:
            parts += metric_texts(state.logged)
        if state.left_s is not None and (state.fraction or 0.0) < 1:
            parts.append(f"{duration(state.left_s)} left")
        self._line(*parts)

    def _summary(self, event: Summary) -> None:
        state = self._state
        epochs = "" if state.plan.is_own_loop else f"{event.epochs:.4g} epoch{'s' * (event.epochs != 1)}, "
        how = "stopped early after" if event.stopped_early else "finished"
        done = ": ".join([f"{epochs}{event.steps} steps in {duration(event.seconds)}", *speed(event.samples_per_s)])
        if not event.has_steps:
            done = f"the script in {duration(event.seconds)}"
        self._line(f"{how} {done} with {count(event.workers, 'worker')}")
        memory = peak_memory(event.peak_memory_bytes)
        if memory is not None:
            self._line(f"peak memory: {memory}")
        for line in state.stragglers.summary(event.time):
            self._line(line)
        series = result_series(state)
        if series is not None:
            self._line(series.name)
            rows = chart(
                series.values, *_CHART, first=series.first, last=series.last,
                label=partial(metric, series.name), ascii_only=not self._stream.encoding.lower().startswith("utf"),
            )  # fmt: skip
            for row in rows:
                self._line(row)
        if event.metrics:
            self._line(*metric_texts(event.metrics))
        self._checkpoint()
        self._line(f"run directory: {event.run_dir}")
        for what, why in next_steps(state):
            self._line(f"next: {what}", f"({why})")

    def _report_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            self._line(f"{self._state.plan.name_of(failure.worker_id)} failed: {headline(failure.message)}")

    def _checkpoint(self) -> None:
        saved = self._state.checkpoint
        if saved is not None:
            self._line(f"last checkpoint: step {saved.step}, {size(saved.bytes)}")

    def _text(self, text: str) -> None:
        for line in text.strip().splitlines():
            self._line(clean(line))

    def _line(self, *parts: str) -> None:
        self._stream.write("  ".join(parts).rstrip() + "\n")
        self._stream.flush()
