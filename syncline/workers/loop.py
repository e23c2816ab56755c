"""The training loop: every moment of a step, in order, by name.

Here: the order of things. Not here: what each of them does (`job.py` builds them; `compute.py`, `step.py`,
`evaluate.py`, `checkpoint/` do them).
"""

from __future__ import annotations

from syncline.data.order import Position
from syncline.workers.job import Job

__all__ = ["train"]


def train(job: Job) -> Position:
    """Train from the start of the View to the end of the plan, or to a step at which all workers agreed to stop."""
    position, recorder = job.course.start, job.recorder
    with job.fetch_ahead() as batches:
        recorder.start()
        for fetched in batches:
            share, batch = fetched.share, job.to_device(fetched.data)
            recorder.mark("data")

            job.course.look_up()  # whether there is another View, and whether a fault is to be tried out
            job.seed_step(position)
            job.exchange.before_forward()
            local = job.forward_and_backward(share, batch)  # marks "forward" and "backward"

            outcome = job.update(share, local)  # marks "exchange" and "update"
            if not outcome.is_finite:
                job.on_non_finite(share, local.loss, position)

            position = share.after
            job.after_update(share, outcome)
            recorder.step(position, len(share.indices), share.batch, outcome.loss, outcome.correct, job.trained.lr)

            if job.ends_epoch(position):
                job.after_epoch(position)
            if outcome.stop or job.is_complete(position):
                break
            if outcome.save:
                job.course.save()
    recorder.flush(position, job.trained.lr)
    return position
