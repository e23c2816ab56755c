"""Syncline as users start it: `syncline train task.py:task --workers 2`. Its events have the time of each step."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from peer_protocol import arguments, print_event

import syncline

asked = arguments()
all_images = asked.batch * asked.workers  # in one step
samples = all_images * (asked.warm_up + asked.steps)  # one epoch
with tempfile.TemporaryDirectory(prefix="syncline-peer-") as folder:
    task = Path(__file__).with_name("task.py")
    command = [
        sys.executable, "-m", "syncline.cli.main", "train", f"{task}:task", "--workers", str(asked.workers),
        "--batch", str(all_images), "--epochs", "1", "--threads", "1", "--json",
        "--out", folder,
    ]  # fmt: skip
    environment = {**os.environ, "PEER_SAMPLES": str(samples)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
if done.returncode:
    sys.stderr.write(done.stdout)
    sys.exit(done.returncode)
events = [json.loads(line) for line in done.stdout.splitlines()]
steps = [e for e in events if e["event"] == "progress" and e["worker_id"] == 0 and e["step"] >= asked.warm_up]
if len(steps) < 2:
    sys.exit("Syncline reports progress a few times per second, and these steps were too few: use more --steps.")
first, last = steps[0], steps[-1]
print_event(
    event="measured",
    images_per_s=(last["step"] - first["step"]) * all_images / (last["time"] - first["time"]),
    steps=last["step"] - first["step"],
    seconds=last["time"] - first["time"],
    version=syncline.__version__,
)
