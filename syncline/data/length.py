"""How many samples a user's data has, and what to say if `len` does not know.

A module of its own, because the driver calls it, and the driver imports neither torch nor NumPy.
"""

from __future__ import annotations

from typing import Any

from syncline.errors import DataError


def length_of(data: Any) -> int:
    """`len(data)`; `DataError` if its `__len__` returns something that is no length."""
    try:
        return len(data)
    except (TypeError, ValueError, OverflowError) as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # raised in the user's own code
        kind = type(data).__name__
        raise DataError(
            f"The length of the data is not known: __len__ of {kind} does not return a number of samples ({error}). "
            "Return an integer, 0 or more.",
            code="invalid-length",
            type=kind,
        ) from error
