"""`Method`: what a way of exchanging declares, for the planner, the workers and `explain`.

Here: the declaration that built-in methods and a user's own share, and what it is asked about: the run
(`RunConditions`) and the model (`ModelShapes`). Not here: the methods (`methods/`, one file each, listed in `table.py`)
and what an exchange does in a step (`exchange.py`).

Free of torch: the planner reads declarations before any process starts.
"""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

from syncline.errors import ConfigError
from syncline.strategies.answers import Answers
from syncline.strategies.how import Exact, How
from syncline.strategies.traffic import Traffic

if TYPE_CHECKING:
    from syncline.strategies.exchange import Exchange, Replica

__all__ = ["AnswersMethod", "Method", "Misfit", "ModelShapes", "Recovery", "RunConditions", "Shapes", "every", "size"]

Recovery = Literal["equal", "merge", "saved"]
"""How the survivors continue when a worker fails.

equal   the replicas are equal up to the step in flight: the furthest sends its state to stale and new workers
merge   each replica holds something of its own: the survivors merge (`Exchange.merge`); the failed worker's committed
        steps are known (`Exchange.committed_steps`), and the others are repeated
saved   neither: all workers go back to the last checkpoint
"""

Shapes: TypeAlias = "Mapping[str, Sequence[int]] | Sequence[Sequence[int]] | int"
"""The parameters of a model: their shapes, best by name (`layerwise` needs names), or only how many numbers."""


@dataclass(frozen=True, kw_only=True)
class RunConditions:
    """What a run offers to a strategy."""

    workers: int
    hosts: int = 1
    shares_memory: bool = True
    """Whether the workers of one host can share memory; those of different hosts never can."""
    is_own_loop: bool = False
    clip_norm: float | None = None
    hosts_of_workers: tuple[str, ...] = ()
    """By rank; empty if all are on one."""
    on_worker_failure: str = "shrink-and-replace"


class ModelShapes:
    """The parameters of a model, for counting bytes."""

    def __init__(self, shapes: Shapes) -> None:
        if isinstance(shapes, int):
            shapes = [(shapes,)]
        named = shapes if isinstance(shapes, Mapping) else {str(i): shape for i, shape in enumerate(shapes)}
        self.by_name: Mapping[str, Sequence[int]] = named

    @property
    def sizes(self) -> dict[str, int]:
        """How many numbers each parameter has."""
        return {name: math.prod(shape) for name, shape in self.by_name.items()}

    @property
    def numel(self) -> int:
        return sum(self.sizes.values())

    @property
    def exact_bytes(self) -> int:
        return 4 * self.numel

    def encoded_bytes(self, how: How) -> int:
        """The size of one exchange of all parameters."""
        return how.wire_bytes(list(self.by_name.values()))

    def amount(self, how: How, steps: int = 1) -> str:
        """The size of an exchange that happens every so many `steps`, as text."""
        sent = self.encoded_bytes(how)
        per_step = f" ({size(sent / steps)} per step)" if steps > 1 else ""
        return f"{size(sent)} for {self.numel:,} parameters{per_step}{self.saving(how)}"

    def saving(self, how: How) -> str:
        if how == Exact():
            return ""
        ratio = self.exact_bytes / max(1, self.encoded_bytes(how))
        return f", {ratio:.3g} times less than exact; the rest is sent later"


class Method:
    """A way of exchanging: what it needs from a run, what it costs, how it recovers, and its exchange.

    A strategy of your own derives from this class and overrides what differs; only `exchange` is required. Properties
    may be overridden by plain class attributes: `servers = 1`.
    """

    title: str = "This strategy"
    """What messages call it."""
    min_workers: int = 1
    needs_shared_memory: bool = False
    """Whether all workers must share memory, hence a host."""
    has_separate_models: bool = False
    """Whether each worker trains a model of its own; what is evaluated and saved is made from all of them."""
    competes: bool = False
    """Whether models compete instead of being combined: no other method can continue from such a set of models."""
    fits_inside_group: bool = False
    """Whether it works inside a hierarchy's group, which acts as one worker; see `HierarchyLevel.agree`."""
    fits_across_groups: bool = False
    """Whether it works between a hierarchy's groups; see `HierarchyLevel.combine`."""
    fits_between_replicas: bool = False
    """Whether a replica that is spread over several workers (`layouts/`) can be one of its workers."""

    @property
    def servers(self) -> int:
        """How many parameter-server processes the run must start."""
        return 0

    @property
    def is_asynchronous(self) -> bool:
        """Whether each worker trains at its own pace."""
        return False

    @property
    def is_lock_step(self) -> bool:
        """Whether all workers apply one summed gradient in every step.

        Their forward passes then run in step, so that batch norm can be computed over all workers.
        """
        return False

    @property
    def sums_exact_gradients(self) -> bool:
        """Whether all it does is to sum gradients, as they are, in every step: a layout may do that its own way."""
        return False

    @property
    def is_repeatable(self) -> bool:
        """Whether two runs with the same seed give the same bits."""
        return not self.is_asynchronous

    @property
    def steps(self) -> int:
        """Every how many steps the workers exchange."""
        return 1

    @property
    def held_out(self) -> float:
        """The part of the training data that must be held out for scoring models."""
        return 0.0

    @property
    def averages_optimizer(self) -> bool:
        """Whether the optimizers' state is exchanged, too."""
        return False

    @property
    def recovery(self) -> Recovery:
        """How the survivors continue when a worker fails."""
        return "saved"

    @property
    def committed(self) -> str:
        """Which of a failed worker's steps count, as a sentence for `explain`."""
        return {
            "equal": "If a worker fails, the others repeat the step in flight; all completed steps count.",
            "merge": "If a worker fails, the others merge; its steps since its last exchange are repeated.",
            "saved": "If a worker fails, all workers go back to the last checkpoint.",
        }[self.recovery]

    def exchange(self, replica: Replica) -> Exchange:
        """The exchange for one worker's replica."""
        raise NotImplementedError(f"{type(self).__name__} has no method 'exchange(replica)'")

    def check_run(self, run: RunConditions) -> None:
        """`ConfigError` if a run like this cannot use the method."""
        if run.workers < self.min_workers:
            raise ConfigError(
                f"{self.title} needs {self.min_workers} workers or more, but --workers is {run.workers}. "
                f"Set --workers to {self.min_workers} or more, or use --strategy allreduce.",
                code="too-few-workers", workers=run.workers, least=self.min_workers,
            )  # fmt: skip
        if self.needs_shared_memory and run.workers > 1 and (run.hosts > 1 or not run.shares_memory):
            where = (
                f"these workers are on {run.hosts} hosts"
                if run.hosts > 1
                else "the workers of this run do not share memory (its collective is not shared-memory)"
            )
            instead = self.without_shared_memory(run)
            raise ConfigError(
                f"{self.title} needs memory that all workers share, but {where}. Use --strategy {instead}.",
                code="no-shared-memory", hosts=run.hosts, instead=instead,
            )  # fmt: skip

    def without_shared_memory(self, run: RunConditions) -> str:
        """What to use where workers share no memory."""
        del run
        return "allreduce"

    def on_hosts(self, hosts: int, workers: int) -> Method:
        """The method as so many workers on so many hosts use it, for counting what they send."""
        del hosts, workers
        return self

    def bytes_per_step(self, model: ModelShapes, workers: int, optimizer_slots: int = 0) -> float | None:
        """What a worker sends in a step, as a mean over steps and workers; None if only a measurement can show it.

        Counted as the transports do: a worker's own buffer once in an all-reduce, what it pushes to a server (what it
        pulls the server sends), and a model once for each worker that gets it. `optimizer_slots` is how many numbers
        the optimizer keeps for each parameter (SGD with momentum 1, Adam 2).
        """
        del model, workers, optimizer_slots
        return None

    def traffic(self, model: ModelShapes, workers: int, optimizer_slots: int = 0) -> tuple[Traffic, ...] | None:
        """Who sends how much to whom and who waits for whom, for predicting how long a step takes.

        None if only a measurement can show it. Derived from the other declarations here: override it if they do not
        say enough, such as to whom something is sent.
        """
        per_step = self.bytes_per_step(model, workers, optimizer_slots)
        if per_step is None:
            return None
        if workers == 1:
            return ()
        return (
            Traffic(
                pattern="servers" if self.servers else "all-reduce",
                sent_bytes=per_step * self.steps,
                received_bytes=float(model.exact_bytes) if self.servers else 0.0,
                every=self.steps,
                waits="nobody" if self.is_asynchronous else "all",
                shards=max(1, self.servers),
            ),
        )

    def memory_copies(self, optimizer_slots: int = 0) -> float:
        """How many copies of all parameters a worker keeps beyond its parameters, gradients and optimizer state."""
        del optimizer_slots
        return 0.0

    def explain(self, model: ModelShapes, workers: int) -> list[str]:
        """Who sends what to whom, when, and how many bytes that is."""
        del model, workers
        return [f"{self.title} decides what the workers exchange; the run reports how many bytes that is."]


class Misfit(NamedTuple):
    """An answer that a method does not serve, why not, and the answers to use instead (None: there are none)."""

    question: str
    because: str
    instead: dict[str, Any] | None


@dataclass(frozen=True)
class AnswersMethod(Method):
    """A built-in method, made from the four answers. Its annotations declare which types of answers it serves."""

    what: Any
    when: Any
    whom: Any
    how: Any

    because: ClassVar[Mapping[str, str]] = {}
    """For each question, why only those answers are served."""

    @classmethod
    @functools.cache
    def serves(cls) -> dict[str, tuple[type, ...]]:
        """For each question, the types of the answers."""
        hints = typing.get_type_hints(cls)
        return {question: typing.get_args(hints[question]) or (hints[question],) for question in Answers._fields}

    @classmethod
    def instead(cls, question: str, answers: Answers) -> Any:
        """The answer in place of one that is not served; None if there is no good one. By default, the usual one."""
        del answers
        return cls.serves()[question][0]()

    def misfit(self) -> Misfit | None:
        """What is wrong with answers whose types are served, if anything."""
        return None


def size(count: float) -> str:
    """A number of bytes as text."""
    return f"{count / 1e6:.3g} MB" if count >= 1e5 else f"{count:,.0f} bytes"


def every(steps: int) -> str:
    return "After each step" if steps == 1 else f"Every {steps} steps"
