"""Gradients and models through parameter servers, which keep the one true copy of the parameters.

Here, three exchanges:

`SumAtServer`     all together: the servers wait for every worker's gradient, apply the weighted sum once, and everybody
                  goes on with the result. The same as an all-reduce (MXNet's dist_sync, TensorFlow's sync replicas);
                  stale-synchronous with bound 0 is this, too.
`PushAndFetch`    each worker at its own pace: a gradient is applied as soon as it comes. With worker k's part n_k / N
                  of a step's samples the servers apply (n_k / N) g_k, so that each sample counts as much as in a
                  synchronous step. Rhythms: every step (MXNet's dist_async), added up over several steps (Downpour, Dean et al.
                  2012), within a bound of the slowest (SSP, Ho et al. 2013), at a rate per layer (Nexus).
`PullElastic`     models tied to a centre by a spring (EASGD, Zhang, Choromanska & LeCun 2015).

Not here: the servers and the line to them (`comms/parameter_server/`), the equations (`algorithms/`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from syncline.algorithms.codecs import Codec, compensate
from syncline.algorithms.outer import elastic
from syncline.algorithms.staleness import is_fresh
from syncline.comms.parameter_server.client import ParameterServers
from syncline.config.spec import Spec
from syncline.errors import ConfigError, UnknownName
from syncline.strategies.exchange import PlainExchange, Replica
from syncline.strategies.flat import FlatParameters, distance, views_of
from syncline.strategies.how import Exact, How, PowerSGD
from syncline.strategies.when import Async, Layerwise, Stale

__all__ = ["PullElastic", "PushAndFetch", "SumAtServer"]

_PATIENCE = 0.25
"""Which part of a step's time a worker that may use older parameters waits for newer ones."""
_LONG_S = 3600.0
"""Until they are there, or the line to the servers gives up."""
_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


class _WithServers(PlainExchange):
    """What all of them have in common."""

    def __init__(
        self,
        replica: Replica,
        rule: Literal["apply", "collect", "elastic"],
        optimizer: torch.optim.Optimizer,
        rate: float = 0.0,
    ) -> None:
        super().__init__(replica)
        assert replica.open_servers is not None, "the planner starts servers for a strategy that needs them"
        self._flat = FlatParameters(replica.gradients.parameters, what="A parameter server")
        if self._flat.dtype != torch.float32:
            raise ConfigError(
                f"The servers keep parameters in float32, and this model's are {self._flat.dtype}. Convert the model "
                "with .float(), or use --strategy allreduce."
            )
        self._rule: Literal["apply", "collect", "elastic"] = rule
        self._server_optimizer, self._rate = optimizer, rate
        self._has_begun = False
        self._saved: dict[str, Any] | None = None
        self._servers: ParameterServers = replica.open_servers()
        self._buffer = self._flat.empty()
        self._received_before = 0
        replica.log.count_bytes(lambda: self._servers.bytes_sent)

    @property
    def _gradient(self) -> torch.Tensor:
        return self.replica.gradients.flats[0][: self._flat.numel]

    def before_forward(self) -> None:
        """The first time, the servers begin."""
        self._ensure_begun()

    def _ensure_begun(self) -> None:
        """The servers start from the first worker's parameters, and from their saved state if there is one.

        Not in `begin`: what was saved is known only after it.
        """
        if self._has_begun:
            return
        self._has_begun = True
        sparse = {id(m.weight) for m in self.replica.model.modules() if isinstance(m, _EMBEDDINGS) and m.sparse}
        self._servers.begin(
            self._flat.parameters,
            self._server_optimizer,
            rule=self._rule,
            rate=self._rate,
            clock=self.replica.step,
            sparse=[id(p) in sparse for p in self._flat.parameters],
            state=self._saved["servers"] if self._saved is not None else None,
        )
        if self._saved is not None:
            self._take_up(self._saved)

    def _take_up(self, saved: dict[str, Any]) -> None:
        """What this worker had for itself, now that the servers have begun."""

    def _pull(self) -> torch.Tensor:
        self._servers.pull(self._buffer)
        return self._buffer

    def _tell(self, disagreement: float | None = None) -> None:
        received = self._servers.bytes_received
        self.replica.log.exchanged(
            bytes_received=received - self._received_before,
            staleness=self._servers.take_staleness(),
            disagreement=disagreement,
        )
        self._received_before = received

    def private_state(self) -> dict[str, Any]:
        """The servers' state, in the first worker's name."""
        return {"servers": self._servers.state() if self.replica.collective.rank == 0 else None}

    def load_private_state(self, state: dict[str, Any]) -> None:
        """To be taken up when the servers begin."""
        self._saved = state


class SumAtServer(_WithServers):
    """An `Exchange`: the servers sum the gradients of all workers and apply them."""

    def __init__(self, replica: Replica, how: How, optimizer: Spec | None) -> None:
        super().__init__(replica, "collect", _optimizer_for(replica, optimizer))
        self._encoder = _Encoder(how, self._servers, self._flat.numel)

    def before_update(self, weight: float) -> bool:
        """Everybody's gradient to the servers, and their sum's effect back. The riders are summed there, too."""
        encoder, riders, clip_norm = self._encoder, self.replica.gradients.riders, self.replica.clip_norm
        servers, out = self._servers, self._buffer
        if encoder.is_exact:
            servers.collect(self._gradient, riders, weight=weight, clip_norm=clip_norm, out=out)
        else:
            # Weighted before it is encoded: what could not be sent keeps the weight of the samples that it came from.
            before = encoder.residual.clone() if encoder.residual is not None else None
            payloads = encoder.encode(self._gradient * weight)
            riders.mul_(weight)
            servers.collect(
                None, riders, weight=1.0, clip_norm=clip_norm, payloads=payloads, codec=encoder.codec, out=out
            )
            if not math.isfinite(float(riders[0])):
                encoder.residual = before  # the servers have thrown away what was sent, so it counts as not sent
        self._tell()
        return True

    def update(self) -> None:
        """The servers have stepped; take what came of it."""
        self._flat.write(self._buffer)

    def private_state(self) -> dict[str, Any]:
        """And what could not be sent yet."""
        return {**super().private_state(), "residual": self._encoder.residual}

    def _take_up(self, saved: dict[str, Any]) -> None:
        self._encoder.residual = saved["residual"]


class PushAndFetch(_WithServers):
    """An `Exchange`: push gradients and fetch parameters, each worker at its own pace."""

    is_asynchronous = True

    def __init__(self, replica: Replica, when: Async | Stale | Layerwise, how: How, optimizer: Spec | None) -> None:
        super().__init__(replica, "apply", _optimizer_for(replica, optimizer))
        self._encoder = _Encoder(how, self._servers, self._flat.numel)
        self._bound = when.bound if isinstance(when, Stale) else None
        self._clock = replica.step
        self._sum = torch.zeros_like(self._buffer)
        self._has_gradient = False
        self._step_s, self._updated_s = 0.0, time.monotonic()
        embeddings = {id(m.weight) for m in replica.model.modules() if isinstance(m, _EMBEDDINGS)}
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
        ranges = self._due(self._fetch_every)
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
            if self._steps_locally:
                self._gradient.mul_(weight)
                self.replica.optimizer.step()
        self._has_gradient = False
        self._push(self._due(self._push_every), ticks=1)
        if self._due(self._fetch_every) == [(0, self._flat.numel)]:
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
        self._push([(0, self._flat.numel)], ticks=0)
        self._pull()  # comes after this worker's own pushes
        self.replica.collective.barrier()
        self._flat.write(self._pull())
        self._tell()
        self.replica.collective.barrier()

    def private_state(self) -> dict[str, Any]:
        """This worker's optimiser, if it steps between fetches, and what could not be sent yet."""
        optimizer = self.replica.optimizer.state_dict() if self._steps_locally else None
        return {**super().private_state(), "residual": self._encoder.residual, "local": optimizer}

    def _is_fresh(self) -> bool:
        """Whether the parameters that were read last may be used for the next step."""
        return self._bound is None or is_fresh(self._servers.cache_clock, self._clock, self._bound)

    def _take_up(self, saved: dict[str, Any]) -> None:
        self._encoder.residual = saved["residual"]
        if saved["local"] is not None:
            self.replica.optimizer.load_state_dict(saved["local"])

    def _push(self, ranges: list[tuple[int, int]], *, ticks: int) -> None:
        if not ranges:
            self._servers.tick(ticks)
            return
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

    def _due(self, every: list[int]) -> list[tuple[int, int]]:
        """The ranges of the parameters whose turn it is, those that touch joined."""
        ranges: list[tuple[int, int]] = []
        offset = 0
        for p, steps in zip(self._flat.parameters, every, strict=True):
            if self._clock % steps == 0 and p.numel():
                if ranges and ranges[-1][1] == offset:
                    ranges[-1] = (ranges[-1][0], offset + p.numel())
                else:
                    ranges.append((offset, offset + p.numel()))
            offset += p.numel()
        return ranges


class PullElastic(_WithServers):
    """An `Exchange`: every n steps a worker's model and the centre pull at each other."""

    is_asynchronous = True

    def __init__(self, replica: Replica, outer: elastic, steps: int) -> None:
        super().__init__(replica, "elastic", replica.optimizer, outer.rate)
        self._outer, self._steps = outer, steps
        self._step = replica.step
        self._own: torch.Tensor | None = None

    def after_update(self, weight: float) -> bool:
        """Pull at the centre, and be pulled, if it is time."""
        del weight
        self._step += 1
        if self._step % self._steps == 0:
            before = self._flat.read(self._buffer)
            own = before.clone() if self.replica.log.wants_disagreement() else None
            self._servers.pull_elastic(self._buffer)
            self._flat.write(self._buffer)
            apart = None
            if own is not None:  # x_k moved by rate (x_k - centre)
                centre = own + (self._buffer - own) / self._outer.rate
                apart = distance(own, centre)
            self._tell(disagreement=apart)
        return False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """The centre; afterwards everybody has its own model again."""
        self._ensure_begun()
        self._own = self._flat.read()
        self.replica.collective.barrier()
        self._flat.write(self._pull())
        try:
            yield
        finally:
            self._flat.write(self._own)
            self._own = None
        self.replica.collective.barrier()

    def settle(self) -> None:
        """The centre."""
        self._ensure_begun()
        self.replica.collective.barrier()
        self._flat.write(self._pull())
        self.replica.collective.barrier()

    def private_state(self) -> dict[str, Any]:
        """This worker's own model and optimiser."""
        own = self._own if self._own is not None else self._flat.read()
        return {**super().private_state(), "optimizer": self.replica.optimizer.state_dict(), "own": own.clone()}

    def _take_up(self, saved: dict[str, Any]) -> None:
        self.replica.optimizer.load_state_dict(saved["optimizer"])
        self._flat.write(saved["own"])


class _Encoder:
    """Encodes what is pushed, for each shard by itself, together with what could not be sent before."""

    def __init__(self, how: How, servers: ParameterServers, numel: int) -> None:
        assert not isinstance(how, PowerSGD), "refused by Strategy: it needs two sums over all workers"
        self.is_exact = isinstance(how, Exact)
        self.codec: Codec = how.codec()
        self._servers = servers
        self.residual: torch.Tensor | None = None if self.is_exact else torch.zeros(numel)

    def encode(self, flat: torch.Tensor, ranges: list[tuple[int, int]] | None = None) -> list[torch.Tensor]:
        """The payload for each shard; the residual of these ranges is brought up to date."""
        assert self.residual is not None
        payloads = []
        for index in range(len(self._servers.ranges)):
            wanted = self._servers.part(index, flat, ranges)
            step = compensate(self.codec, wanted, self._servers.part(index, self.residual, ranges))
            payloads.append(step.payload)
            self._remember(index, step.residual, ranges)
        return payloads

    def _remember(self, index: int, residual: torch.Tensor, ranges: list[tuple[int, int]] | None) -> None:
        assert self.residual is not None
        first, last = self._servers.ranges[index]
        offset = 0
        for low, high in ranges or [(first, last)]:
            low, high = max(low, first), min(high, last)
            if low < high:
                self.residual[low:high] = residual[offset : offset + high - low]
                offset += high - low


def _optimizer_for(replica: Replica, spec: Spec | None) -> torch.optim.Optimizer:
    """What the servers step with: the worker's own optimiser, or the one that the strategy names."""
    if spec is None:
        return replica.optimizer
    made: torch.optim.Optimizer = getattr(torch.optim, spec.name)(replica.gradients.parameters, **spec.options)
    return made


def _checked_rates(when: Layerwise, sizes: dict[str, int]) -> dict[str, int]:
    for key in when.rates:
        if not any(name.startswith(key) for name in sizes):
            raise UnknownName.among("layer", key, sizes)
    return when.rate_of(sizes)
