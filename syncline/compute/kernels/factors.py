"""Least squares for the rows of a factor matrix, by compiled code where there is a compiler.

Here: `solve_rows`. Not here: which rows (`blocks/apps/als.py`), and compiling (`build.py`).
"""

from __future__ import annotations

import ctypes

import numpy as np

from syncline.compute.kernels.build import library


def solve_rows(
    base: np.ndarray, other: np.ndarray, offsets: np.ndarray, entries: np.ndarray, weights: np.ndarray,
    targets: np.ndarray, ridges: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Solve (base + ridge I + sum w v v') x = sum t v for each row, where v are the rows of `other` in its entries.

    `offsets` has where the entries of each row begin, and one number more. The matrices must be positive definite.
    """
    count, factors = len(offsets) - 1, other.shape[1]
    found = np.zeros((count, factors))
    kernels = library("factors")
    if kernels is None:
        for row in range(count):
            part = slice(offsets[row], offsets[row + 1])
            near = other[entries[part]]
            matrix = base + ridges[row] * np.eye(factors) + (near * weights[part, None]).T @ near
            found[row] = np.linalg.solve(matrix, near.T @ targets[part])
        return found
    arrays = [np.ascontiguousarray(array, np.float64) for array in (base, other, weights, targets, ridges)]
    base, other, weights, targets, ridges = arrays
    offsets, entries = np.ascontiguousarray(offsets, np.int64), np.ascontiguousarray(entries, np.int64)
    code = kernels.solve_rows(
        _address(base), _address(other), ctypes.c_long(factors), _address(offsets), _address(entries),
        _address(weights), _address(targets), _address(ridges), ctypes.c_long(count), _address(found),
    )  # fmt: skip
    if code == 1:
        raise MemoryError("Not enough memory for a matrix of factors by factors.")
    if code == 2:
        raise np.linalg.LinAlgError("A matrix is not positive definite.")
    return found


def _address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
