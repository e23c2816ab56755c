"""Gradients to parameter servers, each worker at its own pace.

A gradient is applied as soon as it comes. With worker k's part n_k / N of a step's samples the servers apply
(n_k / N) g_k, so that each sample counts as much as in a synchronous step. The rhythms:

    every step                          MXNet's dist_async, TensorFlow's asynchronous replicas, DeepDist
    added up over several steps         Downpour (Dean et al. 2012); in between, a worker steps by itself
    within a bound of the slowest       SSP, Petuum (Ho et al. 2013); see `comms/staleness.py`
    at a rate per layer                 Nexus
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from syncline.comms.staleness import is_fresh
from syncline.errors import UnknownName
from syncline.strategies.answers import Answers
from syncline.strategies.exchange import Replica
from syncline.strategies.how import Exact, Int8, WithCodec
from syncline.strategies.lazy import flat, outgoing, torch
from syncline.strategies.method import AnswersMethod, Misfit, ModelShapes, Recovery, size
from syncline.strategies.methods.synchronous_servers import at_servers, step_of
from syncline.strategies.server_exchange import Encoder, ServerExchange, embeddings
from syncline.strategies.traffic import Traffic
from syncline.strategies.what import Gradients
from syncline.strategies.when import Async, Every, Layerwise, Stale
from syncline.strategies.whom import Server


@dataclass(frozen=True)
class AsynchronousServers(AnswersMethod):
    """gradients | async, stale or layerwise | server, with any codec."""

    what: Gradients
    when: Async | Stale | Layerwise
    whom: Server
    how: WithCodec

    title = "Pushing to parameter servers"
    because: ClassVar[Mapping[str, str]] = {
        "what": "Servers apply gradients, or hold the center of an elastic average.",
        "when": "Workers push their gradients each at its own pace.",
        "whom": "Workers at their own pace need a server that holds the parameters.",
        "how": "PowerSGD needs two sums over all workers; a server gets one message.",
    }
    is_asynchronous = True

    @classmethod
    def instead(cls, question: str, answers: Answers) -> Any:
        if question == "when" and type(answers.when) is Every:
            return Async(answers.when.steps, answers.when.steps)
        return Int8() if question == "how" else super().instead(question, answers)

    def misfit(self) -> Misfit | None:
        # With a bound of 0 no worker is ahead of another: that is a sum of all gradients (`synchronous_servers.py`).
        return Misfit("when", "A bound of 0 is lock-step.", None) if self.when == Stale(0) else None

    @property
    def servers(self) -> int:
        return self.whom.shards

    @property
    def fits_between_replicas(self) -> bool:  # type: ignore[override]  # others know it of all their answers
        """Between fetches of different parameters, and in steps of its own, a worker has what no server knows."""
        return type(self.when) is Stale or self.when == Async(1, 1)

    @property
    def recovery(self) -> Recovery:
        """Servers that apply layers at different rates have more steps of some layers than of others."""
        return "saved" if self.when.is_by_layer else "merge"

    @property
    def committed(self) -> str:
        if self.when.is_by_layer:
            return super().committed
        return "If a worker fails, the servers keep the parameters; its steps that it has not pushed are repeated."

    def bytes_per_step(self, model: ModelShapes, workers: int, optimizer_slots: int = 0) -> float:
        del optimizer_slots
        return self._pushed(model, self.how) if workers > 1 else 0.0

    def traffic(self, model: ModelShapes, workers: int, optimizer_slots: int = 0) -> tuple[Traffic, ...]:
        del optimizer_slots
        if workers == 1:
            return ()
        bound = getattr(self.when, "bound", None)
        return (
            Traffic(
                pattern="servers",
                sent_bytes=self._pushed(model, self.how),
                received_bytes=self._pulled(model),
                waits="nobody" if bound is None else "bound",
                bound=bound or 0,
                shards=self.whom.shards,
                encoding=self.how,
                is_hidden=True,
            ),
        )

    def memory_copies(self, optimizer_slots: int = 0) -> float:
        """The buffers that are pushed, pulled and prefetched; the servers hold the optimizer's state."""
        return 3.0 - optimizer_slots

    def explain(self, model: ModelShapes, workers: int) -> list[str]:
        del workers
        it = "it steps" if self.servers == 1 else "they step"
        pushed, pulled = self._pushed(model, self.how), self._pulled(model)
        return [
            f"Each worker, at its own pace, pushes its gradients to {at_servers(self.whom)} and fetches the "
            f"parameters: {self.when.rhythm}. As gradients arrive, {it} with {step_of(self.whom)}.",
            f"Each worker pushes {size(pushed)} and pulls {size(pulled)} per step for {model.numel:,} parameters"
            f"{model.saving(self.how)}.",
        ]

    def exchange(self, replica: Replica) -> AsynchronousServerExchange:
        return AsynchronousServerExchange(replica, self)

    def _pushed(self, model: ModelShapes, how: WithCodec) -> float:
        return _per_step(model, how, self.when.push_rates(model.sizes))

    def _pulled(self, model: ModelShapes) -> float:
        return _per_step(model, Exact(), self.when.fetch_rates(model.sizes))


def _per_step(model: ModelShapes, how: WithCodec, rates: Mapping[str, int]) -> float:
    """Parameters that are due at the same rate are encoded together."""
    total = 0.0
    for rate in set(rates.values()):
        total += how.wire_bytes([model.by_name[name] for name in rates if rates[name] == rate]) / rate
    return total


_PATIENCE = 0.25
"""Which part of a step's time a worker that may use older parameters waits for newer ones."""
_LONG_S = 3600.0
"""Until they are there, or the line to the servers gives up."""


class AsynchronousServerExchange(ServerExchange):
    """An `Exchange`: push gradients and fetch parameters, each worker at its own pace."""

    def __init__(self, replica: Replica, method: AsynchronousServers) -> None:
        super().__init__(replica, method, "apply", method.whom.optimizer)
        self._encoder = Encoder(method.how, self.servers, self.flat.numel)
        self._bound = method.when.bound
        self._clock = replica.step
        self._sum = torch.zeros_like(self.buffer)
        self._has_gradient = False
        self._unsent: set[int] = set()  # the parameters, by index, of which the sum holds something
        self._step_s, self._updated_s = 0.0, time.monotonic()
        touched = {id(layer.weight) for layer in embeddings(replica.model)}
        self._embeddings = [i for i, p in enumerate(self.flat.parameters) if id(p) in touched]
        names = {id(p): name for name, p in replica.model.named_parameters()}
        sizes = {names[id(p)]: p.numel() for p in self.flat.parameters}
        _check_names(method.when, sizes)
        self._push_every, self._fetch_every = (
            [rates[name] for name in sizes] for rates in (method.when.push_rates(sizes), method.when.fetch_rates(sizes))
        )
        # A worker that trains several steps on the parameters it has applies its own gradients to them in between.
        self._steps_locally = (
            not method.when.is_by_layer and max([*self._push_every, *self._fetch_every], default=1) > 1
        )

    def before_forward(self) -> None:
        super().before_forward()
        ranges = self._ranges(self._due(self._fetch_every))
        if not ranges:
            return
        is_all = len(ranges) == 1 and ranges[0] == (0, self.flat.numel)
        # What comes a little late is worth waiting for; a network that is slower than that is hidden behind the step,
        # as long as what this worker has is as new as the bound asks for.
        patience_s = _PATIENCE * self._step_s if self._bound else _LONG_S
        if is_all and self.servers.take_prefetched(self.buffer, patience_s) and self._is_fresh():
            pass  # it came in time, and not from before this worker waited at the gate
        elif is_all and self._bound and self._is_fresh():
            return
        elif is_all:
            self.servers.pull(self.buffer)
        else:
            self.flat.read(self.buffer)  # what is not due stays as it is
            self.servers.pull(self.buffer, ranges)
        log = self.replica.log
        apart = flat.distance(self.flat.read(), self.buffer) if log.wants_disagreement() else None
        self.flat.write(self.buffer)
        self.report(disagreement=apart)

    def update(self) -> None:
        """Add the gradient up; it is pushed when the step is done."""
        self._has_gradient = True
        now = time.monotonic()
        self._step_s, self._updated_s = now - self._updated_s, now

    def after_update(self, weight: float) -> bool:
        """Push what is due, and let the next parameters come while this worker does something else."""
        self._clock += 1
        if self._has_gradient:
            self._sum.add_(self.gradient, alpha=weight)
            self._unsent.update(range(len(self.flat.parameters)))
            if self._steps_locally:
                self.gradient.mul_(weight)
                self.replica.optimizer.step()
        self._has_gradient = False
        self._push(self._unsent.intersection(self._due(self._push_every)), ticks=1)
        if len(self._due(self._fetch_every)) == len(self._fetch_every):
            self.servers.prefetch()
        return False

    def may_continue(self, limit_s: float) -> bool:
        """Whether it is within the bound of the slowest worker."""
        return self._bound is None or self.servers.gate(self._bound, limit_s)

    def settle(self) -> None:
        self.start_servers()
        self._push(set(self._unsent), ticks=0)  # an empty push would be a step of the servers' optimizer, too
        super().settle()

    def worker_state(self) -> dict[str, Any]:
        """This worker's optimizer, if it steps between fetches, and what could not be sent yet."""
        optimizer = self.replica.optimizer.state_dict() if self._steps_locally else None
        return {"residual": self._encoder.residual, "local": optimizer}

    def _is_fresh(self) -> bool:
        """Whether the parameters that were read last may be used for the next step."""
        return self._bound is None or is_fresh(self.servers.cache_clock, self._clock, self._bound)

    def load_worker_state(self, saved: dict[str, Any]) -> None:
        self._encoder.load(saved["residual"])
        if saved["local"] is not None:
            self.replica.optimizer.load_state_dict(saved["local"])

    def _push(self, parameters: set[int], *, ticks: int) -> None:
        if not parameters:
            self.servers.tick(ticks)
            return
        self._unsent -= parameters
        ranges = self._ranges(parameters)
        whole = ranges == [(0, self.flat.numel)]
        spans = None if whole else ranges
        if self._encoder.is_exact:
            rows = self._touched_rows() if whole else None
            self.servers.push(self._sum, weight=1.0, ranges=spans, rows=rows, ticks=ticks)
        else:
            gradient = outgoing.EncodedGradient(self._encoder.encode(self._sum, spans), self._encoder.codec)
            self.servers.push(gradient, weight=1.0, ranges=spans, ticks=ticks)
        for low, high in ranges:
            self._sum[low:high] = 0.0

    def _touched_rows(self) -> dict[int, torch.Tensor] | None:
        """Of embeddings, the rows that this worker's samples have touched: mostly few, so only they travel."""
        if not self._embeddings:
            return None
        views = flat.views_of(self._sum, self.flat.parameters)
        return {index: views[index].any(dim=1).nonzero().flatten() for index in self._embeddings}

    def _due(self, every: list[int]) -> list[int]:
        """The parameters, by index, whose turn it is."""
        return [index for index, steps in enumerate(every) if self._clock % steps == 0]

    def _ranges(self, parameters: Collection[int]) -> list[tuple[int, int]]:
        """Where these parameters, by index, lie in the vector; ranges that touch are joined."""
        ranges: list[tuple[int, int]] = []
        offset = 0
        for index, p in enumerate(self.flat.parameters):
            if index in parameters and p.numel():
                if ranges and ranges[-1][1] == offset:
                    ranges[-1] = (ranges[-1][0], offset + p.numel())
                else:
                    ranges.append((offset, offset + p.numel()))
            offset += p.numel()
        return ranges


def _check_names(when: Async | Stale | Layerwise, sizes: dict[str, int]) -> None:
    for prefix in when.rates:
        if not any(name.startswith(prefix) for name in sizes):
            raise UnknownName.among("layer", prefix, sizes)
