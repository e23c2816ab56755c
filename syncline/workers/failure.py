"""Telling the coordinator what went wrong, so that a user reads what their own code did, and once.

Here: from an exception to a `Failed` message, with the user's frames only and short enough to arrive. Not here: which
of several failures came first, and the words around it (`coordinator/`).
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from syncline.comms.control import Failed
from syncline.errors import PeerLost, SynclineError

__all__ = ["describe_failure"]

_LONGEST_MESSAGE = 4_000
_LONGEST_TRACEBACK = 40_000
"""In characters. The control channel takes 4 MiB, and nobody reads as much."""

_FRAME = re.compile(r'^  File "([^"\n]+)", line .*\n(?:    .*\n)*', re.MULTILINE)
_PLUMBING = (
    str(Path(__file__).parent.parent),  # Syncline itself
    "<frozen ",  # Python's own way to a module
    "/torch/nn/modules/module.py",  # two frames for each layer that calls another
    "/torch/utils/data/_utils/",
)
_FROM_LOADER = re.compile(r"Caught \w+ in DataLoader worker process \d+\.\nOriginal (Traceback .*)", re.DOTALL)


def describe_failure(
    error: BaseException, *, rank: int, step: int, samples: list[int], life: int = 0, is_first_step: bool = True
) -> Failed:
    """The message for `error`. Frames of ours, and of torch's, are left out where they only lead to the user's code."""
    kind, message = type(error).__name__, "\n".join([_words_of(error), *getattr(error, "__notes__", ())])
    if isinstance(error, SynclineError):
        text = ""  # the message says it all
    elif (found := _FROM_LOADER.search(message)) is not None:
        # The exception is torch's copy. What happened in the loader's process is in its message, traceback and all.
        text = found[1]
        kind, message = _exception_in(text)
    else:
        text = "".join(traceback.TracebackException.from_exception(error, compact=True).format())
    return Failed(
        rank=rank,
        kind=kind,
        message=_shortened(message.strip() or kind, _LONGEST_MESSAGE),
        traceback=_shortened(_users_part(text), _LONGEST_TRACEBACK),
        step=step,
        samples=samples,
        consequence=isinstance(error, PeerLost),
        life=life,
        is_first_step=is_first_step,
    )


def _words_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as another:  # the class is the user's, and so is the way it prints itself
        return f"its text cannot be made: {type(another).__name__}"


def _exception_in(text: str) -> tuple[str, str]:
    """The kind and the message at the end of a traceback that is only known as text."""
    last = max((frame.end() for frame in _FRAME.finditer(text)), default=0)
    kind, _, message = text[last:].strip().partition(": ")
    return kind.rpartition(".")[2], message


def _users_part(text: str) -> str:
    """A traceback without the plumbing above the user's last frame; without such a frame, all of it."""
    users = [frame.start() for frame in _FRAME.finditer(text) if not _is_plumbing(frame)]
    last = users[-1] if users else 0
    return _FRAME.sub(lambda frame: "" if _is_plumbing(frame) and frame.start() < last else frame[0], text)


def _is_plumbing(frame: re.Match[str]) -> bool:
    return any(part in frame[1] for part in _PLUMBING)


def _shortened(text: str, most: int) -> str:
    """`text` as it can be sent: without its middle if it is too long, for what matters is at the ends."""
    text = text.encode(errors="backslashreplace").decode()  # a file name may hold what is no text
    if len(text) <= most:
        return text
    kept = most // 2
    return f"{text[:kept]} [... {len(text) - 2 * kept:,} characters are left out here ...] {text[-kept:]}"
