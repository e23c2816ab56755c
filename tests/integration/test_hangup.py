"""A terminal that is closed during a run."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable

from own_loop_scripts import PLAIN
from real_runs import environment
from real_runs import syncline as command

SLOW = PLAIN.replace("        optimizer.step()\n", "        optimizer.step()\n        __import__('time').sleep(0.05)\n")


def test_a_run_continues_when_its_terminal_hangs_up(tmp_path):
    (tmp_path / "loop.py").write_text(SLOW)
    terminal, other_end = pty.openpty()
    words = [sys.executable, "-m", "syncline", "run", "loop.py", "--workers", "2", "--name", "left"]
    # setsid -c makes the terminal the controlling one, so that closing it hangs up on all processes of the session.
    process = subprocess.Popen(
        ["setsid", "-c", *words],
        cwd=tmp_path, env=environment(), stdin=other_end, stdout=other_end, stderr=other_end,
    )  # fmt: skip
    os.close(other_end)
    events = tmp_path / "runs" / "left" / "events.jsonl"
    wait_for(lambda: events.exists() and '"worker_ready"' in events.read_text(), terminal)
    os.close(terminal)
    assert process.wait(60) == 0
    audit = command("audit", "runs/left", cwd=tmp_path)
    assert audit.out.count("103 of 103 samples committed once; 0 lost, 0 repeated") == 2


def wait_for(condition: Callable[[], bool], terminal: int) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 65536)  # a full terminal would stop the command
