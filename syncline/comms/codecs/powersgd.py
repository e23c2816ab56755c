"""Gradients as products of two thin matrices: PowerSGD (Vogels, Karimireddy & Jaggi 2019).

For a matrix M (n x m) and a small rank r, with Q (m x r) kept from the step before, one step of power iteration:

    P = M Q,      averaged over workers,      P^ = orthogonalize(P),      Q = M^T P^,      averaged,      M ~ P^ Q^T

Both products are linear in M, so averaging P and Q over the workers gives what the averaged M would have given, and an
ordinary all-reduce does it; but one exchange follows from the other, so this is no `Codec` with its single payload.

Here: the four products for one matrix, and how a flat tensor is cut into matrices (`cut`). Not here: the two
exchanges. One step of a worker, where `mean` is the all-reduce:

    matrices, plain = cut.split(flat + residual)
    *ps, plain = unpack(mean(pack([*map(left, matrices, qs), plain])), [*cut.left_shapes, plain.shape])
    ps = [orthogonalize(p) for p in ps]
    local_qs = [right(m, p) for m, p in zip(matrices, ps)]
    qs = unpack(mean(pack(local_qs)), cut.right_shapes)
    flat = cut.join([reconstruct(p, q) for p, q in zip(ps, qs)], plain)

The residual (`feedback.py`) is what was wanted less what was sent: zero for the plain values, and for a matrix
M - reconstruct(p, local q), as in the paper's Algorithm 2. The authors' code takes the averaged q instead; the mean of
the residuals over workers is the same.

NaN and infinities in M make the products non-finite and so are seen by everyone. A step that is thrown away must leave
its qs behind too, or they would spoil all that follow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from syncline.errors import ConfigError


def start(rows: int, cols: int, rank: int, seed: int) -> Tensor:
    """The first Q of a `rows` x `cols` matrix: normal, the same on every worker that has the same seed."""
    rank = min(rank, rows, cols)
    # NumPy freezes the streams of MT19937 and RandomState for good, so that a run can be repeated years later.
    stream = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, rows, cols, rank])))
    return torch.from_numpy(stream.standard_normal((cols, rank))).to(torch.float32)


def left(m: Tensor, q: Tensor) -> Tensor:
    return m @ q


def orthogonalize(p: Tensor) -> Tensor:
    """P^: orthonormal columns that span those of `p`.

    By Householder reflections instead of the paper's Gram-Schmidt. Where `p` has too few independent columns they give
    some orthonormal ones all the same; with Gram-Schmidt, one step of zero gradients would make Q zero, hence every P
    after it, and the matrix would never be trained again.
    """
    basis: Tensor = torch.linalg.qr(p).Q
    return basis


def right(m: Tensor, p: Tensor) -> Tensor:
    return m.T @ p


def reconstruct(p: Tensor, q: Tensor) -> Tensor:
    """The approximation P^ Q^T of M."""
    return p @ q.T


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """All tensors in one flat one, so that they travel in one exchange."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)


def unpack(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The tensors that `pack` put together, as views."""
    parts = torch.split_with_sizes(flat, [math.prod(shape) for shape in shapes])
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]


@dataclass(frozen=True)
class Matrix:
    """One matrix in a flat tensor, to be approximated with `rank` columns."""

    offset: int
    rows: int
    cols: int
    rank: int


@dataclass(frozen=True)
class Cut:
    """Which parts of a flat tensor of `numel` values are matrices; the others travel as they are ("plain")."""

    numel: int
    matrices: tuple[Matrix, ...]

    @property
    def left_shapes(self) -> list[tuple[int, int]]:
        return [(m.rows, m.rank) for m in self.matrices]

    @property
    def right_shapes(self) -> list[tuple[int, int]]:
        return [(m.cols, m.rank) for m in self.matrices]

    @property
    def plain_numel(self) -> int:
        """How many values travel as they are."""
        return self.numel - sum(m.rows * m.cols for m in self.matrices)

    @property
    def wire_bytes(self) -> int:
        """What a worker contributes to both exchanges together."""
        return 4 * (self.plain_numel + sum(m.rank * (m.rows + m.cols) for m in self.matrices))

    def start(self, seed: int) -> list[Tensor]:
        """The first Q of each matrix; matrices of one shape start differently."""
        return [start(m.rows, m.cols, m.rank, seed + index) for index, m in enumerate(self.matrices)]

    def split(self, flat: Tensor) -> tuple[list[Tensor], Tensor]:
        """The matrices, as views of `flat`, and a copy of the plain values."""
        if flat.shape != (self.numel,):
            raise ValueError(f"This cut is for {self.numel} values, but the tensor has shape {tuple(flat.shape)}.")
        matrices = [flat[m.offset : m.offset + m.rows * m.cols].view(m.rows, m.cols) for m in self.matrices]
        return matrices, torch.cat([flat[low:high] for low, high in self._plain()])

    def join(self, matrices: Sequence[Tensor], plain: Tensor) -> Tensor:
        """The flat tensor of which `split` made these."""
        flat = torch.empty(self.numel, dtype=plain.dtype, device=plain.device)
        for m, matrix in zip(self.matrices, matrices, strict=True):
            flat[m.offset : m.offset + m.rows * m.cols].view(m.rows, m.cols).copy_(matrix)
        done = 0
        for low, high in self._plain():
            flat[low:high] = plain[done : done + high - low]
            done += high - low
        return flat

    def _plain(self) -> list[tuple[int, int]]:
        """The ranges before, between and after the matrices; some are empty."""
        starts = [0, *(m.offset + m.rows * m.cols for m in self.matrices)]
        ends = [*(m.offset for m in self.matrices), self.numel]
        return list(zip(starts, ends, strict=True))


def cut(shapes: Sequence[Sequence[int]], most_rank: int) -> Cut:
    """How to cut the flat tensor of parameters with these shapes, one behind the other.

    A parameter of two or more dimensions is a matrix with a row for each index of its first dimension. In which order
    the others are laid out (channels last, say) only permutes columns. Parameters of fewer dimensions, and those where
    r (n + m) >= n m, would not shrink and are plain.
    """
    if most_rank < 1:
        raise ConfigError(f"The rank of powersgd is {most_rank}, but it must be at least 1; 1 to 4 is usual.")
    matrices = []
    offset = 0
    for shape in shapes:
        numel = math.prod(shape)
        if len(shape) >= 2 and numel:
            rows, cols = shape[0], numel // shape[0]
            rank = min(most_rank, rows, cols)
            if rank * (rows + cols) < numel:
                matrices.append(Matrix(offset, rows, cols, rank))
        offset += numel
    return Cut(offset, tuple(matrices))
