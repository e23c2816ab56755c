"""The events of a run, one JSON object per line in `events.jsonl`: `event` holds the type, `time` the Unix time.

Every event names workers by `worker_id`, the permanent number of a worker, and never by its rank in a View.

Here: the types and their JSON form. Not here: emitting them (`recorder.py`, workers, coordinator, driver) or reading
them (`run_dir.py`, observe).
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

WAITING = "waiting"
"""The phase in which a worker waits for others, where the transport can measure it. Not counted as work."""


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    time: float = msgspec.field(default_factory=time.time)


class RunStarted(_Event, frozen=True, kw_only=True, tag="run_started"):
    """The plan is made; the engine starts the workers."""

    run_dir: str
    plan: dict[str, Any]
    machine: dict[str, Any]
    resumed_from_step: int | None = None


class HeldPart(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker holds of a model that several workers hold together."""

    replica: int
    shard: int
    stage: int
    slice: int
    layers: str = ""
    """The layers of its stage, if there are several stages."""
    parameters: int
    """Bytes of its part of the trained parameters."""
    state: int
    """Bytes of its part of parameters, summed gradients and optimizer state."""
    whole: int
    """As much for the whole model, which each worker would hold without the layout."""


class WorkerReady(_Event, frozen=True, kw_only=True, tag="worker_ready"):
    """A worker is about to take its first step."""

    worker_id: int
    pid: int
    parameters: int
    collective: str
    expected_bytes_per_step: float | None = None
    """Theoretical average of the bytes that this worker sends per step."""
    part: HeldPart | None = None
    """What it holds, if it does not hold the whole model."""
    shapes: dict[str, list[int]] = {}
    """The trained parameters, by name; sent by worker 0."""
    optimizer_slots: int = 0
    """How many numbers its optimizer keeps for each parameter."""


class Progress(_Event, frozen=True, kw_only=True, tag="progress"):
    """What one worker did since its previous Progress event."""

    worker_id: int
    epoch: int
    step: int
    samples: int
    seconds: float
    cursor: int
    loss: float | None = None
    accuracy: float | None = None
    lr: float | None = None
    bytes_sent: int = 0
    bytes_inside: int = 0
    """How much of that stayed inside this worker's replica, if several workers hold it together."""
    phases: dict[str, float] = {}

    @property
    def epoch_with_batches(self) -> int:
        """The epoch whose batches are not all done: where the next one begins, some may have to be made up for."""
        return self.epoch if self.cursor else max(0, self.epoch - 1)


class ExchangeStats(_Event, frozen=True, kw_only=True, tag="exchange_stats"):
    """What one worker exchanged since its previous ExchangeStats event."""

    worker_id: int
    step: int
    steps: int
    """Steps taken in this interval."""
    exchanges: int
    bytes_sent: int
    """Bytes sent to other processes, counted at the transport."""
    bytes_received: int = 0
    """Bytes that a server sent to this worker alone; 0 for collectives."""
    staleness: dict[int, int] = {}
    """Histogram: number of other updates applied since the parameters were read -> number of own updates."""
    disagreement: float | None = None
    """Relative distance of its parameters from the average of all workers, before the last exchange."""


class TournamentMatch(_Event, frozen=True, kw_only=True, tag="tournament_match"):
    """Two models competed in a tournament round, as seen by one of the two workers."""

    worker_id: int
    step: int
    round: int
    opponent_id: int
    own_score: float
    opponent_score: float
    adopted: bool
    """Whether this worker adopted its opponent's model."""
    hyperparameters: dict[str, float] = {}
    """Its hyperparameters after the match."""


class StrategySwitched(_Event, frozen=True, kw_only=True, tag="strategy_switched"):
    """The workers use another synchronization strategy from this step on."""

    step: int
    strategy: str


class GraphDivided(_Event, frozen=True, kw_only=True, tag="graph_divided"):
    """The members of a View have divided the graph of a graph network."""

    view: int
    method: str
    """The partitioner."""
    parts: int
    nodes: int
    edges: int
    balance: float
    """The edges of the largest part, relative to the mean."""
    cut_share: float
    """The share of edges whose ends are in different parts."""
    copies: int
    """Nodes of other parts that are read, summed over the parts."""
    staleness: int = 0
    """How many steps old their values may be."""


class Evaluated(_Event, frozen=True, kw_only=True, tag="evaluated"):
    """The model was evaluated on the test data after `epoch` epochs."""

    epoch: int
    step: int
    metrics: dict[str, float]
    seconds: float


class MetricsLogged(_Event, frozen=True, kw_only=True, tag="metrics_logged"):
    """Metrics that the user's own loop logged."""

    worker_id: int
    step: int
    metrics: dict[str, float]


class CheckpointSaved(_Event, frozen=True, kw_only=True, tag="checkpoint_saved"):
    """A checkpoint is complete on disk."""

    step: int
    path: str
    bytes: int
    seconds: float


class InfoMessage(_Event, frozen=True, kw_only=True, tag="info"):
    """Information for the user, such as the result of tuning."""

    message: str
    details: dict[str, Any] = {}


class WarningMessage(_Event, frozen=True, kw_only=True, tag="warning"):
    """A problem that did not stop the run."""

    message: str
    worker_id: int | None = None


class WorkerOutput(_Event, frozen=True, kw_only=True, tag="worker_output"):
    """A line that the user's code printed on a worker."""

    worker_id: int
    text: str


class WorkerFailure(_Event, frozen=True, kw_only=True, tag="worker_failure"):
    """A worker or server process failed, and the run continues."""

    worker_id: int
    name: str
    cause: str
    step: int
    workers: int
    """Number of workers left."""
    is_replaced: bool
    detail: str = ""
    restarts_all: bool = False
    """Whether all workers restart, because their script trains with torch.distributed itself."""


class Recovered(_Event, frozen=True, kw_only=True, tag="recovered"):
    """The members of a new View completed their first step: the run recovered from a failure, or a worker joined."""

    view: int
    members: list[int]
    """The worker ids of the members, in the order of their ranks."""
    step: int
    """Steps completed, including this one."""
    repeated_steps: int = 0
    """Steps that the run went back to its last checkpoint."""
    repeated_samples: int = 0
    """Samples of the failed worker that the others train on again."""
    seconds: float = 0.0
    """Time from detecting the change of members to this event."""
    state_bytes: int = 0
    """Bytes of live state sent between workers."""


class GroupTrains(_Event, frozen=True, kw_only=True, tag="group_trains"):
    """The workers' script has created a process group of torch.distributed of its own, and trains with it.

    Syncline then knows nothing of its steps, samples and checkpoints.
    """

    members: list[int]
    """The worker ids of the members, in the order of their ranks."""
    restarts: int = 0
    """How often the script has been started again in this session."""


class WorkerSlow(_Event, frozen=True, kw_only=True, tag="worker_slow"):
    """A worker became a straggler (`is_slow`), or stopped being one."""

    worker_id: int
    step: int
    is_slow: bool
    work_s: float
    """Its time per step, without waiting for others."""
    median_s: float
    """The median of the other workers' times."""
    slowest_phase: str
    """The phase of the step in which it lags most."""


class FatalFailure(_Event, frozen=True, kw_only=True, tag="fatal_failure"):
    """The worker failure that ended the run; `message` is the first cause in full."""

    worker_id: int
    message: str


class RunEnded(_Event, frozen=True, kw_only=True, tag="run_ended"):
    """The last event of a run that did not complete: why, and how to resume it."""

    reason: str
    message: str


class Summary(_Event, frozen=True, kw_only=True, tag="summary"):
    """The last event of a run that completed or stopped early on request."""

    metrics: dict[str, float]
    samples_per_s: float
    seconds: float
    steps: int
    epochs: float
    workers: int
    run_dir: str
    stopped_early: bool = False
    has_steps: bool = True
    """False for a script that trains with torch.distributed itself, whose steps Syncline does not see."""
    peak_memory_bytes: dict[int, int] = {}
    """Peak memory of each worker while training, by worker id."""


Event = (
    RunStarted | WorkerReady | Progress | ExchangeStats | TournamentMatch | StrategySwitched | Evaluated
    | MetricsLogged | CheckpointSaved | InfoMessage | WarningMessage | WorkerOutput | WorkerFailure | Recovered
    | GraphDivided | GroupTrains | WorkerSlow | FatalFailure | RunEnded | Summary
)  # fmt: skip

_LAST_TIME = 1e11  # the year 5138
_LARGEST_COUNT = 2**53  # what floating-point numbers count exactly

_encoder = msgspec.json.Encoder()


def to_line(event: Event) -> bytes:
    """The event as one line of JSON, without the newline."""
    return _encoder.encode(event)


def to_dict(event: Event) -> dict[str, Any]:
    """The event as builtin types, for the control channel."""
    data: dict[str, Any] = msgspec.to_builtins(event)
    return data


def from_dict(data: dict[str, Any]) -> Event:
    """Rebuild an event from `to_dict` or a parsed line of JSON."""
    event: Event = msgspec.convert(data, Event, str_keys=True)  # the keys of JSON objects are strings
    return event


def is_plausible(event: Event) -> bool:
    """Whether the event's counts and times are such as a run can have. Those of a damaged line may be anything."""
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if name in ("time", "seconds") and not 0 <= value < _LAST_TIME:
            return False
        counts = value if isinstance(value, list) else value.values() if isinstance(value, dict) else (value,)
        if name not in ("plan", "machine", "details") and not all(_is_count(count) for count in counts):
            return False
    return True


def _is_count(value: object) -> bool:
    return not isinstance(value, int) or 0 <= value < _LARGEST_COUNT
