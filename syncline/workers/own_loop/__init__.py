"""A user's own training loop as a worker: `syncline.worker()` and what it prepares.

    worker = syncline.worker()
    model, optimizer, batches = worker.prepare(model, optimizer, loader)

Here: the objects that a script uses, so that its loop drives the same steps as the built-in one (`worker.py`,
`optimizer.py`, `batches.py`, `feed.py`), and what happens in them (`training.py`). Not here: the order of a step
(`stepper.py`), and what a round of such a loop is (`rounds.py`).

Under `syncline run my_loop.py --workers 4` each worker sees its share of every batch; under `python my_loop.py` one
worker sees all of it. When a worker fails, the others continue where they are in their scripts. A replacement, and
every worker of a resumed run, runs the script as written: `batches` is empty for epochs that are done, and starts in
the middle of the one that is not.
"""

from syncline.workers.own_loop.script import (
    LoopLeft,
    LoopRestarted,
    LoopStopped,
    Printed,
    refused_arguments,
    script_failed,
)
from syncline.workers.own_loop.worker import (
    Worker,
    connect,
    finish,
    metrics_of,
    progress_of,
    save_if_out_of_step,
    worker,
)

__all__ = [
    "LoopLeft",
    "LoopRestarted",
    "LoopStopped",
    "Printed",
    "Worker",
    "connect",
    "finish",
    "metrics_of",
    "progress_of",
    "refused_arguments",
    "save_if_out_of_step",
    "script_failed",
    "worker",
]
