"""Scripted faults: a small language for them, and the injector that makes them happen inside workers.

    kill worker 2 at step 412               SIGKILL; `kill server 0 at step 20` for a parameter server
    stop worker 1 at step 50 for 5s         SIGSTOP, and SIGCONT after the time; without a time, permanently
    slow worker 0 at step 10 by 5x          each step takes five times as long; `by 0.2s`: 0.2 s longer
    raise in worker 1 at step 7             an exception as from the user's code
    cut worker 1 at step 30 for 5s          packets to it are dropped silently
    disconnect worker 1 at step 30          its connections are closed, once
    lose 10% of packets to worker 1 at step 30 for 5s
    fill the disk at step 20 for 5s         no worker can finish writing a file

Here: the script (`script.py`), the injector (`injector.py`), signals, packet filters and the full disk
(`mechanics.py`). Not here: random kills, and the score of a run (`lab/chaos/`). Workers load this package through
`workers/step_hook.py`, so it imports nothing of a run.

The environment variable SYNCLINE_FAULTS holds a script, with semicolons or newlines between faults; `install` returns
the variables to set. Each fault happens once in a run, when its worker begins that step or, if the worker was not
running then, its next one. RUN/faults records which have happened, so that a replacement does not repeat them.
"""

from __future__ import annotations

from syncline.lab.faults.injector import LINKS, VARIABLE, FaultRecord, Injector, faults_injected, install
from syncline.lab.faults.mechanics import ScriptedFault, short_path
from syncline.lab.faults.script import Fault, FaultKind, as_script, read_fault, read_script, read_seconds

__all__ = [
    "LINKS", "VARIABLE", "Fault", "FaultKind", "FaultRecord", "Injector", "ScriptedFault", "as_script",
    "faults_injected", "install", "read_fault", "read_script", "read_seconds", "short_path",
]  # fmt: skip
