"""`RunConfig`: how to run, as opposed to what to train (`task.py`).

Each field has the sentence that `--help` and the documentation show. Not here: reading files (`toml.py`) and flags
(`cli/`), and the settings of a strategy (`strategies/`).
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

    workers: int = _f(2, "Number of workers (processes that train together).")
    engine: str = _f(
        "local",
        "Where workers run: local (this machine), ray or ray://HOST:PORT (a Ray cluster), spark, spark://HOST:PORT or "
        "spark-local[N] (Spark executors), or attach://HOST:PORT (processes that you start with torchrun, srun, mpirun "
        "or ssh).",
    )
    epochs: int | None = _f(
        None, "Number of passes over the training data. Default: the model's recommendation, else 3."
    )
    batch: int | None = _f(
        None, "Global batch size, summed over all workers. Default: the model's recommendation, else 128."
    )
    strategy: str = _f("allreduce", "Synchronization strategy; list them with: syncline strategies.")
    seed: int = _f(0, "Seed for initial weights and sample order. The same seed gives the same run.")
    max_steps: int | None = _f(None, "Stop after this many steps, even in the middle of an epoch.")
    device: Literal["auto", "cpu", "cuda"] = _f(
        "auto", "Device to train on. auto uses CUDA if there is a GPU for every worker, else the CPU."
    )
    threads: int | None = _f(None, "CPU threads per worker. Default: cores / workers.")
    accumulate: int = _f(
        1, "Split each worker's share of a batch into this many micro-batches and accumulate gradients. Saves memory."
    )
    checkpoint_activations: bool = _f(
        False, "Recompute activations in the backward pass instead of storing them. Saves memory, costs time."
    )
    memory_limit: str | float | None = _f(
        None,
        "Memory budget per worker, such as 900MB or 2GB. Workers use as many micro-batches as needed to stay below it.",
    )
    tune: Literal["auto", "off"] = _f(
        "auto",
        "Before the first step, measure which memory format, convolutions, threads and loaders are fastest, and use "
        "them. Results are cached; runs of fewer than 100 steps are not tuned.",
    )
    precision: Literal["float32", "bf16", "auto"] = _f(
        "float32",
        "Compute precision; weights always stay float32. auto uses bf16 if it is faster and does not change the loss.",
    )
    memory_format: Literal["auto", "contiguous", "channels-last"] = _f(
        "auto", "Memory layout of images. It affects speed, not results. auto uses what --tune finds."
    )
    loaders: int | None = _f(
        None,
        "Data-loading processes per worker. Default: 1 for a Dataset with its own code, 0 (a thread) for arrays.",
    )
    evaluate_every: int = _f(1, "Evaluate on the test data every N epochs and at the end; 0 disables evaluation.")
    checkpoint_every_s: float = _f(30.0, "Seconds between checkpoints. The final state is always saved.")
    checkpoint_every_steps: int | None = _f(None, "Also save a checkpoint every N steps.")
    keep_checkpoints: int = _f(3, "Number of most recent checkpoints to keep.")
    on_nan: Literal["stop", "skip"] = _f(
        "stop", "If the loss is NaN or infinite: stop the run, or skip the update of that step."
    )
    batch_norm: Literal["global", "local"] = _f(
        "global",
        "Batch-norm statistics over the global batch (same result for any number of workers), or over each worker's "
        "share (as in DDP).",
    )
    collective: Literal["auto", "shared-memory", "process-group"] = _f(
        "auto", "Transport for tensors between workers. auto uses shared memory where possible."
    )
    shared_memory_limit_mb: float | None = _f(
        None, "Upper limit on shared memory for a run, in MB. Default: half of the free memory."
    )
    exchange_timeout_s: float = _f(300.0, "Seconds a worker waits for the others in one exchange before it fails.")
    on_worker_failure: Literal["shrink-and-replace", "replace-only", "shrink", "stop"] = _f(
        "shrink-and-replace",
        "If a worker fails: continue without it until its replacement joins (shrink-and-replace), wait for the "
        "replacement (replace-only), continue without it (shrink), or stop the run (stop).",
    )
    max_failures: int = _f(10, "Save and stop the run after more than this many worker failures within five minutes.")
    out: str = _f("runs", "Directory in which run directories are created.")
    name: str | None = _f(None, "Name of the run directory. Default: model, data and time.")
    shared: bool = _f(False, "Let other users read the run directory.")
    resume: str | None = _f(
        None, "Resume an interrupted run: a run directory, or 'auto' for the latest unfinished run of the same task."
    )
    wait: bool = _f(
        False,
        "If the run to resume is in progress, wait until it has ended. Without this, 'resume' refuses it, and "
        "'--resume auto' leaves it alone.",
    )
    data_changed: Literal["refuse", "ok"] = _f(
        "refuse",
        "If the training data is not that of the run to resume: refuse, or drop the rest of the epoch and begin a new "
        "one (ok).",
    )

    def __post_init__(self) -> None:
        if self.device == "mps":  # type: ignore[comparison-overlap]  # what torch users may try
            raise ConfigError.for_setting(
                "device", "mps", "'auto', 'cpu' or 'cuda': workers run on Linux, where torch has no Apple GPU",
                allowed=["auto", "cpu", "cuda"],
            )  # fmt: skip
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                allowed = list(get_args(hint))
                shown = ", ".join(map(repr, allowed))
                raise ConfigError.for_setting(name, getattr(self, name), f"one of {shown}", allowed=allowed)
        for name, least in (
            ("workers", 1), ("accumulate", 1), ("keep_checkpoints", 1), ("seed", 0), ("evaluate_every", 0),
            ("epochs", 1), ("batch", 1), ("threads", 1), ("max_steps", 1), ("checkpoint_every_steps", 1),
            ("loaders", 0), ("max_failures", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise ConfigError.for_setting(name, value, "an integer")
            if value is not None and value < least:
                raise ConfigError.for_setting(name, value, f"{least} or more", least=least)
        for name in ("checkpoint_every_s", "exchange_timeout_s", "shared_memory_limit_mb"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (int, float)):
                raise ConfigError.for_setting(name, value, "a number")
            if value is not None and not value > 0:
                raise ConfigError.for_setting(name, value, "greater than 0", above=0)
        for name in ("checkpoint_activations", "shared", "wait"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError.for_setting(name, getattr(self, name), "true or false")
        if self.name is not None and not _is_file_name(self.name):
            raise ConfigError.for_setting(
                "name", self.name, "the name of a directory in --out: printable, without '/' and not starting with '.'"
            )
        if self.memory_limit is not None:
            bytes_of("memory_limit", self.memory_limit)
        if self.workers > 1024:
            raise ConfigError.for_setting("workers", self.workers, "1024 or less", most=1024)

    def replace(self, **changes: Any) -> RunConfig:
        """The same with some settings changed."""
        return dataclasses.replace(self, **changes)


def _is_file_name(name: object) -> bool:
    """Whether `name` stays in its directory and is visible there. Bytes that are not UTF-8 are not printable."""
    return isinstance(name, str) and name != "" and name.isprintable() and "/" not in name and not name.startswith(".")


def describe(config_type: type) -> dict[str, str]:
    return {f.name: f.metadata["help"] for f in dataclasses.fields(config_type)}
