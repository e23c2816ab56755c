"""The built-in training loop.

Here: what the loop adds to a step: computing, the end of an epoch. Not here: the order inside a step (`stepper.py`),
and what is computed (`job.py`).
"""

from __future__ import annotations

from syncline.data.assignment import Position
from syncline.workers.forward import to_device
from syncline.workers.job import Job


def train(job: Job) -> Position:
    """Train from the start of the View to the end of the plan, or to a step at which all workers agreed to stop."""
    stepper, recorder = job.stepper, job.recorder
    with job.fetch_ahead() as batches:
        recorder.start()
        for fetched in batches:
            share, batch = fetched.share, to_device(fetched.data, job.device)
            stepper.begin_step(share)  # check membership, fault hook, seed; marks "data"
            local = job.forward_and_backward(share, batch)  # marks "forward" and "backward"
            stepper.update(share, local.loss, local.correct)  # exchange, clip, update, advance, record; marks both
            if job.ends_epoch(share.after):
                job.after_epoch(share.after)
            if stepper.end_step():  # stop, or save a checkpoint
                break
    position = stepper.progress.position
    recorder.flush(position, job.state.lr)
    return position
