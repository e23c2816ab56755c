"""`enumerate` over a script's batches, whose numbers are right after a failure and in a resumed run.

Here: `count_batches`, which gives the script an `enumerate` that numbers training batches by their place in the epoch.
A replacement begins in the middle of an epoch, so the numbers of Python's own would differ from those of the other
workers, and with them whatever the script does at every n-th batch. Only the script and modules beside it get that
name: other code has no prepared batches to number.
"""

from __future__ import annotations

import builtins
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any


class NumberedBatches(ABC):
    """Batches that know their place. A base class and no protocol: scripts call `enumerate` with many other things."""

    @abstractmethod
    def is_numbered(self) -> bool:
        """Whether an iteration that begins now is over training batches, from the first of them on."""

    @abstractmethod
    def last_number(self) -> int:
        """The number of the batch that was taken last, from 0."""


def count_batches() -> None:
    """Make `enumerate` number batches in the script and in the modules beside it that it has imported."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None:
        return
    known = dict[str, str]()
    folder = _folder_of(script, known)
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        names = getattr(module, "__dict__", {})
        if path is not None and "enumerate" not in names and _folder_of(path, known) == folder:
            names["enumerate"] = enumerate_batches


def _folder_of(path: str, known: dict[str, str]) -> str:
    """The folder that a file really lies in.

    torch alone brings two thousand modules, in a few hundred folders: resolving each path by itself took a tenth of a
    second in every worker.
    """
    if os.path.islink(path):
        path = os.path.realpath(path)
    folder = os.path.dirname(path)
    if folder not in known:
        known[folder] = os.path.realpath(folder)
    return known[folder]


def enumerate_batches(iterable: Iterable[Any], start: int = 0) -> Iterator[tuple[int, Any]]:
    """Like `enumerate`; training batches have the numbers that they have in one process."""
    # A progress bar such as tqdm has what it shows as `iterable`.
    for batches in (iterable, getattr(iterable, "iterable", None)):
        if isinstance(batches, NumberedBatches) and batches.is_numbered():
            return _numbered(batches, iterable, start)
    return builtins.enumerate(iterable, start)


def _numbered(batches: NumberedBatches, iterable: Iterable[Any], start: int) -> Iterator[tuple[int, Any]]:
    for batch in iterable:
        yield start + batches.last_number(), batch
