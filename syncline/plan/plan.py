"""`Plan`: every decision about a run, as data.

Here: the type, its JSON form and its form in words (`syncline explain`). Not here: how the decisions are made
(`planner.py`). Workers read a plan; they never derive any of it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import msgspec

from syncline.plan.tuning import Choice

__all__ = ["Plan", "WorkerPlan"]


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """One worker's place."""

    rank: int
    host: str
    device: str
    threads: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every decision about a run."""

    kind: Literal["train", "own-loop"]
    model: str
    data: str
    strategy: str
    workers: tuple[WorkerPlan, ...]
    collective: Literal["solo", "shared-memory", "process-group"]
    seed: int
    epochs: int
    batch: int
    train_samples: int
    test_samples: int
    steps_per_epoch: int
    total_steps: int
    accumulate: int
    loaders: int | None
    evaluate_every: int
    checkpoint_every_s: float
    checkpoint_every_steps: int | None
    keep_checkpoints: int
    on_nan: Literal["stop", "skip"]
    batch_norm: Literal["global", "local"]
    shared_memory_bytes: int
    exchange_timeout_s: float
    fingerprint: str
    servers: int = 0
    """How many processes keep parameters for the workers."""
    held_out: int = 0
    """How many training samples are kept for tournaments; `train_samples` is without them."""
    on_loss: Literal["shrink-and-replace", "replace-only", "shrink", "stop"] = "shrink-and-replace"
    """What happens when a worker is lost."""
    most_losses: int = 10
    """With more losses than this in five minutes, the run ends with its work saved."""
    precision: Literal["float32", "bf16"] = "float32"
    memory_format: Literal["contiguous", "channels-last"] = "contiguous"
    measured: tuple[Choice, ...] = ()
    """What the workers find out by measuring before the first step; what is said here is where they start from."""
    checkpoint_activations: bool = False
    """Whether parts of the forward pass are computed twice, to save memory."""
    memory_limit_bytes: int | None = None
    """The most memory a worker may use; how many pieces that takes, the workers find out by measuring."""
    shares_memory_on_hosts: bool = False
    """Whether, of workers on several hosts, those on one may exchange through its memory among themselves."""
    notes: tuple[str, ...] = field(default=())

    @property
    def size(self) -> int:
        """How many workers there are."""
        return len(self.workers)

    @property
    def processes(self) -> int:
        """Workers and servers; servers have the ranks after the workers'."""
        return self.size + self.servers

    def name_of(self, number: int) -> str:
        """A process, for people; workers that were added later have the numbers after the servers'."""
        return f"server {number - self.size}" if self.is_server(number) else f"worker {number}"

    def is_server(self, number: int) -> bool:
        """Whether the process with this number keeps parameters; those after it are workers that were added."""
        return self.size <= number < self.processes

    def with_members(self, members: Sequence[int]) -> Plan:
        """The plan for these workers, by number: other devices, and shares that need no more memory than before."""
        if list(members) == list(range(self.size)):
            return self
        workers = tuple(
            replace(self.workers[number % self.size], rank=rank) for rank, number in enumerate(sorted(members))
        )
        pieces = -(-self.accumulate * self.size // len(workers)) if self.accumulate > 1 else self.accumulate
        return replace(self, workers=workers, accumulate=max(pieces, self.accumulate))

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON and the control channel."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """The plan that `to_dict` described."""
        return msgspec.convert(data, cls)

    def in_words(self) -> str:
        """The plan as a person would tell it."""
        first = self.workers[0]
        lines = [f"{self.model} on {self.data}, with {_count(self.size, 'worker')} and strategy {self.strategy}."]
        if self.kind == "own-loop":
            lines.append("The script's own loop decides model, data and length.")
        else:
            lines.append(
                f"{_count(self.epochs, 'epoch')} of {self.train_samples:,} samples in steps of {self.batch}: "
                f"{self.steps_per_epoch:,} steps an epoch, {self.total_steps:,} in all."
            )
            shares = sorted({-(-self.batch // self.size), self.batch // self.size}, reverse=True)
            lines.append(f"In each step a worker computes {' or '.join(map(str, shares))} samples.")
            tested = (
                f"{self.test_samples:,} test samples are evaluated" if self.test_samples else "There is no test data"
            )
            every = {0: ".", 1: " after every epoch."}.get(self.evaluate_every, f" every {self.evaluate_every} epochs.")
            lines.append(tested + (every if self.test_samples else "."))
        lines.append(
            f"Each worker is a process on {_places(self.workers)}, computing on {first.device} "
            f"with {_count(first.threads, 'thread')}."
        )
        if self.servers:
            more = "One more process keeps" if self.servers == 1 else f"{self.servers} more processes keep"
            lines.append(f"{more} the parameters for them.")
        if self.held_out:
            lines.append(f"{self.held_out:,} more training samples are held out for tournaments.")
        if self.size > 1:
            through = "shared memory" if self.collective == "shared-memory" else "torch.distributed"
            lines.append(f"They exchange through {through}.")
        lines += [*_how_it_computes(self), *_how_it_saves_memory(self)]
        lines.append(
            f"A checkpoint every {self.checkpoint_every_s:g} s"
            + (f" and every {self.checkpoint_every_steps} steps" if self.checkpoint_every_steps else "")
            + f" and at the end; the newest {self.keep_checkpoints} are kept."
        )
        lines.extend(self.notes)
        return "\n".join(lines)


def _how_it_computes(plan: Plan) -> list[str]:
    fixed = [
        words
        for choice, words in (("precision", plan.precision), ("memory-format", f"{plan.memory_format} memory"))
        if choice not in plan.measured and words not in ("float32", "contiguous memory")
    ]
    lines = [f"They compute in {' and '.join(fixed)}."] if fixed else []
    if plan.measured:
        choices = ", ".join(choice.replace("-", " ") for choice in plan.measured)
        lines.append(f"Before the first step they measure what is fastest here ({choices}), where there is a choice.")
    return lines


def _how_it_saves_memory(plan: Plan) -> list[str]:
    lines = []
    if plan.accumulate > 1:
        lines.append(f"A share is computed in {plan.accumulate} pieces, to save memory.")
    if plan.memory_limit_bytes is not None:
        lines.append(
            f"A worker may use {plan.memory_limit_bytes / 1e6:,.0f} MB: before the first step they measure what a "
            "sample takes, and compute their shares in as few pieces as that allows."
        )
    if plan.checkpoint_activations:
        lines.append("Parts of the forward pass are computed twice instead of being kept, to save memory.")
    return lines


def _places(workers: Sequence[WorkerPlan]) -> str:
    hosts = tuple(dict.fromkeys(w.host for w in workers))
    return hosts[0] if len(hosts) == 1 else f"one of the hosts {', '.join(hosts)}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number:,} {thing}s"
