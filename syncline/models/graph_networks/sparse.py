"""Products of sparse matrices with dense ones, by torch's kernels, and their gradients.

Here: `SparseMatrix`, constant, and `SparseRows`, features that are mostly zero, with dropout. Both keep their
transpose, so that the backward pass is a product as well. Not here: which matrices (`neighborhood.py`).
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from syncline.compute.dropout_operators import ones_by_row


class SparseMatrix:
    """A constant sparse matrix, to be multiplied with dense ones."""

    def __init__(self, matrix: Any, dtype: torch.dtype = torch.float32) -> None:
        """`matrix` is one of scipy in compressed rows."""
        self.forward, self.transposed = as_torch(matrix, dtype), as_torch(matrix.T.tocsr(), dtype)

    def __matmul__(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _Product.apply(x, self.forward, self.transposed)  # type: ignore[no-untyped-call]
        return product


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, matrix: torch.Tensor, transposed: torch.Tensor) -> torch.Tensor:
        ctx.transposed = transposed
        return matrix @ x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.transposed @ gradient.contiguous(), None, None


class SparseRows:
    """Sparse features of nodes, a row for each."""

    def __init__(self, matrix: Any, dtype: torch.dtype = torch.float32) -> None:
        """`matrix` is one of scipy in compressed rows."""
        from scipy.sparse import csr_matrix

        numbered = csr_matrix((np.arange(matrix.nnz) + 1, matrix.indices, matrix.indptr), shape=matrix.shape)
        transposed = numbered.T.tocsr()
        self._matrix, self._transposed = as_torch(matrix, dtype), as_torch(transposed, dtype)
        self._order = torch.from_numpy(transposed.data.astype(np.int64) - 1)
        lengths = np.diff(matrix.indptr)
        self._longest = int(lengths.max()) if len(lengths) else 0
        # Where the values are in a table with a row for each node, as wide as the longest of them.
        rows = np.repeat(np.arange(len(lengths)), lengths)
        places = rows * self._longest + np.arange(matrix.nnz) - np.repeat(matrix.indptr[:-1], lengths)
        self._places = torch.from_numpy(places.astype(np.int64))

    def __len__(self) -> int:
        return int(self._matrix.shape[0])

    def product(self, weight: torch.Tensor, nodes: torch.Tensor, dropout: float) -> torch.Tensor:
        """The product with `weight`; with `dropout`, some values count as zero and the others for more."""
        values = self._matrix.values()
        if dropout:
            mask = ones_by_row(torch.Size((len(self), max(self._longest, 1))), nodes, dropout, values.dtype)
            values = values * mask.view(-1).index_select(0, self._places)
        elif not weight.requires_grad:
            return self._matrix @ weight
        matrix = _with_values(self._matrix, values)
        transposed = _with_values(self._transposed, values.index_select(0, self._order))
        product: torch.Tensor = _Product.apply(weight, matrix, transposed)  # type: ignore[no-untyped-call]
        return product


def as_torch(matrix: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A matrix of scipy as one of torch, both in compressed rows."""
    return _csr(
        torch.from_numpy(matrix.indptr.astype(np.int64)),
        torch.from_numpy(matrix.indices.astype(np.int64)),
        torch.from_numpy(matrix.data).to(dtype),
        matrix.shape,
    )


def _with_values(matrix: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return _csr(matrix.crow_indices(), matrix.col_indices(), values, matrix.shape)


def _csr(offsets: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, shape: Any) -> torch.Tensor:
    with warnings.catch_warnings():  # torch says that its support is in beta state
        warnings.simplefilter("ignore", UserWarning)
        return torch.sparse_csr_tensor(offsets, columns, values, size=tuple(shape), check_invariants=False)
