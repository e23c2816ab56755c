"""What a checkpoint holds, by name and type, and the version of that layout.

Here: `CheckpointState` and its two parts, which also travel between live workers: `TrainingProgress` (everything but
the tensors) and `TrainingState` (with model and optimizer). Each converts to and from the plain dict that is stored.
Not here: files (`store.py`), and when to save (`workers/checkpoints.py`).

A change to the keys or their meaning needs a new `VERSION`; `tests/unit/checkpoint/test_schema.py` reads a checkpoint
of the present one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from syncline.data.assignment import Position, Range
from syncline.errors import CheckpointError, ConfigError

VERSION = 4


def check_version(version: object, what: object = "The checkpoint") -> None:
    """Refuse a checkpoint of any other version: its keys may mean something else."""
    if version != VERSION:
        raise CheckpointError(
            f"{what} has version {version}, but this Syncline reads version {VERSION}. Use the Syncline that wrote it.",
            code="checkpoint-version",
            version=version,
            supported=VERSION,
        )


def data_has_changed(before: int, now: int) -> ConfigError:
    """The error for a run that is resumed with other training data."""
    what = f"has {now:,} samples and had {before:,}" if before != now else "has as many samples, but other ones"
    return ConfigError(
        f"The training data is not that of the run: it {what}. Restore the data, start a new run, or add "
        "--data-changed ok, which drops the rest of the epoch and begins a new one with this data.",
        code="data-changed", before=before, now=now,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """How far training is: everything but model and optimizer."""

    schedulers: list[dict[str, Any]]
    """The `state_dict` of each learning-rate scheduler."""
    learning_rates: list[float]
    """One for each parameter group."""
    metrics: dict[str, float]
    epochs_closed: int
    """The number of epochs whose end was handled: evaluation, schedule."""
    evaluated_at: int
    """The step of the last evaluation; -1 if there was none."""
    tuning: dict[str, Any] | None
    """The `Tuning` as a dict, once it is decided."""
    script: dict[str, Any] | None
    """What a user's own script keeps: its `worker.state`, loss scalers, the number of steps; None without a script."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values and the live tensors; nothing is copied."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; `CheckpointError` names the keys that are missing."""
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in data]
        if missing:
            raise CheckpointError(
                f"The checkpoint has no {', '.join(missing)}: it was not written by Syncline, or was changed since.",
                code="checkpoint-keys",
                missing=missing,
            )
        return cls(**{name: data[name] for name in names})


@dataclass(frozen=True, kw_only=True)
class TrainingState(TrainingProgress):
    """The state that all workers have in common."""

    model: dict[str, Any]
    optimizer: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CheckpointState(TrainingState):
    """Everything that is needed to resume a run at the exact sample."""

    position: Position
    requeued: tuple[Range, ...]
    """Samples before `position` that have not taken effect: they come first when the run resumes."""
    worker_states: list[dict[str, Any]]
    """What each worker's strategy keeps for itself, in the order of ranks; empty for most strategies."""
    ledger: list[str]
    """The latest lines of the ledger, which the driver may not have written to disk yet."""
    run_id: str
    """The run that wrote it: a file of another run in its place is not resumed."""
    samples: int
    """The size of the training data."""
    data_fingerprint: str

    def to_dict(self) -> dict[str, Any]:
        requeued = [list(samples) for samples in self.requeued]
        return {"version": VERSION, **vars(self), "position": asdict(self.position), "requeued": requeued}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        check_version(data.get("version"))
        found = super().from_dict(data)
        requeued = tuple((epoch, low, high) for epoch, low, high in data["requeued"])
        return cls(**{**vars(found), "position": Position(**data["position"]), "requeued": requeued})
