"""From the settings, the task and the machines to a `Plan`. Pure: same inputs, same plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from syncline.compute.tuning import Choice
from syncline.config.amounts import bytes_of
from syncline.config.run import RunConfig
from syncline.errors import ConfigError, plural
from syncline.layouts.layout import REPLICATED, read_layout
from syncline.layouts.partitioned import Partitioned
from syncline.planning.machine import Machine
from syncline.planning.plan import Plan, WorkerPlan
from syncline.strategies.method import Method, RunConditions
from syncline.strategies.reading import read_strategy

_DEFAULT_EPOCHS = 3
_DEFAULT_BATCH = 128
_FEWEST_STEPS_TO_TUNE = 100
_DECIDES_RESULT = ("seed", "strategy", "batch", "accumulate", "batch_norm")
_LARGEST = 2**63
"""What the control channel and the ledger can hold."""


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """What a plan needs to know about the task."""

    kind: Literal["train", "own-loop", "fit", "graph"]
    model: str
    data: str
    fingerprint: str
    """Of the whole task: `--resume auto` resumes a run with the same one."""
    data_fingerprint: str = ""
    """Of the training data, as far as it can be known without reading all of it."""
    train_samples: int = 0
    test_samples: int = 0
    recommended_epochs: int | None = None
    recommended_batch: int | None = None
    clip_norm: float | None = None
    graph: Literal["", "parts", "samples"] = ""
    """For a graph network: whether workers divide the graph into parts, or each draws neighbors in the whole of it."""
    learns_by_sums: bool = False
    """Whether what the workers exchange are exact sums over the samples, not gradients."""


def saved_plan(data: dict[str, Any], path: Path) -> Plan:
    """The plan in a run's plan.json, to resume from; `ConfigError` if a field is missing or impossible."""
    try:
        plan = Plan.from_dict(data)
    except msgspec.ValidationError as error:
        raise _damaged_plan(path, str(error)) from error
    least = {"seed": 0, "epochs": 1, "train_samples": 0, "test_samples": 0, "held_out": 0, "servers": 0, "batch": 1}
    if plan.kind == "train":
        least["train_samples"] = 1
    for name, smallest in least.items():
        if not smallest <= getattr(plan, name) < _LARGEST:
            raise _damaged_plan(path, f"{name} is {getattr(plan, name)}")
    if not plan.workers:
        raise _damaged_plan(path, "it has no workers")
    return plan


def check_same_method(config: RunConfig, plan: Plan, path: Path, changes: Collection[str]) -> None:
    """Refuse settings, read from `path`, that contradict the plan in what decides the result, except `changes`."""
    for name in _DECIDES_RESULT:
        setting, planned = getattr(config, name), getattr(plan, name)
        is_same = setting == planned or (name == "batch" and (setting is None or planned == plan.train_samples))
        if not is_same and name not in changes:
            raise ConfigError(
                f"{path} says that {name} is {setting!r}, but the run was planned with {planned!r}. To change it, use "
                f"an option of resume, where there is one, or start a new run. Otherwise set it to {planned!r} again.",
                code="changed-config", setting=name, value=setting, planned=planned, path=str(path),
            )  # fmt: skip


def _damaged_plan(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is not a plan of this version of Syncline: {why}. The run directory is damaged, or another version "
        "wrote it: restore the file, resume with that version, or start a new run.",
        code="damaged-plan",
        path=str(path),
    )


def make_plan(facts: TaskFacts, config: RunConfig, machine: Machine, hosts: Sequence[str] = ()) -> Plan:
    """Decide everything that can be decided before a process starts.

    Workers are assigned to the `hosts` in turn; without any, all of them run on this machine.
    """
    hosts = hosts or (machine.host,)
    hosts_of_workers = [hosts[rank % len(hosts)] for rank in range(config.workers)]
    notes: list[str] = []
    method = read_strategy(config.strategy).method
    held = held_out_samples(method.held_out, facts.train_samples, config.workers)
    _check_script_settings(facts, config)
    _check_sums(facts, config, method)
    layout = _layout(facts, config)
    samples = facts.train_samples - held
    length = _length(facts, config, samples, notes) if facts.kind != "graph" else _Length(1, 1, 0, 0)
    device = _device(facts, config, machine, notes)
    collective = _collective(config, machine, device, len(set(hosts_of_workers)), notes)
    shares_memory_on_hosts = len(set(hosts_of_workers)) > 1 and _can_share_memory(config, machine, device)
    conditions = RunConditions(
        workers=config.workers,
        hosts=len(set(hosts_of_workers)),
        hosts_of_workers=tuple(hosts_of_workers),
        on_worker_failure=config.on_worker_failure,
        shares_memory=collective != "process-group" or shares_memory_on_hosts,
        is_own_loop=facts.kind == "own-loop",
        clip_norm=facts.clip_norm,
    )
    method.check_run(conditions)
    read_layout(layout).check(config.strategy, method, conditions)
    decided: dict[str, Any] = {
        "layout": layout,
        **length._asdict(),
        "workers": _workers(hosts_of_workers, device, config.threads or max(1, machine.cores // config.workers)),
        "collective": collective,
        "train_samples": facts.train_samples - held,
        "shared_memory_bytes": _shared_memory_bytes(config, machine),
        "shares_memory_on_hosts": shares_memory_on_hosts,
        "servers": method.servers,
        "held_out": held,
        "precision": "bf16" if config.precision == "bf16" else "float32",
        "memory_format": "channels-last" if config.memory_format == "channels-last" else "contiguous",
        "memory_limit_bytes": None if config.memory_limit is None else bytes_of("memory_limit", config.memory_limit),
        "measured": _measured(facts, config, length.total_steps),
        "notes": tuple(notes),
    }
    # Every other field of a plan is a setting or a fact of the task, under the same name.
    names = {field.name for field in fields(Plan)}
    given = {name: value for name, value in {**vars(facts), **vars(config)}.items() if name in names}
    return Plan(**{**given, **decided})


def _layout(facts: TaskFacts, config: RunConfig) -> str:
    """The layout of the run: that of the settings, or the division of a graph."""
    divides = config.partition is not None or config.halo != "exact"
    if facts.graph != "parts":
        if divides:
            why = "it draws neighbors in the whole graph" if facts.graph else f"{facts.model} is no graph network"
            raise ConfigError(
                f"--partition and --halo are not possible: {why}. They say how a graph is divided over workers; leave "
                "them out.", code="no-partition", model=facts.model, partition=config.partition, halo=config.halo,
            )  # fmt: skip
        if facts.graph:
            _check_graph_settings(facts, config)
        return config.layout
    _check_graph_settings(facts, config)
    return str(Partitioned.of(config.partition, config.halo))


def _check_graph_settings(facts: TaskFacts, config: RunConfig) -> None:
    """Refuse what a graph network does not have."""
    defaults = RunConfig()
    for name, why in (
        ("layout", "a graph network is divided by --partition"),
        ("accumulate", "each step computes the graph as a whole"),
        ("memory_limit", "each step computes the graph as a whole; more workers need less memory each"),
        ("checkpoint_activations", "its layers exchange values with other workers"),
        ("precision", "torch's sparse products need float32"),
        ("device", "it computes on CPUs"),
    ):
        value = getattr(config, name)
        if value != getattr(defaults, name) and (name, value) not in (("layout", REPLICATED), ("device", "cpu")):
            raise ConfigError(
                f"--{name.replace('_', '-')} {value} is not possible with {facts.model}: {why}. Leave it out.",
                code="graph-setting", setting=name, value=value, model=facts.model,
            )  # fmt: skip


def _workers(hosts: Sequence[str], device: str, threads: int) -> tuple[WorkerPlan, ...]:
    def device_of(rank: int) -> str:
        # Each worker gets the next GPU of its host. With too few GPUs, torch names the missing one when it is used.
        return f"cuda:{hosts[:rank].count(hosts[rank])}" if device == "cuda" else device

    return tuple(
        WorkerPlan(rank=rank, host=host, device=device_of(rank), threads=threads) for rank, host in enumerate(hosts)
    )


def _device(facts: TaskFacts, config: RunConfig, machine: Machine, notes: list[str]) -> Literal["cpu", "cuda"]:
    if config.device == "cpu" or facts.graph:
        return "cpu"
    if config.device == "cuda":
        if not machine.gpus:
            raise ConfigError(
                "--device cuda needs an NVIDIA GPU, its driver and a torch build with CUDA; none was found. "
                "Use --device cpu or auto.",
                code="no-gpu", setting="device", value="cuda", allowed=["auto", "cpu"],
            )  # fmt: skip
        return "cuda"
    if 0 < machine.gpus < config.workers:
        notes.append(
            f"Training on the CPU: {plural(config.workers, 'worker')} would need a GPU each, and there "
            f"{'is 1' if machine.gpus == 1 else f'are {machine.gpus}'}. Use --workers {machine.gpus} to train on "
            f"{'it' if machine.gpus == 1 else 'them'}."
        )
    return "cuda" if machine.gpus >= config.workers else "cpu"


def _check_script_settings(facts: TaskFacts, config: RunConfig) -> None:
    if facts.kind != "own-loop":
        return
    if config.precision != "float32" or config.memory_format != "auto":
        raise ConfigError(
            "--precision and --memory-format do not apply to a script. Use torch.autocast and "
            "model.to(memory_format=...) in the script.",
            code="set-in-script",
            settings=["precision", "memory_format"],
        )
    if config.checkpoint_activations or config.memory_limit is not None:
        raise ConfigError(
            "--memory-limit and --checkpoint-activations do not apply to a script. Use smaller micro-batches and "
            "torch.utils.checkpoint in the script.",
            code="set-in-script",
            settings=["memory_limit", "checkpoint_activations"],
        )


def _check_sums(facts: TaskFacts, config: RunConfig, method: Method) -> None:
    """Sums over the samples mean something only as a whole and exactly, on workers that hold the whole model."""
    if not facts.learns_by_sums:
        return
    for setting, value, fits, instead in (
        ("strategy", config.strategy, method.sums_exact_gradients, "allreduce"),
        ("layout", config.layout, read_layout(config.layout).is_replicated, "replicated"),
    ):
        if not fits:
            raise ConfigError(
                f"--{setting} {value} is not possible with {facts.model}: it learns by counts and sums over "
                f"all samples of a step, which must be added up exactly before they count. Use --{setting} {instead}.",
                code="learns-by-sums", setting=setting, value=value, nearest=instead,
            )  # fmt: skip


class _Length(NamedTuple):
    """The length of a run."""

    epochs: int
    batch: int
    steps_per_epoch: int
    total_steps: int


def _length(facts: TaskFacts, config: RunConfig, train_samples: int, notes: list[str]) -> _Length:
    epochs = config.epochs or facts.recommended_epochs or _DEFAULT_EPOCHS
    batch = config.batch or facts.recommended_batch or _DEFAULT_BATCH
    if facts.kind == "train":
        if facts.train_samples == 0:
            raise ConfigError("The training data is empty.", code="no-data")
        if batch > train_samples:
            notes.append(
                f"The batch size of {batch} exceeds the {train_samples} training samples: each epoch is one step."
            )
            batch = train_samples
        if config.workers > batch:
            raise ConfigError(
                f"{config.workers} workers cannot share a batch of {plural(batch, 'sample')}. Set --workers to {batch} "
                "or less, or a larger --batch.",
                code="batch-too-small",
                workers=config.workers,
                batch=batch,
            )
    steps_per_epoch = -(-train_samples // batch)
    total_steps = steps_per_epoch * epochs
    if config.max_steps is not None:
        total_steps = min(total_steps, config.max_steps) if facts.kind == "train" else config.max_steps
    return _Length(epochs, batch, steps_per_epoch, total_steps)


def _collective(
    config: RunConfig, machine: Machine, device: str, hosts: int, notes: list[str]
) -> Literal["solo", "shared-memory", "process-group"]:
    if config.workers == 1:
        return "solo"
    reason = machine.no_shared_memory_because
    if device != "cpu":
        reason = f"the workers train on {device}, and shared memory is for CPU workers"
    if hosts > 1:
        reason = f"the workers are on {hosts} hosts"
    if config.collective == "process-group":
        return "process-group"
    if reason is None:
        return "shared-memory"
    if config.collective == "shared-memory":
        raise ConfigError(
            f"--collective shared-memory is not possible: {reason}. Use --collective process-group.",
            code="no-shared-memory", setting="collective", value="shared-memory", reason=reason,
        )  # fmt: skip
    notes.append(f"Workers communicate through torch.distributed, because {reason}.")
    return "process-group"


def _can_share_memory(config: RunConfig, machine: Machine, device: str) -> bool:
    return config.collective == "auto" and device == "cpu" and machine.no_shared_memory_because is None


def _measured(facts: TaskFacts, config: RunConfig, steps: int) -> tuple[Choice, ...]:
    """What the workers tune by measuring. In a short run, measuring would take longer than it could save.

    How long a script runs is not known before; its workers decide when to measure.
    """
    chosen: list[Choice] = []
    if facts.graph:
        return ()
    if config.tune == "auto" and (steps >= _FEWEST_STEPS_TO_TUNE or facts.kind == "own-loop"):
        chosen += ["memory-format"] if config.memory_format == "auto" else []
        chosen += ["convolutions"] if config.precision != "bf16" else []
        chosen += ["threads"] if config.threads is None else []
        chosen += ["loaders"] if config.loaders is None and facts.kind == "train" else []
    return (*chosen, "precision") if config.precision == "auto" else tuple(chosen)


def held_out_samples(fraction: float, samples: int, workers: int) -> int:
    """How many samples are held out for tournaments: this fraction of them, and at least one per worker."""
    if not fraction or not samples:
        return 0
    number = max(workers, round(fraction * samples))
    if number >= samples:
        raise ConfigError(
            f"The tournaments of {workers} workers need {number} held-out samples, but there are only {samples}. "
            "Use another strategy, or more data.",
            code="too-few-samples",
            workers=workers,
            needed=number,
            samples=samples,
        )
    return number


def _shared_memory_bytes(config: RunConfig, machine: Machine) -> int:
    if config.shared_memory_limit_mb is not None:
        return int(config.shared_memory_limit_mb * 1e6)
    return machine.memory_available_bytes // 2
