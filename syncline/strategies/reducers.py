"""Summing a flat tensor over all workers, encoded as the strategy says.

Here: `Reducer`, the weighted sum over workers with error feedback where the encoding is lossy. Exact sums use the
collective's own all-reduce; encoded ones are gathered and added in rank order, so that every worker ends up with the
same bits. PowerSGD (Vogels, Karimireddy & Jaggi 2019) needs two sums, the second of which follows from the first. Not
here: what is summed and when (`methods/`), the mathematics of the codecs (`comms/codecs/`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from syncline.comms.codecs import Codec, ErrorFeedback, powersgd
from syncline.comms.collective import Collective
from syncline.comms.serialize import bytes_to_tensor


class Reducer(Protocol):
    """The weighted sum over all workers of tensors of one kind, exchange after exchange."""

    def all_reduce_(self, flat: torch.Tensor, weight: float) -> None:
        """Replace `flat` by the sum over all workers of `weight * flat`, as far as the encoding lets through."""

    def state(self) -> dict[str, Any]:
        """What was not let through yet, for a checkpoint."""

    def load(self, state: dict[str, Any]) -> None: ...


class CodecReducer:
    """A `Reducer` for encodings that make one payload of a tensor; without a codec, it sums exactly."""

    def __init__(self, codec: Codec | None, collective: Collective) -> None:
        self._collective = collective
        self._codec = None if codec is None else ErrorFeedback(codec)

    def all_reduce_(self, flat: torch.Tensor, weight: float) -> None:
        """Encode, gather, and add up in rank order."""
        codec = self._codec
        if codec is None or self._collective.size == 1:
            self._collective.all_reduce_(flat, weight)
            return
        before = codec.state()
        payload = codec.encode(flat * weight)
        parts = self._collective.all_gather(payload.numpy().tobytes())
        flat.copy_(_decoded(codec, parts[0], flat))
        for part in parts[1:]:
            flat.add_(_decoded(codec, part, flat))
        # Finite sums have finite terms; a sum is cheaper than a look at each.
        if not flat.sum().isfinite() and not flat.isfinite().all():
            codec.load(before)  # every worker discards this sum, so it counts as not sent

    def state(self) -> dict[str, Any]:
        return dict(self._codec.state()) if self._codec is not None else {}

    def load(self, state: dict[str, Any]) -> None:
        if self._codec is not None:
            self._codec.load(state)


def _decoded(codec: Codec, part: bytes, like: torch.Tensor) -> torch.Tensor:
    payload = bytes_to_tensor(part)
    return codec.decode(payload, like.numel()).to(like.device)


class PowerSGDReducer:
    """A `Reducer` that sends each matrix as the product of two thin ones.

    With M_k = (n_k / N) g_k + e_k worker k's weighted gradient and residual, one matrix goes

        P = sum_k M_k Q        P^ = orthogonalize(P)        Q_k = M_k^T P^        Q = sum_k Q_k
        g = P^ Q^T             e_k <- M_k - P^ Q_k^T

    Every worker has the same P^ and Q, hence the same g; the residuals differ.
    """

    def __init__(self, rank: int, shapes: Sequence[Sequence[int]], collective: Collective, seed: int) -> None:
        self._collective = collective
        self._cut = powersgd.cut(shapes, rank)
        self._qs = self._cut.start(seed)
        self._residual: torch.Tensor | None = None

    def all_reduce_(self, flat: torch.Tensor, weight: float) -> None:
        """Replace `flat` by the sum over all workers of `weight * flat`, as far as the thin matrices hold it."""
        if self._collective.size == 1:
            self._collective.all_reduce_(flat, weight)
            return
        wanted = flat * weight if self._residual is None else torch.add(self._residual, flat, alpha=weight)
        matrices, plain = self._cut.split(wanted)
        lefts = self._summed([*map(powersgd.left, matrices, self._qs), plain])
        *ps, plain = powersgd.unpack(lefts, [*self._cut.left_shapes, plain.shape])
        ps = [powersgd.orthogonalize(p) for p in ps]
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
        self._qs, self._residual = list(state["qs"]), state["residual"]

    def _summed(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        packed = powersgd.pack(parts)
        if packed.numel():
            self._collective.all_reduce_(packed)
        return packed
