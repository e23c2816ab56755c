"""A user's own training loop as a worker: `syncline.worker()` and what `prepare` returns.

Here: the objects that stand in for the user's optimiser and data loader, so that their loop drives the same exchange
as the built-in one. Not here: the exchange and the update themselves (`step.py`).

    worker = syncline.worker()
    model, optimizer, batches = worker.prepare(model, optimizer, loader)

Under `syncline run my_loop.py --workers 4` each worker sees its share of every batch; under `python my_loop.py` one
worker sees all of it. On resumption the loop runs as written: `batches` is empty for epochs that are done, and starts
in the middle of the one that is not. When a worker is lost, joins or leaves, the others do the same in the processes
that they are in: the script is begun again, and `prepare` fills the new objects with the live state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset, default_collate

from syncline.data.order import Position, SampleOrder, Share
from syncline.data.prefetch import Ahead, Fetched, InLine, ahead_of
from syncline.data.source import DatasetSource, as_source
from syncline.errors import ConfigError, PeerLost
from syncline.telemetry.events import Logged
from syncline.workers.batch_norm import has_global_batch_norm, take_part_without_samples
from syncline.workers.compute import to_device
from syncline.workers.course import Course
from syncline.workers.runtime import Runtime
from syncline.workers.step import Outcome, Update
from syncline.workers.trained import Parts, Trained

__all__ = ["LoopBegunAgain", "LoopStopped", "Worker", "connect", "worker"]


class LoopStopped(SystemExit):
    """Raised inside the user's loop when all workers have agreed to stop; the work is saved."""


class LoopBegunAgain(SystemExit):
    """Raised inside the user's loop when the workers are others from now on: the script is begun again."""


class Worker:
    """This process's place among the workers of a run.

    `earlier` is the one of the last View, in which the script had come to some point.
    """

    def __init__(self, runtime: Runtime, earlier: Worker | None = None) -> None:
        self._runtime = runtime
        self._course: Course | None = earlier._course if earlier is not None else None
        self._prepared: _Prepared | None = None
        self._metrics: dict[str, float] = {}

    @property
    def rank(self) -> int:
        """From 0 to `size` - 1. Let rank 0 print and write files."""
        return self._runtime.rank

    @property
    def size(self) -> int:
        """How many workers there are."""
        return self._runtime.plan.size

    @property
    def device(self) -> torch.device:
        """Where this worker computes."""
        return self._runtime.device

    def prepare(self, *objects: Any, clip_norm: float | None = None) -> tuple[Any, ...]:
        """The model, optimiser and DataLoader as the loop is to use them, in the order given.

        The DataLoader's batch size is that of a step over all workers together. Learning-rate schedulers may be given,
        too: they then become part of the checkpoints. `clip_norm` clips the combined gradient, which
        `clip_grad_norm_` in the loop, before the exchange, cannot see.
        """
        if self._prepared is not None:
            raise ConfigError("prepare was called a second time. Call it once, with all objects.")
        with _beginning_again():
            self._prepared = _Prepared(self._runtime, self._course, objects, clip_norm)
        self._course = self._prepared.course
        return self._prepared.objects

    def log(self, **metrics: float) -> None:
        """Report numbers: they appear in the terminal, the events and, the latest ones, in the summary."""
        values = {name: float(value) for name, value in metrics.items()}
        self._metrics.update(values)
        step = self._prepared.course.position.step if self._prepared else 0
        if self.rank == 0:
            self._runtime.recorder.emit(Logged(rank=0, step=step, metrics=values))

    @property
    def course(self) -> Course:
        """Its way through the run; there is one as soon as the script has called `prepare`."""
        assert self._course is not None, "the loop has ended"
        return self._course

    @property
    def metrics(self) -> dict[str, float]:
        """The latest numbers."""
        return {**(self._prepared.trained.metrics if self._prepared else {}), **self._metrics}

    def end_loop(self) -> None:
        """The script has ended here: wait for the others'."""
        if self._prepared is None:
            raise ConfigError(
                "The script ended without calling worker.prepare(model, optimizer, loader), so nothing was shared "
                "among the workers. Add the two lines from the README, or start it with plain python."
            )
        self._prepared.end_loop()


class _Prepared:
    """What `prepare` made, in one View."""

    def __init__(
        self, runtime: Runtime, course: Course | None, objects: tuple[Any, ...], clip_norm: float | None
    ) -> None:
        self.runtime = runtime
        model = _only("model", objects, torch.nn.Module)
        optimizer = _only("optimiser", objects, torch.optim.Optimizer)
        loader = _only("DataLoader", objects, DataLoader)
        schedulers = [o for o in objects if isinstance(o, torch.optim.lr_scheduler.LRScheduler)]
        for thing in objects:
            if not isinstance(thing, (torch.nn.Module, torch.optim.Optimizer, DataLoader, *map(type, schedulers))):
                raise ConfigError(
                    f"prepare cannot use a {type(thing).__name__}: give a model, an optimiser, a DataLoader."
                )
        model.to(runtime.device)
        order = _order_of(loader, runtime.plan.seed)
        self.course = course or Course(runtime, order, epochs=None)
        if self.course.order != order:
            raise ConfigError(
                f"The script was begun again because a worker was lost, and its DataLoader is another one now: "
                f"{order.count} samples in batches of {order.batch}, before {self.course.order.count} in batches of "
                f"{self.course.order.batch}. A script must prepare the same each time, or run with --on-loss stop."
            )
        self.trained = Trained(lambda: Parts(model, optimizer, schedulers))
        self.course.enter_view(self.trained, clip_norm=clip_norm)
        self._schedule = (self.trained.epochs_closed, self.trained.progress_state())
        self._update = Update(
            self.course.replica, self.course.exchange, runtime.recorder, calls=runtime, clip_norm=clip_norm
        )
        self._share: Share | None = None
        self._outcome: Outcome | None = None  # of the last step, if it is not attended to yet
        self._without_samples = ExitStack()
        self._batches = PreparedBatches(self, loader)
        self._optimizer = PreparedOptimizer(optimizer, self.step, self.course.replica.gradients.zero_)
        substitutes = {id(optimizer): self._optimizer, id(loader): self._batches}
        self.objects = tuple(substitutes.get(id(o), o) for o in objects)

    def begin_epoch(self, epoch: int) -> None:
        """The loop comes to this epoch."""
        self._attend_to_last_step()
        at, state = self._schedule
        if epoch == at:
            # Between the epochs that were done before, the loop has advanced its schedulers once more.
            self.trained.load_schedule(state)
        if epoch >= at:
            self.trained.epochs_closed = epoch

    def begin_step(self, share: Share) -> None:
        """The loop takes its next batch."""
        runtime, course = self.runtime, self.course
        runtime.recorder.mark("data")
        course.look_up()
        self._share = share
        runtime.in_flight = (share.position.step, share.indices)
        runtime.seed_step(share.position.step)
        self.trained.begin_step(may_fail=course.can_be_interrupted)
        runtime.recorder.waits = False
        if len(share.indices) == 0 and has_global_batch_norm(course.replica.model):
            self._without_samples.enter_context(take_part_without_samples(course.replica.model))
        course.exchange.before_forward()

    def step(self) -> None:
        """The loop calls `optimizer.step()`."""
        share, course = self._share, self.course
        if share is None:
            raise ConfigError(
                "optimizer.step() was called, but no batch was taken from the prepared loader since the last one. "
                "Iterate over the third thing that prepare returned, and step once for each batch."
            )
        self._without_samples.close()
        self.runtime.recorder.mark("compute")
        is_together = share.after.cursor == 0 or self._is_last(share.after)
        with _beginning_again():
            self._outcome = self._update(share.weight, step=share.after.step, is_together=is_together)
        self._share = None
        self.trained.end_step()
        course.advance(share)
        course.tell_how_it_went_on()
        self.runtime.recorder.step(share.after, len(share.indices), share.batch, None, None, self.trained.lr)
        self.runtime.recorder.waits = True  # what the loop does until its next batch, and how long, nobody knows

    def end_step(self) -> None:
        """The loop wants another batch, so it has done all that it does after a step."""
        with _beginning_again():
            self._attend_to_last_step()

    def end_loop(self) -> None:
        """The loop has ended: wait for the others' loops."""
        self._batches.close()
        self.runtime.recorder.flush(self.course.position, self.trained.lr)
        self._update.meet(self.course.position.step)

    def _attend_to_last_step(self) -> None:
        """Stop or save if that was agreed on in it: now that the user's schedulers have taken it in, too."""
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return
        if outcome.stop:
            raise LoopStopped(0)
        if self._is_last(self.course.position):
            raise SystemExit(0)
        if outcome.save:
            self.course.save()

    def _is_last(self, position: Position) -> bool:
        limit = self.runtime.plan.total_steps
        has_reached = bool(limit) and position.step - position.extra >= limit
        return has_reached and not self.course.stint.makes_up_after(position.step)


class PreparedBatches:
    """Stands in for the user's DataLoader: this worker's share of each batch, in an order that all workers know."""

    def __init__(self, prepared: _Prepared, loader: DataLoader[Any]) -> None:
        self._prepared = prepared
        self.dataset = loader.dataset
        is_plain = isinstance(loader.dataset, TensorDataset) and loader.collate_fn is default_collate
        self._source = as_source(loader.dataset) if is_plain else DatasetSource(loader.dataset, loader.collate_fn)
        self._loaders = loader.num_workers
        self._epochs_begun = 0
        self._ahead: Ahead[Fetched] | InLine[Fetched] | None = None

    def __len__(self) -> int:
        return self._prepared.course.order.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        epoch, course, runtime = self._epochs_begun, self._prepared.course, self._prepared.runtime
        self._epochs_begun += 1
        with _beginning_again():
            self._prepared.begin_epoch(epoch)
        start = course.position
        # What is to be made up for when an epoch is over belongs to it: then only that is done.
        is_owed = start.cursor == 0 and course.stint.makes_up_after(start.step)
        if epoch < (start.epoch - 1 if is_owed else start.epoch):
            return  # this epoch was done before the script was begun again
        if epoch > start.epoch:  # the loop left the last epoch before its end
            course.leave_out_until(Position(epoch, 0, start.step, start.extra))
        self.close()
        self._ahead = ahead_of(
            self._source,
            course.order.shares_of(replace(course.left(), epochs=epoch + 1), runtime.rank),
            samples=-(-course.order.batch // runtime.plan.size),
            loaders=self._loaders,
            seed=runtime.plan.seed,
        )
        runtime.recorder.start()
        for fetched in self._ahead:
            with _beginning_again():
                self._prepared.begin_step(fetched.share)
            yield to_device(fetched.data, runtime.device)
            self._prepared.end_step()
        self.close()

    def close(self) -> None:
        """End fetching ahead."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None


@contextmanager
def _beginning_again() -> Iterator[None]:
    """When the others are lost, no code of the user's should take that for an error of its own."""
    try:
        yield
    except PeerLost as lost:
        raise LoopBegunAgain(0) from lost


class PreparedOptimizer(torch.optim.Optimizer):
    """Stands in for the user's optimiser: `step` exchanges with the other workers, then updates.

    Everything else is the user's own optimiser, so that schedulers and code that reads param_groups go on working.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, step: Callable[[], None], zero: Callable[[], None]) -> None:
        # Not Optimizer.__init__: groups and state are the inner optimiser's own objects.
        self.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})
        self._inner, self._exchange_and_step, self._zero = optimizer, step, zero

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange and update; a closure is called once before."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._exchange_and_step()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients to zero; they keep their place in the exchange buffer whatever `set_to_none` says."""
        del set_to_none
        self._zero()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimiser's."""
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the inner optimiser."""
        self._inner.load_state_dict(state_dict)
        self.__dict__.update(param_groups=self._inner.param_groups, state=self._inner.state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not after `prepare`."""
        del param_group
        raise ConfigError("Parameters were added to a prepared optimiser. Add them before calling prepare.")


_current: Worker | None = None


def connect(runtime: Runtime, earlier: Worker | None = None) -> Worker:
    """Make `runtime` what `worker()` returns in this process; `earlier` is what it returned in the last View."""
    global _current
    _current = Worker(runtime, earlier)
    return _current


def worker() -> Worker:
    """This process's worker: one of many under `syncline run`, the only one under plain `python`."""
    return _current if _current is not None else connect(Runtime.alone())


def _only(what: str, objects: tuple[Any, ...], kind: type) -> Any:
    found = [o for o in objects if isinstance(o, kind)]
    if len(found) != 1:
        raise ConfigError(
            f"prepare needs exactly one {what} and got {len(found)}. Call it as "
            "model, optimizer, batches = worker.prepare(model, optimizer, loader)."
        )
    return found[0]


def _order_of(loader: DataLoader[Any], seed: int) -> SampleOrder:
    sampler = loader.sampler
    if loader.batch_size is None or not isinstance(sampler, (RandomSampler, SequentialSampler)):
        name = type(loader.batch_sampler if loader.batch_size is None else sampler).__name__
        raise ConfigError(
            f"The DataLoader has a {name}, whose order the workers cannot share out. Use DataLoader(dataset, "
            "batch_size=..., shuffle=True or False)."
        )
    if loader.drop_last:
        raise ConfigError("The DataLoader has drop_last=True. Syncline uses every sample: leave drop_last out.")
    count = len(loader.dataset)  # type: ignore[arg-type]  # map-style Datasets are Sized by convention only
    return SampleOrder(seed=seed, count=count, batch=loader.batch_size, shuffle=isinstance(sampler, RandomSampler))
