"""Scripted faults: what goes wrong, with whom and at which step; and the injector that makes it so inside a worker.

Here: `Fault`, its text form, and `Injector`, which the training loop asks in every step if there is a script. Not
here: kills from outside at random moments, and what a run made of it (`chaos/`). This module is loaded by every worker,
so it imports nothing of the run.

    kill worker 2 at step 412               SIGKILL; `kill server 0 at step 20` for a server of parameters
    stop worker 1 at step 50 for 5s         SIGSTOP, and SIGCONT after the time; without it, for good
    slow worker 0 at step 10 by 5x          each step takes five times as long; `by 0.2s`: 0.2 s longer
    raise in worker 1 at step 7             an exception like one of the user's own
    cut worker 1 at step 30 for 5s          nothing that is sent to it arrives, and nobody is told
    disconnect worker 1 at step 30          its connections are broken off, once
    lose 10% of packets to worker 1 at step 30 for 5s
    fill the disk at step 20 for 5s         no worker can write a file to its end

A script is read from the environment variable SYNCLINE_FAULTS, with semicolons or newlines between faults. Each happens
once in a run, when its worker begins that step or, if it was not there then, its next one; RUN/faults tells which have
happened. A worker that replaces another does not repeat them.

Network faults work on TCP connections, by a filter that the kernel asks about each arriving packet; no privilege is
needed. Where workers have network links of their own, SYNCLINE_LINKS names the socket of somebody who can cut one, and
`cut` is left to them. What goes through shared memory is no network and is not touched. A full disk is what `os.fsync`
says it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import math
import os
import re
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from syncline.errors import ConfigError, nearest

__all__ = [
    "LINKS", "VARIABLE", "Fault", "Happened", "Injector", "Kind", "ScriptedFault", "as_script", "happened_in",
    "read_fault", "read_script", "read_seconds", "scripted", "short_path",
]  # fmt: skip

VARIABLE = "SYNCLINE_FAULTS"
"""The environment variable that holds the script."""
LINKS = "SYNCLINE_LINKS"
"""The environment variable that names the socket at which a worker's link can be had cut, if there is one."""

Kind = Literal["kill", "stop", "slow", "raise", "cut", "disconnect", "lose", "fill"]

_FORMS: dict[Kind, str] = {
    "kill": "kill worker K at step N, or: kill server K at step N",
    "stop": "stop worker K at step N [for 5s], or: stop server K at step N [for 5s]",
    "slow": "slow worker K at step N by 5x [for 10s], or: slow worker K at step N by 0.2s [for 10s]",
    "raise": "raise in worker K at step N",
    "cut": "cut worker K at step N [for 5s]",
    "disconnect": "disconnect worker K at step N",
    "lose": "lose 10% of packets to worker K at step N [for 5s]",
    "fill": "fill the disk at step N [for 5s]",
}
_NUMBER = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_TIME = rf"{_NUMBER} ?(?:ms|s|min)"
_AT, _FOR = r" at step (?P<step>\d+)", rf"(?: for (?P<for_s>{_TIME}))?"
_PATTERNS: dict[Kind, str] = {
    "kill": rf"kill (?P<who>worker|server) (?P<rank>\d+){_AT}",
    "stop": rf"stop (?P<who>worker|server) (?P<rank>\d+){_AT}{_FOR}",
    "slow": rf"slow worker (?P<rank>\d+){_AT} by (?:(?P<factor>{_NUMBER}) ?x|(?P<delay_s>{_TIME})){_FOR}",
    "raise": rf"raise in worker (?P<rank>\d+){_AT}",
    "cut": rf"cut worker (?P<rank>\d+){_AT}{_FOR}",
    "disconnect": rf"disconnect worker (?P<rank>\d+){_AT}",
    "lose": rf"lose (?P<percent>{_NUMBER}) ?% of packets to worker (?P<rank>\d+){_AT}{_FOR}",
    "fill": rf"fill the disk{_AT}{_FOR}",
}
_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0}
_LARGEST_STEP = 10**15


class ScriptedFault(RuntimeError):
    """What `raise in worker ...` raises: not one of Syncline's own errors, so that it counts as the user's."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, once, when worker or server `rank` begins `step`; 0 is the first step.

    >>> str(Fault("slow", step=10, rank=0, factor=5, for_s=2.5))
    'slow worker 0 at step 10 by 5x for 2.5s'
    """

    kind: Kind
    step: int
    rank: int | None = None
    """Its number in the run; servers are counted by themselves. None: the fault is everybody's."""
    is_server: bool = False
    factor: float | None = None
    """How many times as long a slow step takes."""
    delay_s: float | None = None
    """How much longer a slow step takes."""
    percent: float | None = None
    """Of the packets, how many are lost."""
    for_s: float | None = None
    """None: for as long as the process lives, or once if it is a thing of a moment."""

    def __post_init__(self) -> None:
        if self.kind not in _FORMS:
            raise ConfigError(f"The kind of a fault is {self.kind!r}, but must be one of {', '.join(_FORMS)}.")
        usual = f"Write it as: {_FORMS[self.kind]}."
        if not 0 <= self.step <= _LARGEST_STEP:
            raise ConfigError(f"A fault at step {self.step} never happens: steps are counted from 0. {usual}")
        if (self.rank is None) != (self.kind == "fill") or (self.rank or 0) < 0:
            raise ConfigError(f"{self.kind!r} does not go with rank {self.rank}. {usual}")
        if self.is_server and self.kind not in ("kill", "stop"):
            raise ConfigError(f"{self.kind!r} is for workers: a server of parameters takes no steps. {usual}")
        if self.for_s is not None and self.kind in ("kill", "raise", "disconnect"):
            raise ConfigError(f"{self.kind!r} happens in a moment, and cannot last {self.for_s:g} s. {usual}")
        if (self.factor is not None) + (self.delay_s is not None) != (self.kind == "slow"):
            raise ConfigError(f"'slow', and nothing else, has either a factor or a delay. {usual}")
        if (self.percent is not None) != (self.kind == "lose"):
            raise ConfigError(f"'lose', and nothing else, has a percentage. {usual}")
        if self.percent is not None and not 0 < self.percent <= 100:
            raise ConfigError(f"{self.percent:g}% of packets cannot be lost: it must be above 0 and at most 100.")
        if self.factor is not None and not 1 <= self.factor < math.inf:
            raise ConfigError(f"A worker cannot be slowed down {self.factor:g}x: the factor must be 1 or more.")
        for seconds in (self.delay_s, self.for_s):
            if seconds is not None and not 0 < seconds < math.inf:
                raise ConfigError(f"{seconds:g} s is no length of time that can be waited for; it must be more than 0.")

    def __str__(self) -> str:
        at = f"at step {self.step}"
        lasting = f" for {_plain(self.for_s)}s" if self.for_s is not None else ""
        match self.kind:
            case "raise":
                return f"raise in {self.who} {at}"
            case "slow":
                by = f"{_plain(self.factor)}x" if self.factor is not None else f"{_plain(self.delay_s)}s"
                return f"slow {self.who} {at} by {by}{lasting}"
            case "lose":
                return f"lose {_plain(self.percent)}% of packets to {self.who} {at}{lasting}"
            case "fill":
                return f"fill the disk {at}{lasting}"
            case kind:
                return f"{kind} {self.who} {at}{lasting}"

    @property
    def who(self) -> str:
        """Whom it happens to, in words."""
        return "everybody" if self.rank is None else f"{'server' if self.is_server else 'worker'} {self.rank}"


# The text form


def read_fault(text: str) -> Fault:
    """The fault that `str(fault)` wrote, or a person."""
    words = " ".join(text.split()).lower()
    kind = words.partition(" ")[0]
    if kind not in _PATTERNS:
        close = nearest(kind, _FORMS)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"{text!r} is no fault.{hint} There are: {'; '.join(_FORMS.values())}.")
    known: Kind = next(k for k in get_args(Kind) if k == kind)
    found = re.fullmatch(_PATTERNS[known], words, re.ASCII)
    if found is None:
        raise ConfigError(f"Cannot read {text!r}. Write it as: {_FORMS[known]}.")
    given = found.groupdict()
    if len(given["step"]) > len(str(_LARGEST_STEP)) or len(given.get("rank") or "") > 9:
        raise ConfigError(f"{text!r} has a number beyond all runs.")
    return Fault(
        known,
        step=int(given["step"]),
        rank=int(given["rank"]) if given.get("rank") else None,
        is_server=given.get("who") == "server",
        factor=float(given["factor"]) if given.get("factor") else None,
        delay_s=read_seconds(given["delay_s"]) if given.get("delay_s") else None,
        percent=float(given["percent"]) if given.get("percent") else None,
        for_s=read_seconds(given["for_s"]) if given.get("for_s") else None,
    )


def read_script(text: str) -> tuple[Fault, ...]:
    """Faults with semicolons or newlines between them."""
    return tuple(read_fault(part) for part in re.split(r"[;\n]", text) if part.strip())


def as_script(faults: Iterable[Fault]) -> str:
    """What `read_script` reads."""
    return "; ".join(map(str, faults))


def read_seconds(text: str) -> float:
    """`3s`, `250ms` or `2min`, in seconds."""
    found = re.fullmatch(rf"({_NUMBER})\s*(ms|s|min)", text.strip(), re.ASCII)
    if found is None:
        raise ConfigError(f"Cannot read {text!r} as a time. Write it as 3s, 250ms or 2min.")
    return float(found[1]) * _SECONDS[found[2]]


def _plain(value: float | None) -> str:
    """Without a point where none is needed, and otherwise with every digit, so that it reads as the same number."""
    assert value is not None, "asked where there is one"
    return str(int(value)) if value == int(value) and value < 1e15 else repr(float(value))


# What has happened


@dataclass(frozen=True)
class Happened:
    """A fault of the script that has come about."""

    fault: Fault
    time: float
    number: int
    """Of whom, in the run: the workers first, then the servers. For everybody's faults, of who was first there."""
    pid: int
    step: int


def happened_in(run_dir: Path) -> list[Happened]:
    """What has come about in a run so far, oldest first."""
    found = []
    for file in _markers(run_dir).glob("*.json"):
        try:
            data = json.loads(file.read_text())
            data["fault"] = read_fault(data["fault"])
            found.append(Happened(**data))
        except (OSError, ValueError, TypeError, KeyError):
            continue  # being written
    return sorted(found, key=lambda h: h.time)


def _markers(run_dir: Path) -> Path:
    return run_dir / "faults"


# Inside a worker


@functools.cache
def scripted() -> Injector | None:
    """What makes the faults of this process's script happen; None without one. Looked up once in a worker's life."""
    script = read_script(os.environ.get(VARIABLE, ""))
    return Injector(script) if script else None


class Injector:
    """Makes a script come true, as far as this process is concerned."""

    def __init__(self, script: Sequence[Fault]) -> None:
        self._script = script
        self._waiting: list[int] | None = None  # places in the script; None before it is known whose they are
        self._delays: list[tuple[Fault, float]] = []  # with the time until which each holds
        self._step_began = 0.0

    def at_step(self, number: int, step: int, run_dir: Path) -> None:
        """Do what is due."""
        if self._waiting is None:
            everybodys = [f.is_server or f.rank is None for f in self._script]
            self._waiting = [i for i, f in enumerate(self._script) if everybodys[i] or f.rank == number]
        self._dawdle()
        for place in [i for i in self._waiting if self._script[i].step <= step]:
            fault = self._script[place]
            victim, pid = number, os.getpid()
            if fault.is_server:
                found = _server(fault.rank or 0, run_dir)
                if found is None:
                    continue  # being replaced: at the next step, then
                victim, pid = found
            self._waiting.remove(place)
            record = Happened(fault, time.time(), victim, pid, step)
            is_first = _mark(_markers(run_dir) / f"{place:03}.json", record)
            if is_first or fault.kind == "fill":  # one disk is everybody's, and full for everybody as long
                first = record if is_first else _marked(_markers(run_dir) / f"{place:03}.json", record)
                self._do(fault, pid, began=first.time)

    def _do(self, fault: Fault, pid: int, *, began: float) -> None:
        until = began + (fault.for_s if fault.for_s is not None else math.inf)
        match fault.kind:
            case "kill":
                os.kill(pid, signal.SIGKILL)
            case "stop":
                _stop(pid, fault.for_s)
            case "slow":
                self._delays.append((fault, until))
                self._step_began = time.perf_counter()
            case "raise":
                raise ScriptedFault(f"The script says: {fault}.")
            case "cut" if LINKS in os.environ:
                assert fault.rank is not None, "checked when it was made"
                _have_link_cut(os.environ[LINKS], fault.rank, fault.for_s)
            case "cut":
                _filter_packets(_drop_all(), until)
            case "lose":
                assert fault.percent is not None, "checked when it was made"
                _filter_packets(_drop_some(fault.percent / 100), until)
            case "disconnect":
                _disconnect()
            case "fill":
                _fill_disk(until)

    def _dawdle(self) -> None:
        """Make up for the haste of the step that is over."""
        if not self._delays:
            return
        took = time.perf_counter() - self._step_began
        now = time.time()
        self._delays = [(fault, until) for fault, until in self._delays if now < until]
        for fault, _ in self._delays:
            time.sleep(fault.delay_s if fault.delay_s is not None else took * ((fault.factor or 1) - 1))
        self._step_began = time.perf_counter()


def _mark(file: Path, record: Happened) -> bool:
    """Whether this is the first time."""
    file.parent.mkdir(exist_ok=True)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w") as stream:
        stream.write(json.dumps({**vars(record), "fault": str(record.fault)}))
    return True


def _marked(file: Path, otherwise: Happened) -> Happened:
    """What was marked there; `otherwise` if that is being written at this moment."""
    try:
        return Happened(**{**json.loads(file.read_text()), "fault": otherwise.fault})
    except (OSError, ValueError, TypeError):
        return otherwise


def _server(index: int, run_dir: Path) -> tuple[int, int] | None:
    """Number and process of a server of parameters: a sibling of this worker, known by the log it writes to."""
    number = len(json.loads((run_dir / "plan.json").read_text())["workers"]) + index
    log = str((run_dir / "logs" / f"worker-{number}.log").resolve())
    for tasks in Path("/proc", str(os.getppid()), "task").glob("*/children"):
        for sibling in tasks.read_text().split():
            with contextlib.suppress(OSError):  # gone
                if os.readlink(f"/proc/{sibling}/fd/1") == log:
                    return number, int(sibling)
    return None


# How each fault is done


def _stop(pid: int, for_s: float | None) -> None:
    if for_s is not None:
        # Somebody else must wake it up; whoever that is should not outlive this process.
        die_with_parent = ctypes.CDLL(None).prctl
        subprocess.Popen(
            ["/bin/sh", "-c", f"sleep {for_s:.6f}; kill -CONT {pid}"],
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(1, signal.SIGKILL),
        )
    os.kill(pid, signal.SIGSTOP)


_LINK_S = 20.0


def _have_link_cut(links: str, worker: int, for_s: float | None) -> None:
    """By somebody who outlives this process, so that the link is whole again after the time."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_LINK_S)
        with short_path(Path(links)) as path:
            connection.connect(path)
        connection.sendall(json.dumps([worker, for_s]).encode())
        answer = connection.recv(4096).decode()
    if answer != "done":
        raise RuntimeError(f"The link of worker {worker} could not be cut: {answer or 'nobody answered'}")


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Another name of the same file. The address of a socket has 107 bytes at most, and folders have long names."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


_Program = bytes
"""Of the kernel's packet filter (classic BPF): what it returns is how much of a packet to keep."""
_ATTACH_FILTER, _DETACH_FILTER = 26, 27
_LOAD, _IF_AT_LEAST, _RETURN = 0x20, 0x35, 0x06
_RANDOM = 0xFFFFF000 + 56
"""Where a program finds a random number of 32 bits."""
_LOOK_EVERY_S = 0.02


def _drop_all() -> _Program:
    return _instruction(_RETURN, 0)


def _drop_some(fraction: float) -> _Program:
    limit = min(round(fraction * 2**32), 2**32 - 1)
    return b"".join(
        [
            _instruction(_LOAD, _RANDOM),
            _instruction(_IF_AT_LEAST, limit, then=0, otherwise=1),
            _instruction(_RETURN, 0xFFFFFFFF),
            _instruction(_RETURN, 0),
        ]
    )


def _instruction(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("=HBBI", code, then, otherwise, value)


def _filter_packets(program: _Program, until: float) -> None:
    """Of what arrives on this process's TCP connections, keep what the program keeps; also on new ones, until then."""
    _attach(program)

    def keep_watch() -> None:
        while time.time() < until:
            time.sleep(_LOOK_EVERY_S)
            _attach(program)
        for connection in _connections():
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)

    threading.Thread(target=keep_watch, name="syncline-faults", daemon=True).start()


def _attach(program: _Program) -> None:
    memory = ctypes.create_string_buffer(program)
    described = struct.pack("HL", len(program) // 8, ctypes.addressof(memory))
    for connection in _connections():
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, described)


def _disconnect() -> None:
    for connection in _connections():
        with contextlib.suppress(OSError):  # it is gone already
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # who listens may go on listening
                connection.shutdown(socket.SHUT_RDWR)


def _connections() -> Iterator[socket.socket]:
    """Every TCP socket of this process, whoever opened it; each is only lent."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # no socket, or closed in the meantime
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    yield found


def _fill_disk(until: float) -> None:
    """A file that must survive cannot be written: file systems find out at the latest when it is to be on disk."""
    really: Callable[[Any], None] = os.fsync

    def fsync(file: Any) -> None:
        if time.time() < until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        really(file)

    os.fsync = fsync  # type: ignore[assignment]  # the names of parameters differ, and nobody uses them
