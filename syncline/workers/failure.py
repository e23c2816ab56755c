"""Reporting an exception to the coordinator, so that the user sees their own code's error, once.

Here: converting an exception to a `Failed` message with the user's frames only, short enough to send. Not here: which
of several failures came first, and the text around it (`coordinator/root_cause.py`).
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

from syncline.boundary import advice_on, shared_memory_left
from syncline.comms.control import Failed
from syncline.errors import PeerFailed, SynclineError

_LONGEST_MESSAGE = 4_000
_LONGEST_TRACEBACK = 40_000
"""In characters. The control channel takes 4 MiB, more than anyone reads."""

_FRAME = re.compile(r'^  File "([^"\n]+)", line .*\n(?:    .*\n)*', re.MULTILINE)
_PLUMBING = (
    str(Path(__file__).parent.parent),  # Syncline itself
    "<frozen ",  # Python's import machinery
    "/torch/nn/modules/module.py",  # two frames for each nested layer
    "/torch/utils/data/_utils/",
)
_SHARED_MEMORY = re.compile(r"/torch_\d+_|shared memory|\bshm\b")
_FULL = re.compile(r"No space left|Cannot allocate|Bus error")
_FROM_LOADER = re.compile(r"Caught \w+ in DataLoader worker process \d+\.\nOriginal (Traceback .*)", re.DOTALL)


def describe_failure(
    error: BaseException, *, worker_id: int, step: int, samples: list[int], life: int = 0, is_first_step: bool = True
) -> Failed:
    """The message for `error`. Frames of Syncline and torch above the user's last frame are left out."""
    kind, message = type(error).__name__, "\n".join([_message_of(error), *getattr(error, "__notes__", ())])
    if isinstance(error, SynclineError):
        text = ""  # the message is complete without a traceback
    elif (found := _FROM_LOADER.search(message)) is not None:
        # torch re-raises a copy; its message holds the traceback of the loader process.
        text = found[1]
        kind, message = _exception_in(text)
    else:
        text = "".join(traceback.TracebackException.from_exception(error, compact=True).format())
    message = _shortened(message.strip() or kind, _LONGEST_MESSAGE)
    advice = _advice(error, message)
    return Failed(
        worker_id=worker_id,
        kind=kind,
        message=f"{message}\n{advice}" if advice else message,
        traceback=_shortened(_users_part(text), _LONGEST_TRACEBACK),
        step=step,
        samples=samples,
        consequence=isinstance(error, PeerFailed),
        life=life,
        is_first_step=is_first_step,
        code=error.code if isinstance(error, SynclineError) else None,
        facts=_plain(error.facts) if isinstance(error, SynclineError) else {},
    )


def _advice(error: BaseException, message: str) -> str:
    """What to do about a full shared memory, disk or limit; empty for anything else, and if the message says it."""
    if isinstance(error, SynclineError):
        return ""
    if _SHARED_MEMORY.search(message) and _FULL.search(message):
        return (
            f"This is about shared memory, not a disk: /dev/shm has {shared_memory_left()}. Data loader processes pass "
            "batches through it. Enlarge it (for Docker: --shm-size 1g), or use --loaders 0 or a smaller --batch."
        )
    return advice_on(error)


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    """What of the facts can be sent; tensors and the like stay behind."""
    simple = (str, int, float, type(None))
    return {
        name: value
        for name, value in facts.items()
        if isinstance(value, simple) or (isinstance(value, list) and all(isinstance(v, simple) for v in value))
    }


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as another:  # the user's class may have a broken __str__
        return f"its message cannot be formatted: {type(another).__name__}"


def _exception_in(text: str) -> tuple[str, str]:
    """The exception's type and message, from a traceback that is available as text only."""
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
    """`text` without its middle if it is too long: what matters is at the ends."""
    text = text.encode(errors="backslashreplace").decode()  # a file name may hold bytes that are not valid text
    if len(text) <= most:
        return text
    kept = most // 2
    return f"{text[:kept]} [... {len(text) - 2 * kept:,} characters omitted ...] {text[-kept:]}"
