"""What all strategies with parameter servers have in common: the line to the servers, and encoding what goes there.

The servers keep the one true copy of the parameters. Not here: the servers and their wire (`comms/parameter_server/`),
and what is sent when (`sum_at_server.py`, `push_and_fetch.py`, `pull_elastic.py`).
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from syncline.algorithms.codecs import Codec, compensate
from syncline.comms.collective import Collective
from syncline.comms.parameter_server.client import ParameterServers
from syncline.config.spec import Spec
from syncline.errors import ConfigError
from syncline.strategies.exchange import PlainExchange, Recovery, Replica
from syncline.strategies.flat import FlatParameters
from syncline.strategies.how import Exact, How, PowerSGD

__all__ = ["EMBEDDINGS", "Encoder", "WithServers", "optimizer_for"]

EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


_KEPT = "kept"
"""Stands for the servers' state where they have kept it themselves."""


class WithServers(PlainExchange):
    """What all of them have in common."""

    recovery: Recovery = "merge"

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
        keeps = self._saved is not None and self._saved["servers"] == _KEPT
        sparse = {id(m.weight) for m in self.replica.model.modules() if isinstance(m, EMBEDDINGS) and m.sparse}
        self._servers.begin(
            self._flat.parameters,
            self._server_optimizer,
            rule=self._rule,
            rate=self._rate,
            clock=self.replica.step,
            sparse=[id(p) in sparse for p in self._flat.parameters],
            state=self._saved["servers"] if self._saved is not None and not keeps else None,
            keeps=keeps,
        )
        if keeps:
            self._flat.write(self._pull())
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
        """The servers' state, in the first worker's name, and what this worker holds."""
        return {**self._of_worker(), "servers": self._servers.state() if self.replica.collective.rank == 0 else None}

    def effects(self) -> dict[int, int] | None:
        """What the servers have of each worker. Who was of the View before cannot push any more."""
        assert self.replica.open_servers is not None, "as in the beginning"
        return self.replica.open_servers().earlier()

    def merge(self, survivors: Collective) -> None:
        """What the workers have in common is at the servers."""
        survivors.barrier()

    def carried_state(self) -> dict[str, Any] | None:
        """The servers keep theirs."""
        return {**self._of_worker(), "servers": _KEPT}

    def newcomers_state(self) -> dict[str, Any] | None:
        """The servers keep theirs; what this worker could not send yet is its own."""
        return {**self._of_worker(), "servers": _KEPT, "residual": None}

    def _of_worker(self) -> dict[str, Any]:
        """What this worker holds beside the servers."""
        return {}

    def load_private_state(self, state: dict[str, Any]) -> None:
        """To be taken up when the servers begin."""
        self._saved = state


class Encoder:
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

    def take_up(self, residual: torch.Tensor | None) -> None:
        """What could not be sent before; None: nothing."""
        if residual is not None:
            self.residual = residual

    def _remember(self, index: int, residual: torch.Tensor, ranges: list[tuple[int, int]] | None) -> None:
        assert self.residual is not None
        first, last = self._servers.ranges[index]
        offset = 0
        for low, high in ranges or [(first, last)]:
            low, high = max(low, first), min(high, last)
            if low < high:
                self.residual[low:high] = residual[offset : offset + high - low]
                offset += high - low


def optimizer_for(replica: Replica, spec: Spec | None) -> torch.optim.Optimizer:
    """What the servers step with: the worker's own optimiser, or the one that the strategy names."""
    if spec is None:
        return replica.optimizer
    made: torch.optim.Optimizer = getattr(torch.optim, spec.name)(replica.gradients.parameters, **spec.options)
    return made
