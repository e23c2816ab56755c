"""The events of a run. One JSON object a line in `events.jsonl`, the kind under the key `event`, the time under `time`.

Here: their types and their text form. Not here: who emits them (`recorder.py`, driver) and who reads them
(`reader.py`, views, reports).
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

__all__ = [
    "WAITING", "CheckpointSaved", "Contest", "Evaluated", "Event", "Exchanged", "Logged", "Noted", "Progress",
    "RunEnded", "RunStarted", "StrategySwitched", "Summary", "Warned", "WentOn", "WorkerFailure", "WorkerLost",
    "WorkerOutput", "WorkerReady", "WorkerSlow", "from_dict", "to_dict", "to_line",
]  # fmt: skip

WAITING = "waiting"
"""The phase of a step that is no part of it: what a worker waited for others, where the transport can tell."""


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    time: float = msgspec.field(default_factory=time.time)


class RunStarted(_Event, frozen=True, kw_only=True, tag="run_started"):
    """The plan is made and the workers are being started."""

    run_dir: str
    plan: dict[str, Any]
    machine: dict[str, Any]
    resumed_from_step: int | None = None


class WorkerReady(_Event, frozen=True, kw_only=True, tag="worker_ready"):
    """A worker is about to take its first step."""

    rank: int
    pid: int
    parameters: int
    collective: str
    expected_bytes_per_step: float | None = None
    """What the worker should send in a step on average, by theory."""


class Progress(_Event, frozen=True, kw_only=True, tag="progress"):
    """What one worker did since its last event of this kind."""

    rank: int
    epoch: int
    step: int
    samples: int
    seconds: float
    cursor: int
    loss: float | None = None
    accuracy: float | None = None
    lr: float | None = None
    bytes_sent: int = 0
    phases: dict[str, float] = {}


class Exchanged(_Event, frozen=True, kw_only=True, tag="exchanged"):
    """What one worker's strategy did since its last event of this kind."""

    rank: int
    step: int
    steps: int
    """How many steps the worker took in this time."""
    exchanges: int
    """How often it exchanged."""
    bytes_sent: int
    """What it made known to others, as counted at the transport."""
    bytes_received: int = 0
    """What a server sent to this worker alone; 0 where what is sent is for everybody."""
    staleness: dict[int, int] = {}
    """How many of its updates were applied when so many others had been since the parameters were read."""
    disagreement: float | None = None
    """How far its parameters were from what all have in common, relative to that, before the last exchange."""


class Contest(_Event, frozen=True, kw_only=True, tag="contest"):
    """Two models met in a tournament, as seen by one of the two workers."""

    rank: int
    step: int
    round: int
    rival: int
    own_score: float
    rival_score: float
    took_over: bool
    """Whether this worker goes on with its rival's model."""
    hyperparameters: dict[str, float] = {}
    """What it goes on with."""


class StrategySwitched(_Event, frozen=True, kw_only=True, tag="strategy_switched"):
    """From this step on, the workers keep in agreement in another way."""

    step: int
    strategy: str


class Evaluated(_Event, frozen=True, kw_only=True, tag="evaluated"):
    """The test data was evaluated after `epoch` epochs."""

    epoch: int
    step: int
    metrics: dict[str, float]
    seconds: float


class Logged(_Event, frozen=True, kw_only=True, tag="logged"):
    """Numbers that the user's own loop reported."""

    rank: int
    step: int
    metrics: dict[str, float]


class CheckpointSaved(_Event, frozen=True, kw_only=True, tag="checkpoint_saved"):
    """A checkpoint is complete on disk."""

    step: int
    path: str
    bytes: int
    seconds: float


class Noted(_Event, frozen=True, kw_only=True, tag="noted"):
    """Something that is good to know: what was found out by measuring, say."""

    message: str
    details: dict[str, Any] = {}


class Warned(_Event, frozen=True, kw_only=True, tag="warned"):
    """Something the user should know that did not stop the run."""

    message: str
    rank: int | None = None


class WorkerOutput(_Event, frozen=True, kw_only=True, tag="worker_output"):
    """A line that a worker's code printed."""

    rank: int
    text: str


class WorkerLost(_Event, frozen=True, kw_only=True, tag="worker_lost"):
    """A process was lost, and the run goes on."""

    rank: int
    name: str
    cause: str
    step: int
    workers: int
    """How many workers are left."""
    is_replaced: bool
    detail: str = ""


class WentOn(_Event, frozen=True, kw_only=True, tag="went_on"):
    """The first step in a new View is done."""

    view: int
    members: list[int]
    step: int
    """How many steps are done with this one."""
    redone: int = 0
    """How many steps the run went back."""
    made_up: int = 0
    """How many samples are made up for that were dealt out before."""
    seconds: float = 0.0
    """From when this worker noticed to this event."""
    bytes_of_state: int = 0
    """How much live state travelled between workers."""


class WorkerSlow(_Event, frozen=True, kw_only=True, tag="worker_slow"):
    """A worker needs much longer for its own part of a step than the others, or does so no longer."""

    rank: int
    step: int
    is_slow: bool
    work_s: float
    """What it needs for a step, without waiting for others."""
    others_s: float
    """What the others need, in the middle."""
    mostly: str
    """In which part of the step it lags most."""


class WorkerFailure(_Event, frozen=True, kw_only=True, tag="worker_failure"):
    """A worker ended before its work did; `message` is the first cause, whole."""

    rank: int
    message: str


class RunEnded(_Event, frozen=True, kw_only=True, tag="run_ended"):
    """The last event of a run that did not reach its end: why, and how to go on."""

    reason: str
    message: str


class Summary(_Event, frozen=True, kw_only=True, tag="summary"):
    """The last event of a run that reached its end."""

    metrics: dict[str, float]
    samples_per_s: float
    seconds: float
    steps: int
    epochs: float
    workers: int
    run_dir: str
    stopped_early: bool = False
    peak_memory_bytes: dict[int, int] = {}
    """The most memory that each worker had in use while training, by its number."""


Event = (
    RunStarted | WorkerReady | Progress | Exchanged | Contest | StrategySwitched | Evaluated | Logged | CheckpointSaved
    | Noted | Warned | WorkerOutput | WorkerLost | WentOn | WorkerSlow | WorkerFailure | RunEnded | Summary
)  # fmt: skip

_encoder = msgspec.json.Encoder()


def to_line(event: Event) -> bytes:
    """The event as one line of JSON, without the newline."""
    return _encoder.encode(event)


def to_dict(event: Event) -> dict[str, Any]:
    """The event as plain data, for the control channel."""
    data: dict[str, Any] = msgspec.to_builtins(event)
    return data


def from_dict(data: dict[str, Any]) -> Event:
    """The event that `to_dict` or a line of JSON described."""
    event: Event = msgspec.convert(data, Event, str_keys=True)  # the keys of JSON objects are strings
    return event
