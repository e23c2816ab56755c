"""Gradients to parameter servers, each worker at its own pace.

A gradient is applied as soon as it comes. With worker k's part n_k / N of a step's samples the servers apply
(n_k / N) g_k, so that each sample counts as much as in a synchronous step. The rhythms:

    every step                          MXNet's dist_async, TensorFlow's asynchronous replicas, DeepDist
    added up over several steps         Downpour (Dean et al. 2012); in between, a worker steps by itself
    within a bound of the slowest       SSP, Petuum (Ho et al. 2013); see `algorithms/staleness.py`
    at a rate per layer                 Nexus
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from syncline.algorithms.staleness import is_fresh
from syncline.config.spec import Spec
from syncline.errors import UnknownName
from syncline.strategies.exchange import Replica
from syncline.strategies.flat import distance, views_of
from syncline.strategies.how import How
from syncline.strategies.server_line import EMBEDDINGS, Encoder, WithServers, optimizer_for
from syncline.strategies.when import Async, Layerwise, Stale

__all__ = ["PushAndFetch"]

_PATIENCE = 0.25
"""Which part of a step's time a worker that may use older parameters waits for newer ones."""
_LONG_S = 3600.0
"""Until they are there, or the line to the servers gives up."""


class PushAndFetch(WithServers):
    """An `Exchange`: push gradients and fetch parameters, each worker at its own pace."""

    is_asynchronous = True

    def __init__(self, replica: Replica, when: Async | Stale | Layerwise, how: How, optimizer: Spec | None) -> None:
        super().__init__(replica, "apply", optimizer_for(replica, optimizer))
        self._encoder = Encoder(how, self._servers, self._flat.numel)
        if isinstance(when, Layerwise):
            self.recovery = "saved"  # the servers have more steps of some layers than of others
        self._bound = when.bound if isinstance(when, Stale) else None
        self._clock = replica.step
        self._sum = torch.zeros_like(self._buffer)
        self._has_gradient = False
        self._unsent: set[int] = set()  # the parameters, by index, of which the sum holds something
        self._step_s, self._updated_s = 0.0, time.monotonic()
        embeddings = {id(m.weight) for m in replica.model.modules() if isinstance(m, EMBEDDINGS)}
        self._embeddings = [i for i, p in enumerate(self._flat.parameters) if id(p) in embeddings]
        names = {id(p): name for name, p in replica.model.named_parameters()}
        sizes = {names[id(p)]: p.numel() for p in self._flat.parameters}
        if isinstance(when, Layerwise):
            rates = _checked_rates(when, sizes)
            self._push_every = self._fetch_every = [rates[names[id(p)]] for p in self._flat.parameters]
        else:
            push, fetch = (when.push, when.fetch) if isinstance(when, Async) else (1, 1)
            self._push_every, self._fetch_every = ([n] * len(sizes) for n in (push, fetch))
        # A worker that trains several steps on the parameters it has applies its own gradients to them in between.
        self._steps_locally = isinstance(when, Async) and (when.push > 1 or when.fetch > 1)

    def before_forward(self) -> None:
        """Fetch what is due."""
        super().before_forward()
        ranges = self._ranges(self._due(self._fetch_every))
        if not ranges:
            return
        is_all = len(ranges) == 1 and ranges[0] == (0, self._flat.numel)
        # What comes a little late is worth waiting for; a network that is slower than that is hidden behind the step,
        # as long as what this worker has is as new as the bound asks for.
        patience_s = _PATIENCE * self._step_s if self._bound else _LONG_S
        if is_all and self._servers.take_ahead(self._buffer, patience_s) and self._is_fresh():
            pass  # it came in time, and not from before this worker waited at the gate
        elif is_all and self._bound and self._is_fresh():
            return
        elif is_all:
            self._servers.pull(self._buffer)
        else:
            self._flat.read(self._buffer)  # what is not due stays as it is
            self._servers.pull(self._buffer, ranges)
        log = self.replica.log
        apart = distance(self._flat.read(), self._buffer) if log.wants_disagreement() else None
        self._flat.write(self._buffer)
        self._tell(disagreement=apart)

    def update(self) -> None:
        """Add the gradient up; it is pushed when the step is done."""
        self._has_gradient = True
        now = time.monotonic()
        self._step_s, self._updated_s = now - self._updated_s, now

    def after_update(self, weight: float) -> bool:
        """Push what is due, and let the next parameters come while this worker does something else."""
        self._clock += 1
        if self._has_gradient:
            self._sum.add_(self._gradient, alpha=weight)
            self._unsent.update(range(len(self._flat.parameters)))
            if self._steps_locally:
                self._gradient.mul_(weight)
                self.replica.optimizer.step()
        self._has_gradient = False
        self._push(self._unsent.intersection(self._due(self._push_every)), ticks=1)
        if len(self._due(self._fetch_every)) == len(self._fetch_every):
            self._servers.pull_ahead()
        return False

    def may_go_on(self, limit_s: float) -> bool:
        """Not further ahead of the slowest than the bound."""
        return self._bound is None or self._servers.gate(self._bound, limit_s)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """What the servers have when everybody has pushed everything."""
        self.settle()
        yield
        self.replica.collective.barrier()  # nobody pushes before all have it

    def settle(self) -> None:
        """The same, for good."""
        self._ensure_begun()
        self._push(set(self._unsent), ticks=0)  # an empty push would be a step of the servers' optimiser, too
        self._pull()  # comes after this worker's own pushes
        self.replica.collective.barrier()
        self._flat.write(self._pull())
        self._tell()
        self.replica.collective.barrier()

    def _of_worker(self) -> dict[str, Any]:
        """This worker's optimiser, if it steps between fetches, and what could not be sent yet."""
        optimizer = self.replica.optimizer.state_dict() if self._steps_locally else None
        return {"residual": self._encoder.residual, "local": optimizer}

    def _is_fresh(self) -> bool:
        """Whether the parameters that were read last may be used for the next step."""
        return self._bound is None or is_fresh(self._servers.cache_clock, self._clock, self._bound)

    def _take_up(self, saved: dict[str, Any]) -> None:
        self._encoder.take_up(saved["residual"])
        if saved["local"] is not None:
            self.replica.optimizer.load_state_dict(saved["local"])

    def _push(self, parameters: set[int], *, ticks: int) -> None:
        if not parameters:
            self._servers.tick(ticks)
            return
        self._unsent -= parameters
        ranges = self._ranges(parameters)
        whole = ranges == [(0, self._flat.numel)]
        spans = None if whole else ranges
        if self._encoder.is_exact:
            rows = self._touched_rows() if whole else None
            self._servers.push(self._sum, weight=1.0, ranges=spans, rows=rows, ticks=ticks)
        else:
            payloads = self._encoder.encode(self._sum, spans)
            self._servers.push(
                None, weight=1.0, ranges=spans, payloads=payloads, codec=self._encoder.codec, ticks=ticks
            )
        for low, high in ranges:
            self._sum[low:high] = 0.0

    def _touched_rows(self) -> dict[int, torch.Tensor] | None:
        """Of embeddings, the rows that this worker's samples have touched: mostly few, so only they travel."""
        if not self._embeddings:
            return None
        views = views_of(self._sum, self._flat.parameters)
        return {index: views[index].any(dim=1).nonzero().flatten() for index in self._embeddings}

    def _due(self, every: list[int]) -> list[int]:
        """The parameters, by index, whose turn it is."""
        return [index for index, steps in enumerate(every) if self._clock % steps == 0]

    def _ranges(self, parameters: Collection[int]) -> list[tuple[int, int]]:
        """Where these parameters, by index, lie in the vector; ranges that touch are joined."""
        ranges: list[tuple[int, int]] = []
        offset = 0
        for index, p in enumerate(self._flat.parameters):
            if index in parameters and p.numel():
                if ranges and ranges[-1][1] == offset:
                    ranges[-1] = (ranges[-1][0], offset + p.numel())
                else:
                    ranges.append((offset, offset + p.numel()))
            offset += p.numel()
        return ranges


def _checked_rates(when: Layerwise, sizes: dict[str, int]) -> dict[str, int]:
    for key in when.rates:
        if not any(name.startswith(key) for name in sizes):
            raise UnknownName.among("layer", key, sizes)
    return when.rate_of(sizes)
