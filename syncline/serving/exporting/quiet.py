"""Keeping the remarks of exporters on themselves, such as packages that they would know, away from users."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without warnings, log messages below errors, and what torch prints of a graph that it cannot trace."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        nowhere = io.StringIO()
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
