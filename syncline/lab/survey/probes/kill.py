"""The kill test: `kill -9` of one worker in the middle of training, whatever the framework.

A first run tells how long start-up and a step take; a second, longer one is hit five seconds into its training. The
victim is the youngest of the processes that compute, so launchers and drivers, which wait, are not hit. Here: both
runs. Not here: what an adapter prints (`probe.py`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from syncline.errors import SynclineError
from syncline.lab.bench.processes import MARK, ended_with_all_it_started, marked
from syncline.lab.survey.frameworks import variables_for
from syncline.lab.survey.probes.probe import Bench, Round, Work, command_of, last_event, run_adapter
from syncline.lab.survey.values import Absent, Check

_FIRST_STEPS = 200
_TRAIN_S = 15.0
_KILL_AFTER_S = 5.0
_WINDOW_S = 0.5
_GIVE_UP_S = 60.0


class End(NamedTuple):
    """How the command ended after the kill; `code` is None if it had to be ended."""

    code: int | None
    seconds: float
    output: str


def measure_kill(bench: Bench) -> Round:
    """Two runs: an undisturbed one, and one that is hit."""
    start = time.perf_counter()
    calm = run_adapter(bench, Work(steps=_FIRST_STEPS))
    startup_s = time.perf_counter() - start - float(calm["seconds"])
    steps = max(_FIRST_STEPS, round(_TRAIN_S * float(calm["steps"]) / float(calm["seconds"])))
    end = _run_and_kill(bench, Work(steps=steps), startup_s + _KILL_AFTER_S)
    after = Absent(f"it had not exited after {_GIVE_UP_S:g} s") if end.code is None else end.seconds
    return Round(values={"survives": judge(end, steps), "after": after}, version=str(calm["version"]))


def judge(end: End, steps: int) -> Check:
    """Whether all steps were completed."""
    if end.code is None:
        return Check(holds=False, seen=f"neither continued nor exited within {end.seconds:.0f} s of the kill")
    if end.code != 0:
        return Check(holds=False, seen=f"the command exited with code {end.code}, {end.seconds:.1f} s after the kill")
    try:
        done = int(last_event(end.output, "measured", "steps")["steps"])
    except SynclineError:
        return Check(holds=False, seen="the command exited with 0, but printed no measurement")
    seen = f"exited with 0, {end.seconds:.1f} s after the kill, with {done} of {steps} steps timed"
    return Check(holds=done >= 0.9 * steps, seen=seen)


def _run_and_kill(bench: Bench, work: Work, kill_after_s: float) -> End:
    mark = uuid.uuid4().hex
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        with ended_with_all_it_started(mark) as start:
            process = start(lambda: _popen(bench, work, mark, output))
            try:
                process.wait(timeout=kill_after_s)
                raise SynclineError(f"The command exited with code {process.returncode} before its worker was killed.")
            except subprocess.TimeoutExpired:
                pass
            os.kill(_busy_worker(mark, work.workers), signal.SIGKILL)
            killed = time.perf_counter()
            try:
                process.wait(timeout=_GIVE_UP_S)
            except subprocess.TimeoutExpired:
                return End(None, _GIVE_UP_S, "")
            seconds = time.perf_counter() - killed
        output.seek(0)
        return End(process.returncode, seconds, output.read())


def _popen(bench: Bench, work: Work, mark: str, output: IO[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command_of(bench, work),
        cwd=bench.scratch,
        env={**variables_for(bench.peer, bench.python), MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def _busy_worker(mark: str, workers: int) -> int:
    before = _times_of(marked(mark))
    time.sleep(_WINDOW_S)
    return choose_victim(before, _times_of(marked(mark)), workers)


def choose_victim(before: Mapping[int, tuple[int, int]], after: Mapping[int, tuple[int, int]], workers: int) -> int:
    """The youngest of the `workers` processes that computed most in between; both map a pid to (CPU time, start)."""
    spent = {pid: cpu - before[pid][0] for pid, (cpu, _) in after.items() if pid in before}
    busiest: Sequence[int] = sorted(spent, key=lambda pid: (-spent[pid], pid))[:workers]
    if not busiest or spent[busiest[-1]] <= 0:
        raise SynclineError("No process of the command was computing when one was to be killed.")
    return max(busiest, key=lambda pid: (after[pid][1], pid))


def _times_of(pids: Sequence[int]) -> dict[int, tuple[int, int]]:
    """CPU time and start time of each process, in clock ticks."""
    found = {}
    for pid in pids:
        try:
            fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # exited by now
        found[pid] = (int(fields[11]) + int(fields[12]), int(fields[19]))
    return found
