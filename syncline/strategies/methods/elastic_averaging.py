"""Models tied to a center by a spring: EASGD (Zhang, Choromanska & LeCun 2015), as in Theano-MPI.

Every n of its steps worker k and the center, which the servers keep, pull at each other, one worker at a time:

    d = rate (x_k - x~)        x_k <- x_k - d        x~ <- x~ + d
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from syncline.compute.outer import elastic
from syncline.strategies.answers import Answers, text_of
from syncline.strategies.exchange import Replica
from syncline.strategies.how import Exact
from syncline.strategies.lazy import flat, torch
from syncline.strategies.method import AnswersMethod, Misfit, ModelShapes, Recovery, every
from syncline.strategies.methods.synchronous_servers import at_servers
from syncline.strategies.server_exchange import ServerExchange
from syncline.strategies.traffic import Traffic
from syncline.strategies.what import Updates
from syncline.strategies.when import Every
from syncline.strategies.whom import Server


@dataclass(frozen=True)
class ElasticAveraging(AnswersMethod):
    """updates(outer=elastic(rate)) | every(n) | server | exact."""

    what: Updates
    when: Every
    whom: Server
    how: Exact

    title = "Elastic averaging"
    because: ClassVar[Mapping[str, str]] = {
        "what": "A server holds the center of an elastic average of updates.",
        "when": "Workers meet the elastic center every so many of their steps.",
        "whom": "A server must hold the elastic center.",
        "how": "Worker and center must move by the same amount, which a lossy encoding would make unequal.",
    }
    has_separate_models = True
    is_asynchronous = True
    recovery: ClassVar[Recovery] = "merge"

    @classmethod
    def instead(cls, question: str, answers: Answers) -> Any:
        del answers
        # There is no usual rate, so this method is not suggested for updates that are no elastic average.
        return {"what": None, "when": Every(10), "whom": Server(), "how": Exact()}[question]

    def misfit(self) -> Misfit | None:
        if type(self.what.outer) is not elastic:
            because = (
                "A server applies gradients or holds the center of an elastic average; combining updates by "
                f"{text_of(self.what.outer)} needs all workers at once."
            )
            return Misfit("what", because, None)
        if self.what.optimizer_state:
            because = "The optimizers' state is averaged over everyone; a server does not hold it."
            return Misfit("what", because, {"what": replace(self.what, optimizer_state=False)})
        if self.whom.optimizer is not None:
            because = (
                f"The workers' optimizers take the steps, so the server does not use {text_of(self.whom.optimizer)}."
            )
            return Misfit("whom", because, {"whom": Server(self.whom.shards)})
        return None

    @property
    def servers(self) -> int:
        return self.whom.shards

    @property
    def steps(self) -> int:
        return self.when.steps

    @property
    def committed(self) -> str:
        return "If a worker fails, the servers keep the center; its steps since it last met the center are repeated."

    def bytes_per_step(self, model: ModelShapes, workers: int, optimizer_slots: int = 0) -> float:
        del optimizer_slots
        return model.exact_bytes / self.steps if workers > 1 else 0.0

    def traffic(self, model: ModelShapes, workers: int, optimizer_slots: int = 0) -> tuple[Traffic, ...]:
        del optimizer_slots
        if workers == 1:
            return ()
        sent, shards = float(model.exact_bytes), self.whom.shards
        return (
            Traffic(
                pattern="servers", sent_bytes=sent, received_bytes=sent, every=self.steps, waits="nobody", shards=shards
            ),
        )

    def memory_copies(self, optimizer_slots: int = 0) -> float:
        """The buffer that meets the center."""
        del optimizer_slots
        return 1.0

    def explain(self, model: ModelShapes, workers: int) -> list[str]:
        del workers
        return [
            f"{every(self.steps)} each worker, at its own pace, meets the center at {at_servers(self.whom)}: each "
            f"moves towards the other by {self.what.outer!r}.",
            f"Each worker sends {model.amount(self.how, self.steps)}, and receives as much.",
        ]

    def exchange(self, replica: Replica) -> ElasticAveragingExchange:
        return ElasticAveragingExchange(replica, self)


class ElasticAveragingExchange(ServerExchange):
    """An `Exchange`: every n steps a worker's model and the center pull at each other."""

    def __init__(self, replica: Replica, method: ElasticAveraging) -> None:
        assert isinstance(method.what.outer, elastic), "checked by misfit"
        super().__init__(replica, method, "elastic", rate=method.what.outer.rate)
        self._steps = method.steps
        self._step = replica.step
        self._own: torch.Tensor | None = None

    def after_update(self, weight: float) -> bool:
        """Pull at the center, and be pulled, if it is time."""
        del weight
        self._step += 1
        if self._step % self._steps == 0:
            before = self.flat.read(self.buffer)
            own = before.clone() if self.replica.log.wants_disagreement() else None
            self.servers.pull_elastic(self.buffer, self._step)
            self.flat.write(self.buffer)
            apart = None
            if own is not None:  # x_k moved by rate (x_k - center)
                center = own + (self.buffer - own) / self._rate
                apart = flat.distance(own, center)
            self.report(disagreement=apart)
        return False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """The center; afterwards every worker has its own model again."""
        self.start_servers()
        self._own = self.flat.read()
        self.replica.collective.barrier()
        self.flat.write(self.pull())
        try:
            yield
        finally:
            self.flat.write(self._own)
            self._own = None
        self.replica.collective.barrier()

    def settle(self) -> None:
        self.start_servers()
        self.replica.collective.barrier()
        self.flat.write(self.pull())
        self.replica.collective.barrier()

    def committed_steps(self) -> dict[int, int] | None:
        """Of the others, what they had when they last pulled at the center."""
        reached = super().committed_steps()
        return None if reached is None else {**reached, self.replica.collective.rank: self._step}

    def worker_state(self) -> dict[str, Any]:
        """This worker's own model and optimizer."""
        own = self._own if self._own is not None else self.flat.read()
        return {"optimizer": self.replica.optimizer.state_dict(), "own": own.clone()}

    def load_worker_state(self, saved: dict[str, Any]) -> None:
        self.replica.optimizer.load_state_dict(saved["optimizer"])
        self.flat.write(saved["own"])
