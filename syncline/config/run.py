"""`RunConfig`: how to run, as opposed to what to train (`task.py`).

Each field carries the sentence that `--help`, the TOML errors and the documentation show. Not here: reading files
(`toml.py`) and flags (`cli/`), and settings that belong to a strategy (`strategies/`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from syncline.config.amounts import bytes_of
from syncline.errors import ConfigError

__all__ = ["RunConfig", "describe"]


def _f(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How to run a task. Every default works on a laptop."""

    workers: int = _f(2, "How many workers train together.")
    engine: str = _f(
        "local",
        "Where the workers run: local (this machine), ray or ray://HOST:PORT (a Ray cluster), spark, spark://HOST:PORT "
        "or spark-local[N] (Spark's executors), or attach://HOST:PORT for processes that you start with torchrun, "
        "srun, mpirun or by hand.",
    )
    epochs: int | None = _f(None, "How often every sample is used. Default: what suits the model, else 3.")
    batch: int | None = _f(
        None, "Samples in one step, over all workers together. Default: what suits the model, else 128."
    )
    strategy: str = _f("allreduce", "How the workers keep in agreement; see: syncline strategies.")
    seed: int = _f(0, "Decides initial weights and the order of samples; the same seed gives the same run.")
    max_steps: int | None = _f(None, "Stop after this many steps, wherever the epoch is then.")
    device: Literal["auto", "cpu", "cuda", "mps"] = _f("cpu", "Where to compute; auto takes the best there is.")
    threads: int | None = _f(None, "Threads per worker. Default: cores / workers.")
    accumulate: int = _f(1, "Compute each worker's share in this many pieces, one exchange for all: saves memory.")
    checkpoint_activations: bool = _f(
        False, "Compute parts of the forward pass twice instead of keeping their results: saves memory, costs time."
    )
    memory_limit: str | float | None = _f(
        None,
        "The most memory a worker may use, such as 900MB or 2GB: shares are computed in as many pieces as that takes.",
    )
    tune: Literal["auto", "off"] = _f(
        "auto",
        "Before the first step, measure for a moment what is fastest here, and train with that: memory format, "
        "convolutions, threads, loaders. Remembered for the next run; runs of under 100 steps are left as they are.",
    )
    precision: Literal["float32", "bf16", "auto"] = _f(
        "float32",
        "What to compute in; weights are float32 always. auto takes bf16 if it is faster here and the loss stays what "
        "it is.",
    )
    memory_format: Literal["auto", "contiguous", "channels-last"] = _f(
        "auto", "How images lie in memory; the same mathematics, but not the same speed. auto is what --tune finds."
    )
    loaders: int | None = _f(
        None,
        "Processes per worker that fetch samples ahead. Default: 1 for a Dataset with code of its own, 0 (a thread) "
        "for arrays.",
    )
    evaluate_every: int = _f(1, "Evaluate on the test data after every so many epochs, and at the end; 0: never.")
    checkpoint_every_s: float = _f(30.0, "Seconds between checkpoints. One is always made at the end.")
    checkpoint_every_steps: int | None = _f(None, "Also make a checkpoint every so many steps.")
    keep_checkpoints: int = _f(3, "How many of the newest checkpoints to keep.")
    on_nan: Literal["stop", "skip"] = _f(
        "stop", "When the loss is NaN or infinite: stop the run, or skip that step's update."
    )
    batch_norm: Literal["global", "local"] = _f(
        "global",
        "Batch-norm statistics: over the global batch (same result for any number of workers), or over each "
        "worker's own share (as DDP does).",
    )
    collective: Literal["auto", "shared-memory", "process-group"] = _f(
        "auto", "How workers exchange tensors; auto takes shared memory where it works."
    )
    shared_memory_limit_mb: float | None = _f(
        None, "The most shared memory a run may take, in MB. Default: half of what is free."
    )
    exchange_timeout_s: float = _f(300.0, "The longest a worker waits for the others in one exchange.")
    on_loss: Literal["shrink-and-replace", "replace-only", "shrink", "stop"] = _f(
        "shrink-and-replace",
        "When a worker is lost: go on without it until another takes its place; wait for that one; go on without it "
        "for good; or stop the run.",
    )
    most_losses: int = _f(10, "With more lost workers than this in five minutes, the run saves its work and stops.")
    out: str = _f("runs", "The folder in which run directories are made.")
    name: str | None = _f(None, "The name of the run directory. Default: model, data and time.")
    resume: str | None = _f(
        None, "'auto' goes on with the last unfinished run of the same task; a path goes on with that run."
    )

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                allowed = ", ".join(map(repr, get_args(hint)))
                raise ConfigError(f"{name} is {getattr(self, name)!r}, but must be one of {allowed}.")
        for name, least in (
            ("workers", 1), ("accumulate", 1), ("keep_checkpoints", 1), ("seed", 0), ("evaluate_every", 0),
            ("epochs", 1), ("batch", 1), ("threads", 1), ("max_steps", 1), ("checkpoint_every_steps", 1),
            ("loaders", 0), ("most_losses", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise ConfigError(f"{name} is {value!r}, but must be a whole number.")
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}, but must be {least} or more.")
        for name in ("checkpoint_every_s", "exchange_timeout_s", "shared_memory_limit_mb"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (int, float)):
                raise ConfigError(f"{name} is {value!r}, but must be a number.")
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value:g}, but must be more than 0.")
        if not isinstance(self.checkpoint_activations, bool):
            raise ConfigError(f"checkpoint_activations is {self.checkpoint_activations!r}, but must be true or false.")
        if self.memory_limit is not None:
            bytes_of("memory_limit", self.memory_limit)
        if self.workers > 1024:
            raise ConfigError(f"workers is {self.workers}; one run has at most 1024.")

    def replace(self, **changes: Any) -> RunConfig:
        """The same with some settings changed."""
        return dataclasses.replace(self, **changes)


def describe(config_type: type) -> dict[str, str]:
    """Each field's sentence."""
    return {f.name: f.metadata["help"] for f in dataclasses.fields(config_type)}
