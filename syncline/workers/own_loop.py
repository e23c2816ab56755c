"""A user's own training loop as a worker: `syncline.worker()` and what `prepare` returns.

Here: the objects that stand in for the user's optimizer and data loader, so that their loop drives the same steps as
the built-in one. Not here: the order of a step (`stepper.py`).

    worker = syncline.worker()
    model, optimizer, batches = worker.prepare(model, optimizer, loader)

Under `syncline run my_loop.py --workers 4` each worker sees its share of every batch; under `python my_loop.py` one
worker sees all of it. When the run resumes, the script runs as written: `batches` is empty for epochs that are done,
and starts in the middle of the one that is not. When a worker fails, joins or leaves, the other processes restart the
script in the same way, and `prepare` loads the live state into the new objects.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset, default_collate

from syncline.compute.batch_norm import has_global_batch_norm, take_part_without_samples
from syncline.data.assignment import Position
from syncline.data.length import length_of
from syncline.data.order import SampleOrder, Share
from syncline.data.prefetch import Fetched, InlineFetcher, Prefetcher, prefetched
from syncline.data.source import DatasetSource, as_source
from syncline.errors import SCRIPT_EXIT, ConfigError, PeerFailed
from syncline.telemetry.events import MetricsLogged
from syncline.workers.forward import check_trainable, to_device
from syncline.workers.session import Session
from syncline.workers.stepper import Stepper
from syncline.workers.train_state import Parts, TrainState

_MOST_PRINTED_BYTES = 4_000

__all__ = ["LoopRestarted", "LoopStopped", "Worker", "connect", "worker"]


class LoopStopped(SystemExit):
    """Raised inside the user's loop when all workers have agreed to stop; the work is saved."""


class LoopRestarted(SystemExit):
    """Raised inside the user's loop when the membership has changed: the script is restarted in this process."""


class Printed:
    """What this process has printed since: a worker's standard error is its log."""

    def __init__(self) -> None:
        log = os.fstat(2)
        self._start = log.st_size if stat.S_ISREG(log.st_mode) else None  # a pipe cannot be read again

    def text(self) -> str:
        if self._start is None:
            return ""
        sys.stdout.flush()
        sys.stderr.flush()
        with open("/proc/self/fd/2", "rb") as log:
            log.seek(self._start)
            return log.read(_MOST_PRINTED_BYTES).decode(errors="replace").strip()


def refused_arguments(printed: Printed) -> ConfigError:
    """The error for a script that exited with code 2 before its first step, as argparse does: what it printed."""
    message = printed.text() or "The script exited with code 2 before its first step: it refused its arguments."
    return ConfigError(message, code=SCRIPT_EXIT, exit_code=2)


class Worker:
    """This process as one of the workers of a run.

    `earlier` is the worker of the last View, in which the script had reached some point.
    """

    def __init__(self, session: Session, earlier: Worker | None = None) -> None:
        self._session = session
        self._stepper: Stepper | None = earlier._stepper if earlier is not None else None
        self._prepared: _Prepared | None = None
        self._metrics: dict[str, float] = {}

    @property
    def rank(self) -> int:
        """From 0 to `size` - 1. Let rank 0 print and write files."""
        return self._session.rank

    @property
    def size(self) -> int:
        return self._session.plan.size

    @property
    def device(self) -> torch.device:
        return self._session.device

    def prepare(self, *objects: Any, clip_norm: float | None = None) -> tuple[Any, ...]:
        """The model, optimizer and DataLoader for use in the loop, in the order given.

        The DataLoader's batch size is the global one, over all workers. Pass learning-rate schedulers too, so that they
        become part of the checkpoints. `clip_norm` clips the combined gradient; `clip_grad_norm_` in the loop would
        clip each worker's own, before the exchange.
        """
        if self._prepared is not None:
            raise ConfigError(
                "prepare was called a second time. Call it once, with all objects.", code="prepared-twice"
            )
        with _restarting():
            self._prepared = _Prepared(self._session, self._stepper, objects, clip_norm)
        self._stepper = self._prepared.stepper
        return self._prepared.objects

    def log(self, **metrics: float) -> None:
        """Report numbers: they appear in the terminal and the events, and the latest ones in the summary."""
        values = {name: float(value) for name, value in metrics.items()}
        self._metrics.update(values)
        step = self._prepared.stepper.progress.position.step if self._prepared else 0
        if self.rank == 0:
            self._session.recorder.emit(MetricsLogged(worker_id=self._session.worker_id, step=step, metrics=values))

    @property
    def stepper(self) -> Stepper:
        """There is one as soon as the script has called `prepare`."""
        assert self._stepper is not None, "the loop has ended"
        return self._stepper

    @property
    def metrics(self) -> dict[str, float]:
        return {**(self._prepared.state.metrics if self._prepared else {}), **self._metrics}

    def end_loop(self) -> None:
        """Wait for the other workers' scripts: this one has ended."""
        if self._prepared is None:
            raise ConfigError(
                "The script ended without calling worker.prepare(model, optimizer, loader), so each worker trained "
                "alone. Add the two lines from the README, or start it with plain python.",
                code="not-prepared",
            )
        self._prepared.end_loop()


class _Prepared:
    """What `prepare` made, in one View."""

    def __init__(
        self, session: Session, stepper: Stepper | None, objects: tuple[Any, ...], clip_norm: float | None
    ) -> None:
        self.session = session
        model = _only("model", objects, torch.nn.Module)
        optimizer = _only("optimizer", objects, torch.optim.Optimizer)
        loader = _only("DataLoader", objects, DataLoader)
        schedulers = [o for o in objects if isinstance(o, torch.optim.lr_scheduler.LRScheduler)]
        for thing in objects:
            if not isinstance(thing, (torch.nn.Module, torch.optim.Optimizer, DataLoader, *map(type, schedulers))):
                kind = type(thing).__name__
                raise ConfigError(
                    f"prepare cannot use a {kind}: pass a model, an optimizer, a DataLoader, and schedulers if any.",
                    code="not-preparable",
                    kind=kind,
                )
        check_trainable(model)
        model.to(session.device)
        order = _order_of(loader, session.plan.seed)
        self.stepper = stepper or Stepper(session, order, epochs=None)
        _check_same_data(self.stepper.progress.order, order)
        self.state = TrainState(lambda: Parts(model, optimizer, schedulers))
        self.stepper.enter_view(self.state, clip_norm=clip_norm)
        self._progress_at_start = self.state.progress()
        self._share: Share | None = None  # of the step in progress
        self._without_samples = ExitStack()
        self._batches = PreparedBatches(self, loader)
        self._optimizer = PreparedOptimizer(optimizer, self.step, self.stepper.replica.gradients.zero_)
        substitutes = {id(optimizer): self._optimizer, id(loader): self._batches}
        self.objects = tuple(substitutes.get(id(o), o) for o in objects)

    def begin_epoch(self, epoch: int) -> None:
        """The loop starts iterating for the `epoch`-th time."""
        self._end_last_step()
        start = self._progress_at_start
        if epoch == start.epochs_closed:
            # While the loop passed over the epochs that were done before, it has advanced its schedulers once more.
            self.state.load_schedule(start)
        if epoch >= start.epochs_closed:
            self.state.epochs_closed = epoch

    def begin_step(self, share: Share) -> None:
        """The loop takes its next batch."""
        self.stepper.begin_step(share)
        self._share = share
        model = self.stepper.replica.model
        if len(share.indices) == 0 and has_global_batch_norm(model):
            self._without_samples.enter_context(take_part_without_samples(model))

    def step(self) -> None:
        share = self._share
        if share is None:
            raise ConfigError(
                "optimizer.step() was called, but no batch was taken from the prepared loader since the last call. "
                "Iterate over the loader that prepare returned, and step once for each batch.",
                code="step-without-batch",
            )
        self._without_samples.close()
        recorder = self.session.recorder
        recorder.mark("compute")
        with _restarting():
            self.stepper.update(share)
        self._share = None
        recorder.waits = True  # until its next batch, the loop may do anything: that is no sign of a hang

    def end_step(self) -> None:
        """The loop asks for another batch, so it has completed its last step: its schedulers have advanced."""
        with _restarting():
            self._end_last_step()

    def _end_last_step(self) -> None:
        ending = self.stepper.end_step()
        if ending is not None:
            raise LoopStopped(0) if ending == "stopped" else SystemExit(0)

    def end_loop(self) -> None:
        """Wait for the other workers' loops: this one has ended."""
        self._batches.close()
        self.session.recorder.flush(self.stepper.progress.position, self.state.lr)
        self.stepper.end_loop()


class PreparedBatches:
    """Stands in for the user's DataLoader: this worker's share of each batch, in an order that all workers know."""

    def __init__(self, prepared: _Prepared, loader: DataLoader[Any]) -> None:
        self._prepared = prepared
        self.dataset = loader.dataset
        is_plain = isinstance(loader.dataset, TensorDataset) and loader.collate_fn is default_collate
        self._source = as_source(loader.dataset) if is_plain else DatasetSource(loader.dataset, loader.collate_fn)
        self._loaders = loader.num_workers
        self._epochs_begun = 0
        self._ahead: Prefetcher[Fetched] | InlineFetcher[Fetched] | None = None

    def __len__(self) -> int:
        return self._prepared.stepper.progress.order.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        epoch, progress, session = self._epochs_begun, self._prepared.stepper.progress, self._prepared.session
        self._epochs_begun += 1
        with _restarting():
            self._prepared.begin_epoch(epoch)
        start = progress.position
        # Samples to be made up for at the end of an epoch belong to it: then only these are left of it.
        is_owed = start.cursor == 0 and progress.assignment.has_requeued_after(start.step)
        if epoch < (start.epoch - 1 if is_owed else start.epoch):
            return  # this epoch was done before the script was restarted
        if epoch > start.epoch:  # the loop left the last epoch early
            progress.skip_to(Position(epoch, 0, start.step, start.extra))
        self.close()
        self._ahead = prefetched(
            self._source,
            progress.order.shares_of(replace(progress.remaining(), epochs=epoch + 1), session.rank),
            samples=-(-progress.order.batch // session.plan.size),
            loaders=self._loaders,
            seed=session.plan.seed,
            warn=session.warn_of_worker,
        )
        session.recorder.start()
        for fetched in self._ahead:
            with _restarting():
                self._prepared.begin_step(fetched.share)
            yield to_device(fetched.data, session.device)
            self._prepared.end_step()
        self.close()

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None


@contextmanager
def _restarting() -> Iterator[None]:
    """Turn `PeerFailed` into `LoopRestarted`, which no `except Exception` in the user's code catches."""
    try:
        yield
    except PeerFailed as failed:
        raise LoopRestarted(0) from failed


class PreparedOptimizer(torch.optim.Optimizer):
    """Stands in for the user's optimizer: `step` exchanges with the other workers, then updates.

    Everything else is the user's own optimizer, so that schedulers and code that reads param_groups keep working.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, step: Callable[[], None], zero: Callable[[], None]) -> None:
        # Not Optimizer.__init__: groups and state are the inner optimizer's own objects.
        self.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})
        self._inner, self._exchange_and_step, self._zero = optimizer, step, zero

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call `closure` once, if given, then exchange and update."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._exchange_and_step()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients to zero; `set_to_none` is ignored, because they live in the exchange buffer."""
        del set_to_none
        self._zero()

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict)
        self.__dict__.update(param_groups=self._inner.param_groups, state=self._inner.state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        del param_group
        raise ConfigError(
            "Parameters were added to a prepared optimizer. Add them before calling prepare.", code="prepared-optimizer"
        )


_current: Worker | None = None


def connect(session: Session, earlier: Worker | None = None) -> Worker:
    """Make `worker()` return a worker of `session`; `earlier` is what it returned in the last View."""
    global _current
    _current = Worker(session, earlier)
    return _current


def worker() -> Worker:
    """This process's worker: one of many under `syncline run`, the only one under plain `python`."""
    return _current if _current is not None else connect(Session.alone())


def _only(what: str, objects: tuple[Any, ...], kind: type) -> Any:
    found = [o for o in objects if isinstance(o, kind)]
    if len(found) != 1:
        raise ConfigError(
            f"prepare needs exactly one {what} and got {len(found)}. Call it as "
            "model, optimizer, batches = worker.prepare(model, optimizer, loader).",
            code="prepare-objects",
            what=what,
            count=len(found),
        )
    return found[0]


def _check_same_data(before: SampleOrder, now: SampleOrder) -> None:
    if before != now:
        raise ConfigError(
            "The script was restarted because the membership changed, and its DataLoader is different now: "
            f"{now.count} samples in batches of {now.batch}, before {before.count} in batches of {before.batch}. "
            "A script must prepare the same data each time, or run with --on-worker-failure stop.",
            code="different-data",
        )


def _order_of(loader: DataLoader[Any], seed: int) -> SampleOrder:
    sampler = loader.sampler
    if loader.batch_size is None or not isinstance(sampler, (RandomSampler, SequentialSampler)):
        name = type(loader.batch_sampler if loader.batch_size is None else sampler).__name__
        raise ConfigError(
            f"The DataLoader has a {name}, whose samples cannot be divided among workers. Use DataLoader(dataset, "
            "batch_size=..., shuffle=True or False).",
            code="sampler",
            sampler=name,
        )
    if loader.drop_last:
        raise ConfigError(
            "The DataLoader has drop_last=True. Syncline uses every sample: remove drop_last.", code="drop-last"
        )
    count = length_of(loader.dataset)
    return SampleOrder(seed=seed, count=count, batch=loader.batch_size, shuffle=isinstance(sampler, RandomSampler))
