"""Gradients, every step, summed and applied by parameter servers.

The servers wait for every worker's gradient, apply  g = sum_k (n_k / N) g_k  once, and all workers pull the result: the
same as an all-reduce (MXNet's dist_sync, TensorFlow's sync replicas; Li et al. 2014). Stale-synchronous with bound 0 is
this, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from syncline.errors import ConfigError
from syncline.strategies.answers import Answers, text_of
from syncline.strategies.exchange import Replica
from syncline.strategies.how import WithCodec
from syncline.strategies.lazy import outgoing
from syncline.strategies.method import AnswersMethod, Misfit, ModelShapes, Recovery, RunConditions, size
from syncline.strategies.server_exchange import Encoder, ServerExchange
from syncline.strategies.traffic import Traffic
from syncline.strategies.what import Gradients
from syncline.strategies.when import Every, Stale
from syncline.strategies.whom import Server


@dataclass(frozen=True)
class SynchronousServers(AnswersMethod):
    """gradients | every(1) or stale(0) | server, with any codec."""

    what: Gradients
    when: Every | Stale
    whom: Server
    how: WithCodec

    title = "A sum at parameter servers"
    because: ClassVar[Mapping[str, str]] = {
        "what": "Servers apply gradients, or hold the center of an elastic average.",
        "when": "Servers that sum the gradients of all workers do so in every step.",
        "whom": "A server sums the gradients.",
        "how": "PowerSGD needs two sums over all workers, the second of which follows from the first; a server gets "
        "one message.",
    }
    is_lock_step = fits_between_replicas = True
    recovery: ClassVar[Recovery] = "merge"

    @classmethod
    def instead(cls, question: str, answers: Answers) -> Any:
        return None if question == "how" else super().instead(question, answers)

    def misfit(self) -> Misfit | None:
        if self.when == Stale(0) or self.when == Every(1):
            return None
        because = (
            f"Gradients pushed every {getattr(self.when, 'steps', 'few')} steps by all workers together would leave "
        )
        return Misfit("when", f"{because}the steps between without an update.", None)

    @property
    def servers(self) -> int:
        return self.whom.shards

    @property
    def committed(self) -> str:
        return "If a worker fails, the servers keep the parameters; the step in flight is repeated."

    def check_run(self, run: RunConditions) -> None:
        super().check_run(run)
        if run.clip_norm is not None and self.servers > 1 and run.workers > 1:
            raise ConfigError(
                f"The gradients' norm cannot be clipped to {run.clip_norm:g} at {self.servers} servers, each of which "
                "sees only its part. Set shards=1, use --strategy allreduce, or leave out --clip-norm.",
                code="clip-norm-at-servers", shards=self.servers, clip_norm=run.clip_norm,
            )  # fmt: skip

    def bytes_per_step(self, model: ModelShapes, workers: int, optimizer_slots: int = 0) -> float:
        del optimizer_slots
        return float(model.encoded_bytes(self.how)) if workers > 1 else 0.0

    def traffic(self, model: ModelShapes, workers: int, optimizer_slots: int = 0) -> tuple[Traffic, ...]:
        del optimizer_slots
        if workers == 1:
            return ()
        sent = float(model.encoded_bytes(self.how))
        pulled = float(model.exact_bytes)
        shards, how = self.whom.shards, self.how
        return (Traffic(pattern="servers", sent_bytes=sent, received_bytes=pulled, shards=shards, encoding=how),)

    def memory_copies(self, optimizer_slots: int = 0) -> float:
        """The buffers that are pushed and pulled; the servers hold the optimizer's state."""
        return 2.0 - optimizer_slots

    def explain(self, model: ModelShapes, workers: int) -> list[str]:
        del workers
        it = "it steps" if self.servers == 1 else "they step"
        return [
            f"After each backward pass every worker pushes its gradients to {at_servers(self.whom)}. When all have "
            f"arrived, {it} with {step_of(self.whom)}, and every worker pulls the new parameters.",
            f"Each worker pushes {model.amount(self.how)}, and pulls {size(model.exact_bytes)} per step.",
        ]

    def exchange(self, replica: Replica) -> SynchronousServerExchange:
        return SynchronousServerExchange(replica, self)


def at_servers(whom: Server) -> str:
    return "the server" if whom.shards == 1 else f"the {whom.shards} servers (each holds a part of the model)"


def step_of(whom: Server) -> str:
    """The servers' optimizer, for `explain`."""
    return text_of(whom.optimizer) if whom.optimizer is not None else "the task's own optimizer"


class SynchronousServerExchange(ServerExchange):
    """An `Exchange`: the servers sum the gradients of all workers and apply them."""

    def __init__(self, replica: Replica, method: SynchronousServers) -> None:
        super().__init__(replica, method, "collect", method.whom.optimizer)
        self._encoder = Encoder(method.how, self.servers, self.flat.numel)

    def before_update(self, weight: float) -> bool:
        """Push all gradients, pull the updated parameters. The servers sum the piggybacked values, too."""
        encoder, piggybacked, clip_norm = self._encoder, self.replica.gradients.piggybacked, self.replica.clip_norm
        servers, out = self.servers, self.buffer
        if encoder.is_exact:
            servers.collect(self.gradient, piggybacked, weight=weight, clip_norm=clip_norm, out=out)
        else:
            # Weighted before it is encoded: what could not be sent keeps the weight of the samples that it came from.
            before = encoder.residual.clone() if encoder.residual is not None else None
            payloads = encoder.encode(self.gradient * weight)
            piggybacked.mul_(weight)
            gradient = outgoing.EncodedGradient(payloads, encoder.codec)
            servers.collect(gradient, piggybacked, weight=1.0, clip_norm=clip_norm, out=out)
            if not math.isfinite(float(piggybacked[0])):
                encoder.residual = before  # the servers have thrown away what was sent, so it counts as not sent
        self.report()
        return True

    def update(self) -> None:
        """The servers have stepped: take the new parameters."""
        self.flat.write(self.buffer)

    def settle(self) -> None:
        """Nothing: the replicas are equal."""

    def worker_state(self) -> dict[str, Any]:
        return {"residual": self._encoder.residual}

    def load_worker_state(self, saved: dict[str, Any]) -> None:
        self._encoder.load(saved["residual"])
