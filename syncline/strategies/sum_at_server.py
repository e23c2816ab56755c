"""Gradients, every step, summed and applied by parameter servers.

The servers wait for every worker's gradient, apply  g = sum_k (n_k / N) g_k  once, and everybody goes on with the
result: the same as an all-reduce (MXNet's dist_sync, TensorFlow's sync replicas; Li et al. 2014). Stale-synchronous
with bound 0 is this, too: nobody ahead of anybody is all together.
"""

from __future__ import annotations

import math
from typing import Any

from syncline.config.spec import Spec
from syncline.strategies.exchange import Replica
from syncline.strategies.how import How
from syncline.strategies.server_line import Encoder, WithServers, optimizer_for

__all__ = ["SumAtServer"]


class SumAtServer(WithServers):
    """An `Exchange`: the servers sum the gradients of all workers and apply them."""

    def __init__(self, replica: Replica, how: How, optimizer: Spec | None) -> None:
        super().__init__(replica, "collect", optimizer_for(replica, optimizer))
        self._encoder = Encoder(how, self._servers, self._flat.numel)

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

    def _of_worker(self) -> dict[str, Any]:
        """What could not be sent yet."""
        return {"residual": self._encoder.residual}

    def _take_up(self, saved: dict[str, Any]) -> None:
        self._encoder.take_up(saved["residual"])
