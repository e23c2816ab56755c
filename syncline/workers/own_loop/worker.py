"""`syncline.worker()`: this process as one of the workers of a run.

Here: `Worker`, everything that a script may call. Not here: what happens then (`training.py`, `batches.py`,
`numbers.py`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from syncline.errors import CheckpointError, ConfigError, PeerFailed
from syncline.telemetry.events import MetricsLogged, WorkerOutput
from syncline.workers.own_loop.batches import DrawnBatches, ListedBatches, PreparedBatches
from syncline.workers.own_loop.carried import Carried
from syncline.workers.own_loop.carry import CarriedThrough
from syncline.workers.own_loop.checks import OUT_OF_STEP
from syncline.workers.own_loop.combined import CombinedNumbers
from syncline.workers.own_loop.feed import drawn_feed
from syncline.workers.own_loop.gradient_calls import watch_gradient_calls
from syncline.workers.own_loop.loading_calls import watch_loading_calls
from syncline.workers.own_loop.numbers import Numbers
from syncline.workers.own_loop.training import LoopTraining
from syncline.workers.own_loop.values import SavedValues
from syncline.workers.own_loop.whole_batches import is_list_of_batches
from syncline.workers.session import Session
from syncline.workers.stepper import Stepper


class Worker(CombinedNumbers):
    """This process as one of the workers of a run."""

    def __init__(self, session: Session, earlier: Worker | None = None) -> None:
        self._session = session
        self._training: LoopTraining = LoopTraining(session, earlier._training if earlier is not None else None)
        super().__init__(Numbers(self._training))
        self._loaders: list[PreparedBatches | ListedBatches] = []
        self._listed: ListedBatches | None = None
        self._carry: CarriedThrough | None = None
        self._metrics: dict[str, float] = {}

    @property
    def rank(self) -> int:
        """From 0 to `size` - 1."""
        return self._session.rank

    @property
    def size(self) -> int:
        return self._session.plan.size

    @property
    def device(self) -> torch.device:
        return self._session.device

    @property
    def is_main(self) -> bool:
        """Whether this worker should print and write files: true on one worker, and on none that repeats epochs."""
        return self._session.rank == 0 and not self.is_replaying

    @property
    def is_replaying(self) -> bool:
        """Whether this worker runs through epochs that are done, to get where the others are."""
        return self._training.is_replacement or self._training.is_passing_over

    @property
    def step(self) -> int:
        """How many steps the run has done: the same on all workers, also after a failure and in a resumed run."""
        if self._training.parts.optimizers:
            self._training.enter()
        return self._training.round.steps

    @property
    def batch(self) -> int:
        """The number of the current batch in its epoch, from 0; unlike enumerate, it is right after a failure, too."""
        return self._training.batch

    @property
    def state(self) -> SavedValues:
        """Values to keep: `worker.state.best = 0.9`. They are saved with checkpoints and sent to replacements."""
        return self._training.parts.values

    def prepare(self, *objects: Any, clip_norm: float | None = None, loss: Literal["mean", "sum"] | None = None) -> Any:
        """The objects for use in the loop, in the order given; a single one is returned as such.

        Models, optimizers, learning-rate schedulers, loss scalers and DataLoaders, in one call or several, before the
        loop. The first DataLoader is the one to train on; its batch size is the global one, over all workers. Others
        are for evaluation, and are divided among the workers. `clip_norm` clips the combined gradient. `loss` says
        whether the script's loss is a mean over the samples of a batch or a sum.
        """
        if clip_norm is not None:
            self._training.clip_norm = clip_norm
        if loss is not None:
            self._training.updates.set_loss(loss)
        prepared = tuple(_prepared(self, thing) for thing in objects)
        watch_gradient_calls(self._training)
        watch_loading_calls(self._training)
        return prepared[0] if len(prepared) == 1 else prepared

    def batches(self, draw: Any, steps: int | None = None, *, dim: int = 0) -> DrawnBatches | ListedBatches:
        """Batches that a function draws, or that the script has made, for a script without a DataLoader.

        `draw()` or `draw(step)` returns the whole batch of a step: tensors, or tuples, lists and dicts of them, with
        one entry per sample along dimension `dim`. It is seeded by the step, so all workers draw the same batch, and
        each gets its part. Without `steps`, there are batches as long as the script asks.

        Instead of a function, `draw` may be such a batch itself, for training on all data in every step; or a list of
        such batches, tuples or dicts of tensors, which are one epoch. Then call this again for each epoch.
        """
        if steps is None and is_list_of_batches(draw):
            return self._epoch_of(list(draw), dim)
        self._check_has_no_batches()
        feed = drawn_feed(draw, self._session.plan.seed, steps=steps, dim=dim)
        return DrawnBatches(self._training, feed, self._numbers)

    def carried(self, initial: Any, *, dim: int = 0, reset_every: int | None = None) -> Carried:
        """State that the script carries from one batch to the next, such as the hidden state of an LSTM.

        `initial` is that of the whole batch, over all workers: a tensor, or tuples, lists and dicts of tensors with
        one entry per sample along dimension `dim`. In the loop: `output, hidden.value = model(x, hidden.value)`.
        After `reset_every` batches the state is initial again, as at the start of an epoch.
        """
        carried = Carried(self._training, self._numbers, initial, dim, reset_every)
        self._training.parts.script.add_carried(carried.table)
        return carried

    def carry(self, hidden: Any, *, dim: int = 0) -> Any:
        """The hidden state of this worker's samples, detached: `hidden = worker.carry(hidden, dim=1)` in each batch.

        In the first batch of an epoch, `hidden` is the initial state of the whole batch, over all workers; after that,
        what a prepared model has returned in the batch before. Tensors, or tuples, lists and dicts of them, with one
        entry per sample along dimension `dim`.
        """
        if self._carry is None:
            self._carry = CarriedThrough(self._training, self._numbers, hidden, dim)
        return self._carry.next(hidden)

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs that are not done, up to `count`: `for epoch in worker.epochs(90)`.

        Like range(count), but a resumed run and a replacement begin with the current epoch.
        """
        if not self._loaders:
            raise ConfigError(
                "worker.epochs needs a DataLoader to train on: prepare one before the loop.", code="no-loader"
            )
        self._training.enter()
        self._training.is_passing_over = False
        for epoch in range(self._training.first_epoch, count):
            self._loaders[0].next_epoch = epoch
            yield epoch

    @contextmanager
    def accumulate(self, batches: int) -> Iterator[None]:
        """Inside this context, `optimizer.step()` updates once for so many batches, with the mean of their gradients.

        The body of the loop stays as it is for single batches: the calls of `zero_grad`, `step` and `clip_grad_norm_`
        in between do nothing. The last batch of an epoch always updates.
        """
        if batches < 1:
            raise ConfigError(f"worker.accumulate({batches}): give 1 batch or more.", code="accumulate")
        updates = self._training.updates
        before, updates.accumulated = updates.accumulated, batches
        try:
            yield
        finally:
            updates.accumulated = before

    def print(self, *values: Any, sep: str = " ") -> None:
        """Print once for all workers, whichever of them have failed."""
        if not self.is_main:
            return
        if self._session.worker_id == 0:
            print(*values, sep=sep, flush=True)  # noqa: T201  # that is what the script asks for
        else:  # the terminal shows what worker 0 prints
            text = sep.join(map(str, values))
            self._session.recorder.emit(WorkerOutput(worker_id=self._session.worker_id, text=text))

    def log(self, **metrics: float) -> None:
        """Report numbers: they appear in the terminal and the events, and the latest ones in the summary."""
        values = {name: float(value) for name, value in metrics.items()}
        self._metrics.update(values)
        if self.is_main:
            step = self._training.round.steps
            self._session.recorder.emit(MetricsLogged(worker_id=self._session.worker_id, step=step, metrics=values))

    def _check_has_no_batches(self) -> None:
        if self._training.order is not None:
            raise ConfigError(
                "The script has training batches already. Call worker.batches once, and prepare no DataLoader for "
                "training beside it.",
                code="second-training-loader",
            )

    def _epoch_of(self, batches: list[Any], dim: int) -> ListedBatches:
        if self._listed is None:
            self._check_has_no_batches()
            self._listed = ListedBatches(self._training, batches, self._numbers, dim)
            self._loaders.append(self._listed)
        else:
            self._listed.replace(batches)
        return self._listed


def _prepared(worker: Worker, thing: Any) -> Any:
    if isinstance(thing, PreparedBatches):
        return thing
    training, loaders = worker._training, worker._loaders
    if isinstance(thing, DataLoader):
        may_train = not loaders and training.order is None
        loaders.append(PreparedBatches(training, thing, worker._numbers, may_train=may_train))
        return loaders[-1]
    if not training.parts.add(thing):
        kind = type(thing).__name__
        raise ConfigError(
            f"prepare cannot use a {kind}: pass models, optimizers, DataLoaders, schedulers and loss scalers.",
            code="not-preparable",
            kind=kind,
        )
    return thing


def finish(worker: Worker, *, stopped_early: bool) -> dict[str, int]:
    """The script has ended: wait for the others, save. The peak memory of each worker, by worker_id."""
    return worker._training.finish(stopped_early=stopped_early)


def save_if_out_of_step(worker: Worker, error: ConfigError | PeerFailed) -> None:
    """The scripts of the workers do different things: save the state after the last step, until which they did not.

    One of them may have found that, and have ended the run for the others.
    """
    session, stepper = worker._session, worker._training.stepper
    code = error.code if isinstance(error, ConfigError) or session.link is None else session.link.abort_code
    if code in OUT_OF_STEP and stepper is not None:
        session.checkpoints.finish_writing()
        with contextlib.suppress(CheckpointError, OSError):  # the error is what matters
            stepper.alone.save_round_start()


def progress_of(worker: Worker) -> tuple[Stepper, int]:
    """The stepper of a script that has trained, and how many steps it has done."""
    training = worker._training
    assert training.stepper is not None, "it has trained"
    return training.stepper, training.round.steps


def metrics_of(worker: Worker) -> dict[str, float]:
    """The numbers that the script has logged, the latest of each name."""
    state = getattr(worker._training, "state", None)
    return {**(state.metrics if state is not None else {}), **worker._metrics}


_current: Worker | None = None


def connect(session: Session, earlier: Worker | None = None) -> Worker:
    """Make `worker()` return a worker of `session`; `earlier` is what it returned when the script ran before."""
    global _current
    _current = Worker(session, earlier)
    return _current


def worker() -> Worker:
    """This process's worker: one of many under `syncline run`, the only one under plain `python`."""
    found = _current if _current is not None else connect(Session.alone())
    for name in found._session.launch_variables:  # scripts that find these would distribute themselves once more
        os.environ.pop(name, None)
    return found
