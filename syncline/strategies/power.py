"""PowerSGD's two exchanges (Vogels, Karimireddy & Jaggi 2019): gradients as products of thin matrices.

Here: `PowerCombiner`, which takes the place of a `Combiner`: the encoding needs two sums that follow from each other
instead of one payload. The mathematics is in `algorithms/codecs/powersgd.py`.

With M_k = (n_k / N) g_k + e_k worker k's weighted gradient and residual, one matrix goes

    P = sum_k M_k Q        P^ = orthogonalise(P)        Q_k = M_k^T P^        Q = sum_k Q_k
    g = P^ Q^T             e_k <- M_k - P^ Q_k^T

Every worker has the same P^ and Q, hence the same g; the residuals differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from syncline.algorithms.codecs import powersgd
from syncline.comms.collective import Collective

__all__ = ["PowerCombiner"]


class PowerCombiner:
    """The weighted sum over all workers of flat tensors that are made of parameters of these `shapes`."""

    def __init__(self, rank: int, shapes: Sequence[Sequence[int]], collective: Collective, seed: int) -> None:
        self._collective = collective
        self._cut = powersgd.PowerSGD(rank).cut(shapes)
        self._qs = self._cut.start(seed)
        self._residual: torch.Tensor | None = None

    def sum_(self, flat: torch.Tensor, weight: float) -> None:
        """Replace `flat` by the sum over all workers of `weight * flat`, as far as the thin matrices hold it."""
        if self._collective.size == 1:
            self._collective.sum_(flat, weight)
            return
        wanted = flat * weight if self._residual is None else torch.add(self._residual, flat, alpha=weight)
        matrices, plain = self._cut.split(wanted)
        lefts = self._summed([*map(powersgd.left, matrices, self._qs), plain])
        *ps, plain = powersgd.unpack(lefts, [*self._cut.left_shapes, plain.shape])
        ps = [powersgd.orthogonalise(p) for p in ps]
        own_qs = [powersgd.right(m, p) for m, p in zip(matrices, ps, strict=True)]
        qs = powersgd.unpack(self._summed(own_qs), self._cut.right_shapes)
        result = self._cut.join([powersgd.reconstruct(p, q) for p, q in zip(ps, qs, strict=True)], plain)
        flat.copy_(result)
        if not bool(torch.isfinite(result).all()):
            return  # this step will be thrown away; what it would leave behind must not spoil the next ones
        _, own_plain = self._cut.split(wanted)
        sent = self._cut.join([powersgd.reconstruct(p, q) for p, q in zip(ps, own_qs, strict=True)], own_plain)
        self._residual = wanted - sent
        self._qs = [q.clone() for q in qs]

    def state(self) -> dict[str, Any]:
        """The Q of each matrix and what was not let through yet, for a checkpoint."""
        return {"qs": self._qs, "residual": self._residual}

    def load(self, state: dict[str, Any]) -> None:
        """Take up a `state`."""
        self._qs, self._residual = list(state["qs"]), state["residual"]

    def _summed(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        packed = powersgd.pack(parts)
        if packed.numel():
            self._collective.sum_(packed)
        return packed
