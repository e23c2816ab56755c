"""`RequestRefused`: a request that gets an error instead of an answer. Not here: how it is written (`app.py`)."""

from __future__ import annotations

from typing import Any

from syncline.errors import SynclineError

__all__ = ["RequestRefused"]


class RequestRefused(SynclineError):
    """The request is wrong, or cannot be served now. `status` is that of HTTP."""

    def __init__(self, message: str = "", *, status: int = 400, code: str | None = None, **facts: Any) -> None:
        super().__init__(message, code=code, **facts)
        self.status = status
