"""For the fuzz tests: values that break things, damaged files, a time limit, and an engine without workers."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from warm_process import warm_process

from syncline.comms.control import LaunchSpec, RunFiles
from syncline.engines.engine import Exit
from syncline.engines.network import LOOPBACK
from syncline.errors import SynclineError
from syncline.planning.machine import Machine

LIMIT_S = 20.0
"""No command may take longer, whatever it is given."""

NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 2, 10**6, 10**12, 2**31, 2**53, 2**63, 2**70, -(2**70), 0.5, -0.5, 1e9, 1e308, -1e308,
    5e-324, "", "a", "NaN", "../../x", "/etc/passwd", "\0", "\udcff", "é" * 300, "1" * 5000, [], {}, [None], [[]], [0],
    {"a": 1}, {"": None}, [[[[[[]]]]]], [1, 2, 3], [-1, 10**12],
]  # fmt: skip


def examples(in_the_gate: int) -> int:
    """How many examples a test tries: few in the gate, 2,000 with the profile of `make nightly`."""
    return 2_000 if settings().max_examples >= 1_000 else in_the_gate


def seconds_for_all() -> float:
    """How long all examples of a test together may take, also on a busy machine."""
    return 1_800 if examples(0) else 180


class Hung(BaseException):
    """Something takes longer than it may. Not an Exception, which the code under test could catch."""


@contextmanager
def limited(what: str, limit_s: float = LIMIT_S) -> Iterator[None]:
    """Interrupt what hangs, so that the test fails with the stack of the place; asserted afterwards, nothing would.

    Not by SIGALRM, which pytest-timeout uses for the test as a whole.
    """

    def interrupt(*_: object) -> None:
        raise Hung(f"still not done after {limit_s:g} s: {what}")

    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(limit_s, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGUSR1, before)


class Started(SynclineError):
    """The run was about to start its workers."""


class StandInEngine:
    """An `Engine` up to the moment when the coordinator uses it; then the run ends with `Started`."""

    network = LOOPBACK
    files: RunFiles | None = None

    def reserve(self, workers: int, report: Callable[[str], None]) -> None: ...

    @property
    def machine(self) -> Machine:
        return Machine(
            host="here", cores=2, memory_available_bytes=10**9, no_shared_memory_because=None, processor="x",
            python="3.11",
        )  # fmt: skip

    def provide(self, files: RunFiles) -> None:
        StandInEngine.files = files
        raise Started("workers would start now", files=files)

    def launch(self, spec: LaunchSpec, log: Path) -> None:
        raise AssertionError("a run does not get that far")

    def poll(self) -> list[Exit]:
        return []

    def kill(self, worker_id: int | None = None) -> None: ...

    def close(self) -> None: ...

    def fileno(self) -> int:
        return -1


def trained_run(folder: Path) -> Path:
    """A small finished run with two checkpoints, made once."""
    arguments = (
        "train", "linear", "--data", "digits", "--workers", "2", "--batch", "600", "--epochs", "2",
        "--checkpoint-every-steps", "3", "--name", "run", "--quiet",
    )  # fmt: skip
    done = subprocess.run(
        warm_process().words("-m", "syncline.cli.main", *arguments),
        cwd=folder, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "run"


@st.composite
def damaged_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Some bytes are others, some are missing, some are twice there."""
    damage = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(damage)))
        damage[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(damage)


@st.composite
def damaged_json(draw: st.DrawFn, data: bytes) -> bytes:
    """One value of a JSON document is another, or one key is missing, misspelled or new."""
    document = json.loads(data)
    places = list(_places(document))
    holder, key = draw(st.sampled_from(places))
    kind = draw(st.sampled_from(["value", "value", "value", "remove", "rename", "add", "whole"]))
    if kind == "whole":
        document = draw(st.sampled_from(NASTY))
    elif kind == "remove":
        del holder[key]
    elif kind == "rename" and isinstance(holder, dict):
        holder[f"{key}x"] = holder.pop(key)
    elif kind == "add" and isinstance(holder, dict):
        holder["new"] = draw(st.sampled_from(NASTY))
    else:
        holder[key] = draw(st.sampled_from(NASTY))
    return json.dumps(document).encode()


@st.composite
def damaged_lines(draw: st.DrawFn, data: bytes) -> bytes:
    """A line of JSON is damaged, missing, there twice, or elsewhere."""
    lines = data.splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    kind = draw(st.sampled_from(["json", "json", "json", "bytes", "drop", "double", "move", "nested"]))
    if kind == "json":
        lines[at] = draw(damaged_json(lines[at]))
    elif kind == "bytes":
        lines[at] = draw(damaged_bytes(lines[at]))
    elif kind == "double":
        lines.insert(at, lines[at])
    elif kind == "nested":
        lines[at] = b"[" * 50_000
    else:
        line = lines.pop(at)
        if kind == "move":
            lines.insert(draw(st.integers(0, len(lines))), line)
    return b"\n".join(lines) + b"\n"


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a JSON document, as its holder and its key or index there."""
    keys = document.keys() if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    for key in keys:
        yield document, key
        yield from _places(document[key])
