"""Runs a command as a process, and finds its output and the time of its first training step.

Here: `output_of`, `time_to_first_step`, and ending every process they started. The commands start processes in sessions
of their own, so neither the process group nor the parent identifies them. A mark in the environment does: every process
inherits it. Not here: which commands (`startup.py`, `peers.py`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from syncline.errors import SynclineError

MARK = "SYNCLINE_BENCHMARK"
_GRACE_S = 5.0
_LAST_LINES = 40


def time_to_first_step(
    command: Sequence[str], *, environment: Mapping[str, str], folder: Path, timeout_s: float
) -> float:
    """Seconds from starting `command` to the moment that rank 0 had completed its first optimizer step.

    The command reports that moment: a line `{"event": "progress", "worker_id": 0, "step": 1, "time": ...}` on its
    standard output, as `syncline train --json` writes it. The call returns when the command
    has exited, so that the next one runs alone.
    """
    started = time.time()
    output = output_of(command, environment={**os.environ, **environment}, folder=folder, timeout_s=timeout_s)
    for line in output.splitlines():
        done = _first_step(line)
        if done is not None:
            return done - started
    raise SynclineError(f"{_words(command)} reported no first step. Its last output:\n{last_lines(output)}")


def output_of(command: Sequence[str], *, environment: Mapping[str, str], folder: Path, timeout_s: float) -> str:
    """The standard output of `command`. Ends all processes it started; `SynclineError` if it fails.

    It writes to files, not to pipes: a process that it leaves behind may keep a pipe open forever.
    """
    mark = uuid.uuid4().hex
    with _scratch() as output, _scratch() as errors:
        with ended_with_all_it_started(mark) as start:
            process = start(
                lambda: subprocess.Popen(
                    command,
                    cwd=folder,
                    env={**environment, MARK: mark},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    text=True,
                    start_new_session=True,  # Ctrl-C is for the bench
                )
            )
            try:
                process.wait(timeout=timeout_s)
                is_late = False
            except subprocess.TimeoutExpired:
                is_late = True
        out, err = _all_of(output), _all_of(errors)
    if is_late:
        raise SynclineError(f"{_words(command)} did not exit within {timeout_s:g} s.{_quoted(err)}")
    if process.returncode != 0:
        raise SynclineError(f"{_words(command)} exited with code {process.returncode}.{_quoted(err or out)}")
    return out


def marked(mark: str) -> list[int]:
    """The live processes with this mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                environment = Path("/proc", entry, "environ").read_bytes()
            except OSError:
                continue  # exited by now, or another user's
            if wanted in environment.split(b"\0"):
                found.append(int(entry))
    return found


def _first_step(line: str) -> float | None:
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    is_it = event.get("event") == "progress" and event.get("worker_id") == 0 and event.get("step") == 1
    return float(event["time"]) if is_it else None


Start = Callable[[Callable[[], "subprocess.Popen[str]"]], "subprocess.Popen[str]"]


@contextmanager
def ended_with_all_it_started(mark: str) -> Iterator[Start]:
    """A function that starts a process with this mark, which is ended at the end of the context.

    A Ctrl-C in the middle of the start counts when the process is known, so that it is ended, too.
    """
    started: list[subprocess.Popen[str]] = []

    def start(popen: Callable[[], subprocess.Popen[str]]) -> subprocess.Popen[str]:
        interrupts: list[int] = []
        with signal_handler(signal.SIGINT, lambda number, _: interrupts.append(number)):
            started.append(popen())
        if interrupts:
            signal.raise_signal(signal.SIGINT)
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            end_all(process, mark)


def end_all(process: subprocess.Popen[str], mark: str) -> None:
    """End all remaining processes; SIGTERM first, so that torchrun and Syncline end their own."""
    with signal_handler(signal.SIGINT, signal.SIG_IGN):  # a second Ctrl-C must not interrupt the cleanup
        if process.poll() is None:
            process.terminate()
        deadline = time.monotonic() + _GRACE_S
        while process.poll() is None or marked(mark):
            if time.monotonic() > deadline:
                for pid in marked(mark):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@contextmanager
def signal_handler(number: signal.Signals, handler: signal._HANDLER) -> Iterator[None]:
    """Handle a signal differently for a while."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return
    previous = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, previous)


def _scratch() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def _all_of(written: IO[str]) -> str:
    written.seek(0)
    return written.read()


def _quoted(text: str) -> str:
    return f" Its last output:\n{last_lines(text)}"


def _words(command: Sequence[str]) -> str:
    return f"'{' '.join(Path(part).name if os.path.isabs(part) else part for part in command[:6])} ...'"


def last_lines(text: str) -> str:
    """The end of a command's output, for an error message."""
    return "\n".join(text.strip().splitlines()[-_LAST_LINES:]) or "(none)"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
