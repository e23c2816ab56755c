"""The coordinator's work for a worker while nothing fails: receives and checks heartbeats, writes the ledger.

Reads one line, the plan; prints one line, the worker's launch spec; exits when the worker has finished or stdin is
closed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import msgspec
import zmq

from syncline.comms.control import ControlServer, Events, Finished, Hello, LedgerLine, RunFiles, ViewOf, Welcome
from syncline.coordinator.heartbeats import HeartbeatMonitor
from syncline.coordinator.stragglers import StragglerDetector
from syncline.data.ledger import decode
from syncline.data.ledger_file import LedgerFile
from syncline.telemetry.events import Progress, from_dict

_TICK_MS = 50


def main() -> None:
    folder, plan = Path(sys.argv[1]), json.loads(sys.stdin.readline())
    server, heartbeats, stragglers = ControlServer("127.0.0.1"), HeartbeatMonitor(), StragglerDetector()
    ledger = LedgerFile(folder / "ledger.jsonl")
    heartbeats.on_start(0, 0, time.monotonic())
    sys.stdout.write(msgspec.json.encode(server.launch_spec(0)).decode() + "\n")
    sys.stdout.flush()
    welcome = Welcome(
        plan=plan, files=RunFiles(task_path="", run_dir=str(folder), checkpoint_path=None),
        view=ViewOf(1, [0], None), driver_pid=os.getpid(), python_path=[], working_dir=str(folder), secret="",
        session="bench",
    )  # fmt: skip
    poller = zmq.Poller()
    poller.register(server.socket, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    has_finished = False
    while not has_finished and sys.stdin.fileno() not in dict(poller.poll(_TICK_MS)):
        now = time.monotonic()
        while (message := server.receive()) is not None:
            if isinstance(message, Hello):
                server.send(0, welcome)
            elif isinstance(message, Events):
                heartbeats.on_heartbeat(message, now)
                for event in map(from_dict, message.events):
                    if isinstance(event, Progress):
                        stragglers.on_progress(event)
            elif isinstance(message, LedgerLine):
                ledger.add(decode(message.line), now)
            elif isinstance(message, Finished):
                has_finished = True
        heartbeats.find_hung(now)
        ledger.write(now)
    ledger.close()
    server.close()


if __name__ == "__main__":
    main()
