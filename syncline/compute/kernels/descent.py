"""Coordinate descent for least squares with an L1 and an L2 penalty, by compiled code where there is a compiler.

Here: `descend`. Not here: which columns (`blocks/apps/elastic_net.py`), and compiling (`build.py`).
"""

from __future__ import annotations

import ctypes

import numpy as np

from syncline.compute.kernels.build import library

_LEFT = 0.01
"""Passes end when the largest change is down to this share of that of the first pass."""


def descend(
    x: np.ndarray, columns: np.ndarray, rest: np.ndarray, weights: np.ndarray, squares: np.ndarray, l1: float,
    l2: float, *, passes: int,
) -> np.ndarray:  # fmt: skip
    """Minimize |rest|^2 / 2 + l1 |w|_1 + l2 |w|^2 / 2 over the weights of `columns`, up to `passes` times one by one.

    `rest` = y - x w and `weights`, one for each of the columns, are changed in place. How much each of them changed in
    the last pass, by the length of its column.
    """
    change = np.zeros(len(columns))
    kernels = library("descent")
    if kernels is None:
        _descend(x, columns, rest, weights, squares, l1, l2, change, passes)
        return change
    columns = np.ascontiguousarray(columns, np.int64)
    kernels.descend(
        _address(x), ctypes.c_long(len(x)), _address(columns), ctypes.c_long(len(columns)), ctypes.c_int(passes),
        ctypes.c_double(_LEFT), _address(rest), _address(weights), _address(squares), ctypes.c_double(l1),
        ctypes.c_double(l2), _address(change),
    )  # fmt: skip
    return change


def _address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _descend(
    x: np.ndarray, columns: np.ndarray, rest: np.ndarray, weights: np.ndarray, squares: np.ndarray, l1: float,
    l2: float, change: np.ndarray, passes: int,
) -> None:  # fmt: skip
    """The same without a compiler."""
    first = 0.0
    for number in range(passes):
        change[:] = 0.0
        for place, column in enumerate(columns):
            square = squares[column]
            if square <= 0:
                continue
            ahead = x[:, column] @ rest + square * weights[place]
            fresh = np.copysign(max(abs(ahead) - l1, 0.0), ahead) / (square + l2)
            step = fresh - weights[place]
            if step != 0:
                weights[place] = fresh
                rest -= step * x[:, column]
                change[place] = abs(step) * np.sqrt(square)
        largest = change.max(initial=0.0)
        first = largest if number == 0 else first
        if largest <= _LEFT * first:
            break
