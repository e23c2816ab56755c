"""`RunConfig`: how to run, as opposed to what to train (`task.py`).

Each field has the sentence that `--help` and the documentation show. Not here: reading files (`toml.py`) and flags
(`cli/`), and the settings of a strategy (`strategies/`).
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from syncline.config.amounts import bytes_of
from syncline.errors import ConfigError, ConfigFileError, check_options

__all__ = ["RunConfig", "describe"]

FOR_FITS = (
    "workers", "seed", "threads", "collective", "shared_memory_limit_mb", "on_worker_failure", "max_failures",
    "exchange_timeout_s", "checkpoint_every_s", "checkpoint_every_steps", "keep_checkpoints", "out", "name", "shared",
    "resume", "wait",
)  # fmt: skip
"""The settings that mean something for `syncline fit`."""
_MOST = 2**31 - 1
_LIMITS = {
    "workers": (1, 1024),
    "epochs": (1, _MOST),
    "batch": (1, _MOST),
    "seed": (0, 2**63 - 1),  # torch and the sample order take 64 bits, and rivals add their number to it
    "max_steps": (1, _MOST),
    "threads": (1, 1024),
    "accumulate": (1, _MOST),
    "loaders": (0, 1024),
    "evaluate_every": (0, _MOST),
    "checkpoint_every_steps": (1, _MOST),
    "keep_checkpoints": (1, _MOST),
    "max_failures": (0, _MOST),
}
"""The least and the largest value of each integer."""
_LONGEST_S = 1e9
"""Thirty years. What waits that long in C would overflow with much more."""


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
    strategy: str = _f(
        "allreduce",
        "Synchronization strategy; list them with: syncline strategies. auto measures the model for a few seconds and "
        "chooses the one that should be the quickest to the same accuracy; auto(exact) chooses among those that "
        "compute what one process would; auto(adapt) chooses again when the network or a worker becomes slow.",
    )
    network: str | None = _f(
        None,
        "The link of each host, if the workers are on several: rate, latency or both, such as 100mbit,1ms. Steps are "
        "predicted with it, and --strategy auto chooses by it. Default: 1gbit,100us.",
    )
    layout: str = _f(
        "replicated",
        "How a replica of the model is spread over workers: replicated (each holds all of it), sharded or sharded(n) "
        "(an equal part of everything), pipeline(n) (some of its layers), tensor(n) (a slice of each large layer), or "
        'a product such as "pipeline(2) x sharded(2)". The workers of a replica must be on one machine.',
    )
    partition: str | None = _f(
        None,
        "How the graph of a graph network is divided over workers: greedy (few edges between parts), blocks, hash, "
        "metis (if pymetis is installed), vertex-cut (HDRF) or vertex-hash. Default: greedy.",
    )
    halo: str = _f(
        "exact",
        "Values of neighbors in other workers' parts of a graph: exact (of the same step; the same result as one "
        "worker), or stale(S) (up to S steps old, which moves fewer bytes).",
    )
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
        "Memory budget per worker, such as 900MB or 2GB. Workers use as many micro-batches as needed to stay below it. "
        "With a --layout, what does not fit is refused before the start, with the nearest layout that does.",
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
        for name in ("out", "resume"):
            if isinstance(getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        for name, hint in get_type_hints(type(self)).items():
            _check_type(name, hint, getattr(self, name))
        for name, (least, most) in _LIMITS.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError.for_setting(name, value, f"{least} or more", least=least)
            if value is not None and value > most:
                raise ConfigError.for_setting(name, value, f"{most} or less", most=most)
        for name in ("checkpoint_every_s", "exchange_timeout_s", "shared_memory_limit_mb"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError.for_setting(name, value, "greater than 0", above=0)
            if value is not None and value > _LONGEST_S:
                raise ConfigError.for_setting(name, value, f"{_LONGEST_S:,.0f} or less", most=_LONGEST_S)
        if self.name is not None and not _is_file_name(self.name):
            raise ConfigError.for_setting(
                "name", self.name, "the name of a directory in --out: printable, without '/' and not starting with '.'"
            )
        if self.memory_limit is not None:
            bytes_of("memory_limit", self.memory_limit)

    def replace(self, **changes: Any) -> RunConfig:
        """The same with some settings changed."""
        return dataclasses.replace(self, **changes)


def _is_file_name(name: object) -> bool:
    """Whether `name` stays in its directory and is visible there. Bytes that are not UTF-8 are not printable."""
    return isinstance(name, str) and name != "" and name.isprintable() and "/" not in name and not name.startswith(".")


def describe(config_type: type) -> dict[str, str]:
    return {f.name: f.metadata["help"] for f in dataclasses.fields(config_type)}


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a run's config.json; `ConfigFileError` unless they are those of a `RunConfig`."""
    try:
        settings = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else None
        why = error.strerror if isinstance(error, OSError) else f"it is not JSON ({error})"
        raise _damaged(path, line, f"The settings of the run cannot be read: {why}.") from error
    if not isinstance(settings, dict):
        raise _damaged(path, None, f"The settings of the run are {type(settings).__name__}, not an object.")
    try:
        check_options("A run", settings, [f.name for f in dataclasses.fields(RunConfig)], kind="setting")
        RunConfig(**settings)
    except ConfigError as error:
        raise ConfigFileError.at(path, None, error) from error
    return settings


def _damaged(path: Path, line: int | None, problem: str) -> ConfigFileError:
    fix = "Restore the file, or start a new run."
    return ConfigFileError.at(path, line, ConfigError(f"{problem} {fix}", code="damaged-config"))


def _check_type(name: str, hint: Any, value: Any) -> None:
    """Refuse a value of another type than declared: it may come from a file or from Python."""
    kinds = get_args(hint) or (hint,)
    if value is None and type(None) in kinds:
        return
    if get_origin(hint) is Literal:
        if value not in kinds:
            shown = ", ".join(map(repr, kinds))
            raise ConfigError.for_setting(name, value, f"one of {shown}", allowed=list(kinds))
    elif str in kinds and isinstance(value, str):
        _check_text(name, value)
    elif float in kinds:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError.for_setting(name, value, "a number" if str not in kinds else "a number or a text")
    elif int in kinds:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError.for_setting(name, value, "an integer")
    elif bool in kinds:
        if not isinstance(value, bool):
            raise ConfigError.for_setting(name, value, "true or false")
    elif str in kinds:
        raise ConfigError.for_setting(name, value, "a text")


def _check_text(name: str, value: str) -> None:
    """Refuse text that can be neither stored as JSON nor be part of a path."""
    if "\0" in value:
        raise ConfigError.for_setting(name, value, "text without a null character")
    try:
        value.encode()
    except UnicodeEncodeError:
        shown = value.encode(errors="backslashreplace").decode()
        raise ConfigError(
            f"{name} is '{shown}', which is not valid UTF-8. Choose another.",
            code="not-utf8", setting=name, value=shown,
        ) from None  # fmt: skip
