"""From what the user wants and what the machine offers to a `Plan`. Pure: same inputs, same plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from syncline.config.amounts import bytes_of
from syncline.config.run import RunConfig
from syncline.errors import ConfigError
from syncline.plan.machine import Machine
from syncline.plan.plan import Plan, WorkerPlan
from syncline.plan.tuning import Choice
from syncline.strategies.feasible import check_feasible, held_out, servers_needed
from syncline.strategies.reading import read_strategy

__all__ = ["TaskFacts", "make_plan"]

_DEFAULT_EPOCHS = 3
_DEFAULT_BATCH = 128
_FEWEST_STEPS_TO_TUNE = 100


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """What a plan needs to know of the task, without the task itself."""

    kind: Literal["train", "own-loop"]
    model: str
    data: str
    fingerprint: str
    train_samples: int = 0
    test_samples: int = 0
    recommended_epochs: int | None = None
    recommended_batch: int | None = None
    clip_norm: float | None = None


def make_plan(facts: TaskFacts, config: RunConfig, machine: Machine, device: str, hosts: Sequence[str] = ()) -> Plan:
    """Decide everything that can be decided before a process starts. `device` is the resolved one, never auto.

    Workers are dealt out to the `hosts` in turn; without any, all are on this machine.
    """
    hosts = hosts or (machine.host,)
    places = [hosts[r % len(hosts)] for r in range(config.workers)]
    notes: list[str] = []
    strategy = read_strategy(config.strategy)
    held = held_out_samples(held_out(strategy), facts.train_samples, config.workers)
    _check_what_is_up_to_the_script(facts, config)
    length = _length(facts, config, facts.train_samples - held, notes)
    collective = _collective(config, machine, device, len(set(places)), notes)
    shares_memory_on_hosts = len(set(places)) > 1 and _can_share_memory(config, machine, device)
    check_feasible(
        strategy,
        workers=config.workers,
        hosts=len(set(places)),
        shares_memory=collective != "process-group" or shares_memory_on_hosts,
        is_own_loop=facts.kind == "own-loop",
        clip_norm=facts.clip_norm,
    )
    threads = config.threads or max(1, machine.cores // config.workers)
    return Plan(
        kind=facts.kind,
        model=facts.model,
        data=facts.data,
        strategy=config.strategy,
        workers=tuple(
            WorkerPlan(rank=r, host=place, device=_device_of(device, r), threads=threads)
            for r, place in enumerate(places)
        ),
        collective=collective,
        seed=config.seed,
        epochs=length.epochs,
        batch=length.batch,
        train_samples=facts.train_samples - held,
        test_samples=facts.test_samples,
        steps_per_epoch=length.steps_per_epoch,
        total_steps=length.total_steps,
        accumulate=config.accumulate,
        loaders=config.loaders,
        evaluate_every=config.evaluate_every,
        checkpoint_every_s=config.checkpoint_every_s,
        checkpoint_every_steps=config.checkpoint_every_steps,
        keep_checkpoints=config.keep_checkpoints,
        on_nan=config.on_nan,
        batch_norm=config.batch_norm,
        shared_memory_bytes=_shared_memory_bytes(config, machine),
        shares_memory_on_hosts=shares_memory_on_hosts,
        exchange_timeout_s=config.exchange_timeout_s,
        fingerprint=facts.fingerprint,
        servers=servers_needed(strategy),
        held_out=held,
        on_loss=config.on_loss,
        most_losses=config.most_losses,
        precision="bf16" if config.precision == "bf16" else "float32",
        memory_format="channels-last" if config.memory_format == "channels-last" else "contiguous",
        checkpoint_activations=config.checkpoint_activations,
        memory_limit_bytes=bytes_of("memory_limit", config.memory_limit) if config.memory_limit is not None else None,
        measured=_measured(config, length.total_steps) if facts.kind == "train" else (),
        notes=tuple(notes),
    )


def _check_what_is_up_to_the_script(facts: TaskFacts, config: RunConfig) -> None:
    if facts.kind == "train":
        return
    if config.precision != "float32" or config.memory_format != "auto":
        raise ConfigError(
            "How a script computes is up to the script: use torch.autocast and model.to(memory_format=...) there, and "
            "leave out --precision and --memory-format."
        )
    if config.checkpoint_activations or config.memory_limit is not None:
        raise ConfigError(
            "How much a script computes at once, and what it keeps, is up to the script: use smaller pieces and "
            "torch.utils.checkpoint there, and leave out --memory-limit and --checkpoint-activations."
        )


class _Length(NamedTuple):
    """How long a run is, and in what steps."""

    epochs: int
    batch: int
    steps_per_epoch: int
    total_steps: int


def _length(facts: TaskFacts, config: RunConfig, train_samples: int, notes: list[str]) -> _Length:
    epochs = config.epochs or facts.recommended_epochs or _DEFAULT_EPOCHS
    batch = config.batch or facts.recommended_batch or _DEFAULT_BATCH
    if facts.kind == "train":
        if facts.train_samples == 0:
            raise ConfigError("The training data is empty: there is nothing to learn from.")
        if batch > train_samples:
            notes.append(f"A batch of {batch} is more than the {train_samples} samples: each epoch is one step.")
            batch = train_samples
        if config.workers > batch:
            raise ConfigError(
                f"{config.workers} workers cannot share a batch of {batch}: some would have nothing to do. "
                f"Set --workers to {batch} or less, or a larger --batch."
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
    if device == "mps":
        raise ConfigError(
            f"{config.workers} workers cannot share this machine's one Apple GPU: torch has no exchange between "
            "processes for it. Use --workers 1, or --device cpu."
        )
    if device != "cpu":
        reason = f"shared-memory exchange is for CPU workers (these compute on {device})"
    if hosts > 1:
        reason = f"they are on {hosts} hosts"
    if config.collective == "process-group":
        return "process-group"
    if reason is None:
        return "shared-memory"
    if config.collective == "shared-memory":
        raise ConfigError(f"--collective shared-memory is not possible: {reason}. Use --collective process-group.")
    notes.append(f"The workers exchange through torch.distributed, because {reason}.")
    return "process-group"


def _can_share_memory(config: RunConfig, machine: Machine, device: str) -> bool:
    return config.collective == "auto" and device == "cpu" and machine.no_shared_memory_because is None


def _measured(config: RunConfig, steps: int) -> tuple[Choice, ...]:
    """The choices that are left to the workers. In a short run, measuring would take longer than it could save."""
    chosen: list[Choice] = []
    if config.tune == "auto" and steps >= _FEWEST_STEPS_TO_TUNE:
        chosen += ["memory-format"] if config.memory_format == "auto" else []
        chosen += ["convolutions"] if config.precision != "bf16" else []
        chosen += ["threads"] if config.threads is None else []
        chosen += ["loaders"] if config.loaders is None else []
    return (*chosen, "precision") if config.precision == "auto" else tuple(chosen)


def held_out_samples(fraction: float, samples: int, workers: int) -> int:
    """How many of the samples are kept for tournaments: that part of them, and at least one for each worker."""
    if not fraction or not samples:
        return 0
    number = max(workers, round(fraction * samples))
    if number >= samples:
        raise ConfigError(
            f"{workers} models that compete need {number} samples to be judged by, and there are only {samples}. Use "
            "another strategy, or more data."
        )
    return number


def _shared_memory_bytes(config: RunConfig, machine: Machine) -> int:
    if config.shared_memory_limit_mb is not None:
        return int(config.shared_memory_limit_mb * 1e6)
    return machine.memory_available_bytes // 2


def _device_of(device: str, rank: int) -> str:
    # One GPU per worker, in order; with fewer GPUs than workers torch names the missing one when it is used.
    return f"cuda:{rank}" if device == "cuda" else device
