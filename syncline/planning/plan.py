"""`Plan`: every decision about a run, as data.

Here: the type, its JSON form and its description (`syncline explain`). Not here: how the decisions are made
(`planner.py`). Workers read the plan and decide nothing again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import msgspec

from syncline.compute.tuning import Choice
from syncline.errors import plural


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """Where one worker runs."""

    rank: int
    host: str
    device: str
    threads: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every decision about a run."""

    kind: Literal["train", "own-loop", "fit", "graph"]
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
    data_fingerprint: str = ""
    run_id: str = ""
    """Identifies the run in its plan, checkpoints and ledger; it stays when the run is resumed."""
    data_changed: Literal["refuse", "ok"] = "refuse"
    """Whether a checkpoint of other data may be resumed, with a new epoch."""
    servers: int = 0
    """Number of parameter servers."""
    held_out: int = 0
    """Training samples held out for tournaments; not included in `train_samples`."""
    on_worker_failure: Literal["shrink-and-replace", "replace-only", "shrink", "stop"] = "shrink-and-replace"
    """What happens when a worker fails."""
    max_failures: int = 10
    """After more failures than this in five minutes, the run saves its work and ends."""
    precision: Literal["float32", "bf16"] = "float32"
    memory_format: Literal["contiguous", "channels-last"] = "contiguous"
    measured: tuple[Choice, ...] = ()
    """What the workers tune before the first step; the values in this plan are their starting point."""
    checkpoint_activations: bool = False
    """Whether activations are recomputed to save memory."""
    memory_limit_bytes: int | None = None
    """Memory budget of a worker; the workers measure how many micro-batches it takes."""
    layout: str = "replicated"
    """How the model is spread over the workers."""
    shares_memory_on_hosts: bool = False
    """Whether workers on the same host may exchange through its memory, if there are several hosts."""
    notes: tuple[str, ...] = field(default=())

    @property
    def size(self) -> int:
        return len(self.workers)

    @property
    def processes(self) -> int:
        """Number of workers and parameter servers. The servers' ids follow those of the workers."""
        return self.size + self.servers

    def name_of(self, worker_id: int) -> str:
        return f"server {worker_id - self.size}" if self.is_server(worker_id) else f"worker {worker_id}"

    def is_server(self, worker_id: int) -> bool:
        """Whether this is a parameter server. Workers that were added later have the ids after the servers'."""
        return self.size <= worker_id < self.processes

    def with_members(self, members: Sequence[int]) -> Plan:
        """The plan for these workers, by id. With fewer workers, larger shares are split to need no more memory."""
        if list(members) == list(range(self.size)):
            return self
        workers = tuple(
            replace(self.workers[worker_id % self.size], rank=rank) for rank, worker_id in enumerate(sorted(members))
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

    def describe(self) -> str:
        """The plan as sentences, for `syncline explain`."""
        first = self.workers[0]
        layout = "" if self.layout == "replicated" else f", layout {self.layout}"
        lines = [f"{self.model} on {self.data}, {plural(self.size, 'worker')}, strategy {self.strategy}{layout}."]
        if self.kind == "graph":
            lines.append("Rounds of a vertex program until nothing changes any more.")
        elif self.kind == "own-loop":
            lines.append("The script's own loop decides the model, the data and the number of steps.")
        elif self.kind == "fit":
            lines.append("Rounds of blocks of parameters until the fit has converged.")
        else:
            lines.append(
                f"{plural(self.epochs, 'epoch')} of {plural(self.train_samples, 'sample')}, batch size {self.batch}: "
                f"{plural(self.steps_per_epoch, 'step')} per epoch, {self.total_steps:,} in total."
            )
            shares = sorted({-(-self.batch // self.size), self.batch // self.size}, reverse=True)
            lines.append(f"In each step, a worker computes {' or '.join(map(str, shares))} samples.")
            tested = (
                f"Evaluation on {plural(self.test_samples, 'test sample')}" if self.test_samples else "No test data"
            )
            every = {0: ".", 1: " after every epoch."}.get(self.evaluate_every, f" every {self.evaluate_every} epochs.")
            lines.append(tested + (every if self.test_samples else "."))
        lines.append(
            f"Each worker is a process on {_hosts(self.workers)}, on {first.device} with "
            f"{plural(first.threads, 'thread')}."
        )
        if self.servers:
            lines.append(f"{plural(self.servers, 'parameter server')} in addition.")
        if self.held_out:
            lines.append(f"{plural(self.held_out, 'training sample')} held out for tournaments.")
        if self.size > 1:
            through = "shared memory" if self.collective == "shared-memory" else "torch.distributed"
            lines.append(f"Workers communicate through {through}.")
        lines += [*_describe_compute(self), *_describe_memory(self)]
        lines.append(
            f"A checkpoint every {self.checkpoint_every_s:g} s"
            + (f", every {self.checkpoint_every_steps} steps" if self.checkpoint_every_steps else "")
            + f" and at the end; the latest {self.keep_checkpoints} are kept."
        )
        lines.extend(self.notes)
        return "\n".join(lines)


def _describe_compute(plan: Plan) -> list[str]:
    fixed = [
        words
        for choice, words in (("precision", plan.precision), ("memory-format", f"{plan.memory_format} memory"))
        if choice not in plan.measured and words not in ("float32", "contiguous memory")
    ]
    lines = [f"Computing in {' and '.join(fixed)}."] if fixed else []
    if plan.measured:
        choices = ", ".join(choice.replace("-", " ") for choice in plan.measured)
        lines.append(f"Before the first step, workers measure and choose the fastest: {choices}.")
    return lines


def _describe_memory(plan: Plan) -> list[str]:
    lines = []
    if plan.accumulate > 1:
        lines.append(f"Each share is split into {plan.accumulate} micro-batches to save memory.")
    if plan.memory_limit_bytes is not None:
        how = (
            "Before the first step, workers measure the memory per sample and use as few micro-batches as the budget "
            "allows."
            if plan.layout == "replicated"
            else "What each worker needs was counted before the start; micro-batches are as many as that takes."
        )
        lines.append(f"Memory budget per worker: {plan.memory_limit_bytes / 1e6:,.0f} MB. {how}")
    if plan.checkpoint_activations:
        lines.append("Activations are recomputed in the backward pass to save memory.")
    return lines


def _hosts(workers: Sequence[WorkerPlan]) -> str:
    hosts = tuple(dict.fromkeys(w.host for w in workers))
    return hosts[0] if len(hosts) == 1 else f"one of the hosts {', '.join(hosts)}"
