"""Telling the coordinator what went wrong, so that a user reads their own traceback first, and once.

Here: from an exception to a `Failed` message. Not here: which of several failures came first (`coordinator/`).
"""

from __future__ import annotations

import traceback
from pathlib import Path
from types import TracebackType

from syncline.comms.control import Failed
from syncline.errors import PeerLost, SynclineError

__all__ = ["describe_failure"]

_PACKAGE = str(Path(__file__).parent.parent)


def describe_failure(
    error: BaseException, *, rank: int, step: int, samples: list[int], life: int = 0, is_first_step: bool = True
) -> Failed:
    """The message for `error`. Our own frames are left out where the user's code comes below them."""
    if isinstance(error, SynclineError):
        text = ""  # the message says it all
    else:
        text = "".join(traceback.TracebackException(type(error), error, _user_part(error), compact=True).format())
    return Failed(
        rank=rank,
        kind=type(error).__name__,
        message=str(error) or type(error).__name__,
        traceback=text,
        step=step,
        samples=samples,
        consequence=isinstance(error, PeerLost),
        life=life,
        is_first_step=is_first_step,
    )


def _user_part(error: BaseException) -> TracebackType | None:
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith((_PACKAGE, "<frozen runpy>")):
        frame = frame.tb_next
    return frame if frame is not None else error.__traceback__
