"""Buffers of a model whose layers run on different workers, such as batch norm's running statistics.

Here: `BufferBoard`. The worker that computes a layer changes its buffers, and publishes them with every step in memory
that its replica shares; the others read them when they need the whole model. There are two slots, for even and odd
steps: a worker that dies while it publishes leaves those of the step before. Not here: undoing a step in one worker
(`workers/train_state.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch


class BufferBoard:
    """The `buffers` of a whole model; this worker publishes those in `own`, by identity."""

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        own: Iterable[torch.Tensor],
        allocate: Callable[[int, torch.dtype], torch.Tensor],
    ) -> None:
        self._buffers = [buffer for buffer in buffers if buffer.numel()]
        mine = {id(buffer) for buffer in own}
        dtypes = sorted({buffer.dtype for buffer in self._buffers}, key=str)
        slots = {
            dtype: allocate(2 * sum(b.numel() for b in self._buffers if b.dtype == dtype), dtype).view(2, -1)
            for dtype in dtypes
        }
        ends = dict.fromkeys(dtypes, 0)
        self._places: list[tuple[torch.Tensor, torch.Tensor, bool]] = []
        for buffer in self._buffers:
            start = ends[buffer.dtype]
            ends[buffer.dtype] = start + buffer.numel()
            place = slots[buffer.dtype][:, start : start + buffer.numel()]
            self._places.append((buffer, place, id(buffer) in mine))

    def publish(self, step: int, *, everything: bool = False) -> None:
        """Publish this worker's buffers as they are after `step` steps; at the start, those of all layers."""
        for buffer, place, is_mine in self._places:
            if is_mine or everything:
                place[step % 2] = buffer.detach().reshape(-1)

    def read(self, step: int) -> None:
        """Take over the buffers of all layers, as they are after `step` steps."""
        for buffer, place, _ in self._places:
            buffer.detach().copy_(place[step % 2].view(buffer.shape))
