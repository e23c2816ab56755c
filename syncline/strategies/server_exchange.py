"""What all strategies with parameter servers share: the connection to the servers, and encoding what is pushed.

The servers hold the parameters. Not here: the servers and their protocol (`comms/parameter_server/`), and what is sent
when (`methods/synchronous_servers.py`, `methods/asynchronous_servers.py`, `methods/elastic_averaging.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from syncline.errors import ConfigError
from syncline.strategies.exchange import LocalExchange, Replica
from syncline.strategies.how import Exact, WithCodec
from syncline.strategies.lazy import codecs, flat, outgoing, torch
from syncline.strategies.method import Method

if TYPE_CHECKING:
    from syncline.comms.collective import Collective
    from syncline.comms.parameter_server.client import ParameterServers
    from syncline.config.spec import Spec

__all__ = ["Encoder", "ServerExchange", "embeddings"]

_KEPT = "kept"
"""Stands for the servers' state where they have kept it themselves."""


class ServerExchange(LocalExchange):
    """An `Exchange` with parameter servers; a strategy of your own may build on it.

    `servers` is the connection: `push`, `pull`, `collect`, `pull_elastic`. `flat` reads and writes the parameters as
    one vector, `gradient` and `buffer` are such vectors. Servers with the rule "apply" step with each gradient that is
    pushed, with "collect" they wait for all workers' gradients and step once, with "elastic" they hold the center of an
    elastic average. They step with `optimizer`, by default the task's own.
    """

    def __init__(
        self,
        replica: Replica,
        method: Method,
        rule: Literal["apply", "collect", "elastic"] = "apply",
        optimizer: Spec | None = None,
        rate: float = 0.0,
    ) -> None:
        super().__init__(replica, method)
        assert replica.open_servers is not None, "the planner starts servers for a strategy that needs them"
        self.flat = flat.FlatParameters(replica.gradients.parameters, what="A parameter server")
        if self.flat.dtype != torch.float32:
            raise ConfigError(
                f"The servers keep parameters in float32, and this model's are {self.flat.dtype}. Convert the model "
                "with .float(), or use --strategy allreduce."
            )
        self._rule: Literal["apply", "collect", "elastic"] = rule
        self._rate = rate
        self._server_optimizer: torch.optim.Optimizer | None = (
            getattr(torch.optim, optimizer.name)(replica.gradients.parameters, **optimizer.options)
            if optimizer is not None
            else None
        )
        self._has_begun = False
        self._saved: dict[str, Any] | None = None
        self.servers: ParameterServers = replica.open_servers()
        self.buffer = self.flat.empty()
        self._received_before = 0
        replica.log.count_bytes(lambda: self.servers.bytes_sent)

    @property
    def gradient(self) -> torch.Tensor:
        return self.replica.gradients.flats[0][: self.flat.numel]

    def before_forward(self) -> None:
        """Before the first step, start the servers."""
        self.start_servers()

    def start_servers(self) -> None:
        """Start the servers from rank 0's parameters or from their saved state.

        Not in `begin`: a saved state is loaded after it.
        """
        if self._has_begun:
            return
        self._has_begun = True
        keeps = self._saved is not None and self._saved["servers"] == _KEPT
        sparse = {id(m.weight) for m in embeddings(self.replica.model) if m.sparse}
        with self.replica.whole_optimizer() as own:
            self.servers.begin(
                self.flat.parameters,
                self._server_optimizer or own,
                rule=self._rule,
                rate=self._rate,
                clock=self.replica.step,
                sparse=[id(p) in sparse for p in self.flat.parameters],
                state=self._saved["servers"] if self._saved is not None and not keeps else None,
                mode="keep" if keeps else "start",
            )
        if keeps:
            self.flat.write(self.pull())
        if self._saved is not None:
            self.load_worker_state(self._saved)

    def load_worker_state(self, saved: dict[str, Any]) -> None:
        """Load what `worker_state` returned; called when the servers have started."""

    def pull(self) -> torch.Tensor:
        """The servers' parameters, in `buffer`."""
        self.servers.pull(self.buffer)
        return self.buffer

    def report(self, disagreement: float | None = None) -> None:
        received = self.servers.bytes_received
        self.replica.log.exchanged(
            bytes_received=received - self._received_before,
            staleness=self.servers.take_staleness(),
            disagreement=disagreement,
        )
        self._received_before = received

    @contextmanager
    def shared(self) -> Iterator[None]:
        self.settle()
        yield
        if self.is_asynchronous:
            self.replica.collective.barrier()  # no worker pushes before all have pulled

    def settle(self) -> None:
        """Take the servers' parameters, after all workers have pushed everything."""
        self.start_servers()
        self.pull()  # comes after this worker's own pushes
        self.replica.collective.barrier()
        self.flat.write(self.pull())
        self.report()
        self.replica.collective.barrier()

    def private_state(self) -> dict[str, Any]:
        """What this worker holds and, for rank 0, the servers' state."""
        return {**self.worker_state(), "servers": self.servers.state() if self.replica.collective.rank == 0 else None}

    def committed_steps(self) -> dict[int, int] | None:
        """What the servers have of each worker. Workers of the previous View can no longer push."""
        assert self.replica.open_servers is not None, "as in the beginning"
        return self.replica.open_servers().applied_steps()

    def merge(self, survivors: Collective) -> None:
        """Nothing to merge: the parameters are at the servers."""
        survivors.barrier()

    def carried_state(self) -> dict[str, Any] | None:
        return {**self.worker_state(), "servers": _KEPT}

    def replacement_state(self) -> dict[str, Any] | None:
        """The servers keep their state; this worker's residual is its own."""
        return {**self.worker_state(), "servers": _KEPT, "residual": None}

    def worker_state(self) -> dict[str, Any]:
        """What this worker holds beside the servers' state, for checkpoints."""
        return {}

    def load_private_state(self, state: dict[str, Any]) -> None:
        """Kept until the servers start."""
        self._saved = state


class Encoder:
    """Encodes what is pushed, each shard separately, with error feedback."""

    def __init__(self, how: WithCodec, servers: ParameterServers, numel: int) -> None:
        self.is_exact = how == Exact()
        self.codec = how.codec()
        self.servers = servers
        self.residual: torch.Tensor | None = None if self.is_exact else torch.zeros(numel)

    def encode(self, flat: torch.Tensor, ranges: list[tuple[int, int]] | None = None) -> list[torch.Tensor]:
        """The payload for each shard; the residual of these ranges is brought up to date."""
        assert self.residual is not None
        payloads = []
        for index, shard in enumerate(self.servers.ranges):
            wanted = outgoing.part_of(flat, shard, ranges)
            step = codecs.compensate(self.codec, wanted, outgoing.part_of(self.residual, shard, ranges))
            payloads.append(step.payload)
            self._remember(index, step.residual, ranges)
        return payloads

    def load(self, residual: torch.Tensor | None) -> None:
        if residual is not None:
            self.residual = residual

    def _remember(self, index: int, residual: torch.Tensor, ranges: list[tuple[int, int]] | None) -> None:
        assert self.residual is not None
        first, last = self.servers.ranges[index]
        offset = 0
        for low, high in ranges or [(first, last)]:
            low, high = max(low, first), min(high, last)
            if low < high:
                self.residual[low:high] = residual[offset : offset + high - low]
                offset += high - low


def embeddings(model: torch.nn.Module) -> list[Any]:
    """The layers of which a batch touches only some rows."""
    return [m for m in model.modules() if isinstance(m, (torch.nn.Embedding, torch.nn.EmbeddingBag))]
