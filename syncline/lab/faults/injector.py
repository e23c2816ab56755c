"""Runs a script of faults inside a worker, and records what it did.

Here: `install`, `Injector` and the records in RUN/faults. Not here: the script's text (`script.py`), how each fault is
done (`mechanics.py`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from syncline.lab.faults.mechanics import (
    ScriptedFault,
    cut_link,
    disconnect,
    drop_all,
    drop_some,
    fill_disk,
    filter_packets,
    stop,
)
from syncline.lab.faults.script import Fault, read_fault, read_script

VARIABLE = "SYNCLINE_FAULTS"
"""The environment variable with the script."""
STEP_HOOK = "SYNCLINE_STEP_HOOK"
"""The environment variable through which workers find the injector (`workers/step_hook.py`)."""
LINKS = "SYNCLINE_LINKS"
"""Where workers have network links of their own, this variable names the socket of the process that cuts them."""


@dataclass(frozen=True)
class FaultRecord:
    """A scripted fault that has happened."""

    fault: Fault
    time: float
    worker_id: int
    """Workers are numbered first, then the parameter servers. For a full disk: the first worker at that step."""
    pid: int
    step: int


def faults_injected(run_dir: Path) -> list[FaultRecord]:
    """The scripted faults that have happened in a run so far, oldest first."""
    found = []
    for file in _records(run_dir).glob("*.json"):
        try:
            data = json.loads(file.read_text())
            data["fault"] = read_fault(data["fault"])
            found.append(FaultRecord(**data))
        except (OSError, ValueError, TypeError, KeyError):
            continue  # being written
    return sorted(found, key=lambda record: record.time)


def _records(run_dir: Path) -> Path:
    return run_dir / "faults"


def install(script: str) -> dict[str, str]:
    """The environment variables that inject this script into workers.

    >>> os.environ.update(install("kill worker 1 at step 40"))  # doctest: +SKIP
    """
    read_script(script)  # a mistake is reported here, not by every worker
    return {VARIABLE: script, STEP_HOOK: f"{__name__}:{injector_from_environment.__name__}"}


def injector_from_environment() -> Injector | None:
    """The step hook of `workers/step_hook.py`; None without a script."""
    script = read_script(os.environ.get(VARIABLE, ""))
    return Injector(script) if script else None


class Injector:
    """Injects the faults of a script that concern this process."""

    def __init__(self, script: Sequence[Fault]) -> None:
        self._script = script
        self._waiting: list[int] | None = None  # indices into the script; None until the worker_id is known
        self._delays: list[tuple[Fault, float]] = []  # each with its end time
        self._step_began = 0.0

    def at_step(self, worker_id: int, step: int, run_dir: Path) -> None:
        if self._waiting is None:
            self._waiting = [
                i for i, f in enumerate(self._script) if f.is_server or f.target is None or f.target == worker_id
            ]
        self._slow_down()
        for index in [i for i in self._waiting if self._script[i].step <= step]:
            fault = self._script[index]
            victim, pid = worker_id, os.getpid()
            if fault.is_server:
                found = _server(fault.target or 0, run_dir)
                if found is None:
                    continue  # it is being replaced: try again at the next step
                victim, pid = found
            self._waiting.remove(index)
            record = FaultRecord(fault, time.time(), victim, pid, step)
            is_first = _record(_records(run_dir) / f"{index:03}.json", record)
            if (
                is_first or fault.kind == "fill"
            ):  # all workers share the disk, and it is full for all until the same time
                first = record if is_first else _recorded(_records(run_dir) / f"{index:03}.json", record)
                self._inject(fault, pid, began=first.time)

    def _inject(self, fault: Fault, pid: int, *, began: float) -> None:
        until = began + (fault.for_s if fault.for_s is not None else math.inf)
        match fault.kind:
            case "kill":
                os.kill(pid, signal.SIGKILL)
            case "stop":
                stop(pid, fault.for_s)
            case "slow":
                self._delays.append((fault, until))
                self._step_began = time.perf_counter()
            case "raise":
                raise ScriptedFault(f"Scripted fault: {fault}.")
            case "cut" if LINKS in os.environ:
                assert fault.target is not None, "Fault checks it"
                cut_link(os.environ[LINKS], fault.target, fault.for_s)
            case "cut":
                filter_packets(drop_all(), until)
            case "lose":
                assert fault.percent is not None, "Fault checks it"
                filter_packets(drop_some(fault.percent / 100), until)
            case "disconnect":
                disconnect()
            case "fill":
                fill_disk(until)

    def _slow_down(self) -> None:
        """Prolong the step that just ended."""
        if not self._delays:
            return
        took = time.perf_counter() - self._step_began
        now = time.time()
        self._delays = [(fault, until) for fault, until in self._delays if now < until]
        for fault, _ in self._delays:
            time.sleep(fault.delay_s if fault.delay_s is not None else took * ((fault.factor or 1) - 1))
        self._step_began = time.perf_counter()


def _record(file: Path, record: FaultRecord) -> bool:
    """Record that the fault happens now; False if another process already did."""
    file.parent.mkdir(exist_ok=True)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w") as stream:
        stream.write(json.dumps({**vars(record), "fault": str(record.fault)}))
    return True


def _recorded(file: Path, otherwise: FaultRecord) -> FaultRecord:
    """What is recorded there; `otherwise` if it is being written at this moment."""
    try:
        return FaultRecord(**{**json.loads(file.read_text()), "fault": otherwise.fault})
    except (OSError, ValueError, TypeError):
        return otherwise


def _server(index: int, run_dir: Path) -> tuple[int, int] | None:
    """The worker_id and pid of a parameter server: a sibling of this worker, identified by its log file."""
    worker_id = len(json.loads((run_dir / "plan.json").read_text())["workers"]) + index
    log = str((run_dir / "logs" / f"worker-{worker_id}.log").resolve())
    for tasks in Path("/proc", str(os.getppid()), "task").glob("*/children"):
        for sibling in tasks.read_text().split():
            with contextlib.suppress(OSError):  # it has exited
                if os.readlink(f"/proc/{sibling}/fd/1") == log:
                    return worker_id, int(sibling)
    return None
