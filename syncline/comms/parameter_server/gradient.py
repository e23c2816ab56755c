"""A worker's gradient for one shard: from the format in which it traveled to the `.grad` of the shard's parameters.

Here: whole gradients, ranges of them, and rows of sparse ones. Not here: decoding bytes (`server.py`), and the
optimizer's step (`shard.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from syncline.comms.parameter_server.chunks import ParameterChunk, Span, overlap


@dataclass(frozen=True)
class Gradient:
    """A worker's gradient for one shard, as it traveled. The shard may overwrite its memory."""

    values: Tensor
    """Flat float32: for each chunk, in order, its named rows, or else its values inside the spans."""
    rows: Mapping[int, Tensor] = field(default_factory=dict)
    """By index of the chunk, the rows that are given (int64, each once); its other rows are untouched."""
    spans: Sequence[Span] | None = None
    """The ranges of the shard that are given, ascending and disjoint; None is all of it."""

    @property
    def is_whole(self) -> bool:
        """Every value of the shard is given, in order."""
        return not self.rows and self.spans is None


def set_gradients(gradient: Gradient, chunks: Sequence[ParameterChunk], parameters: Sequence[nn.Parameter]) -> None:
    """Set the `.grad` of each chunk's parameter; None where the gradient has nothing for it."""
    taken = 0
    values = gradient.values
    for index, (chunk, parameter) in enumerate(zip(chunks, parameters, strict=True)):
        rows = gradient.rows.get(index)
        if rows is not None:
            count = len(rows) * chunk.row_numel
            parameter.grad = gradient_of_rows(chunk, rows, values[taken : taken + count])
            taken += count
            continue
        spans = [chunk.span] if gradient.spans is None else [c for s in gradient.spans if (c := overlap(s, chunk.span))]
        count = sum(high - low for low, high in spans)
        if not spans:
            parameter.grad = None  # as torch has it for a parameter that took no part
        elif count == chunk.numel:
            parameter.grad = as_sparse(chunk, values[taken : taken + count].view(chunk.shape))
        else:
            dense = torch.zeros(chunk.numel)
            for low, high in spans:
                dense[low - chunk.offset : high - chunk.offset] = values[taken : taken + high - low]
                taken += high - low
            parameter.grad = as_sparse(chunk, dense.view(chunk.shape))
            continue
        taken += count
    if taken != values.numel():
        raise ValueError(f"The message describes a gradient of {taken} values, but {values.numel()} arrived.")


def dense_gradient(gradient: Gradient, chunks: Sequence[ParameterChunk], numel: int) -> Tensor:
    """The gradient as one flat tensor of the shard's `numel` values, zero in rows that it does not name."""
    dense = torch.zeros(numel)
    taken = 0
    for index, chunk in enumerate(chunks):
        mine = dense[slice(*chunk.span)]
        rows = gradient.rows.get(index)
        count = chunk.numel if rows is None else len(rows) * chunk.row_numel
        given = gradient.values[taken : taken + count]
        taken += count
        if rows is None:
            mine.copy_(given)
        else:
            mine.view(chunk.rows, -1).index_copy_(0, rows, given.view(-1, chunk.row_numel))
    return dense


def gradient_of_rows(chunk: ParameterChunk, rows: Tensor, values: Tensor) -> Tensor:
    """The gradient of a chunk of which only some rows were touched."""
    shape = (len(rows), *chunk.shape[1:])
    if chunk.is_sparse:
        return torch.sparse_coo_tensor(
            rows.unsqueeze(0), values.view(shape), chunk.shape, check_invariants=True, is_coalesced=True
        )
    return torch.zeros(chunk.shape).index_copy_(0, rows, values.view(shape))


def as_sparse(chunk: ParameterChunk, gradient: Tensor) -> Tensor:
    """The kind of gradient that the chunk's optimizer expects: for a sparse chunk, a sparse one of all rows."""
    return gradient_of_rows(chunk, torch.arange(chunk.rows), gradient.reshape(-1)) if chunk.is_sparse else gradient
