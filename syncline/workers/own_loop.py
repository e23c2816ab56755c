"""A user's own training loop as a worker: `syncline.worker()` and what `prepare` returns.

Here: the objects that stand in for the user's optimiser and data loader, so that their loop drives the same exchange
as the built-in one. Not here: the exchange and the update themselves (`step.py`).

    worker = syncline.worker()
    model, optimizer, batches = worker.prepare(model, optimizer, loader)

Under `syncline run my_loop.py --workers 4` each worker sees its share of every batch; under `python my_loop.py` one
worker sees all of it. On resumption the loop runs as written: `batches` is empty for epochs that are done, and starts
in the middle of the one that is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset, default_collate

from syncline.data.order import Position, SampleOrder, Share
from syncline.data.prefetch import Ahead, Fetched, InLine, ahead_of
from syncline.data.source import DatasetSource, as_source
from syncline.errors import ConfigError
from syncline.telemetry.events import Logged
from syncline.workers.batch_norm import has_global_batch_norm, take_part_without_samples
from syncline.workers.compute import to_device
from syncline.workers.runtime import Runtime
from syncline.workers.step import Update

__all__ = ["LoopStopped", "Worker", "connect", "worker"]


class LoopStopped(SystemExit):
    """Raised inside the user's loop when all workers have agreed to stop; the work is saved."""


class Worker:
    """This process's place among the workers of a run."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
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
        self._prepared = _Prepared(self._runtime, objects, clip_norm)
        return self._prepared.objects

    def log(self, **metrics: float) -> None:
        """Report numbers: they appear in the terminal, the events and, the latest ones, in the summary."""
        values = {name: float(value) for name, value in metrics.items()}
        self._metrics.update(values)
        step = self._prepared.position.step if self._prepared else 0
        if self.rank == 0:
            self._runtime.recorder.emit(Logged(rank=0, step=step, metrics=values))

    def finish(self) -> dict[str, Any]:
        """The script has ended: save, and sum up."""
        prepared = self._prepared
        if prepared is None:
            raise ConfigError(
                "The script ended without calling worker.prepare(model, optimizer, loader), so nothing was shared "
                "among the workers. Add the two lines from the README, or start it with plain python."
            )
        prepared.close()
        prepared.meet()
        prepared.save(is_last=True)
        return self._runtime.summary(prepared.position, {**prepared.metrics, **self._metrics})


class _Prepared:
    """What `prepare` made, and the position in the run."""

    def __init__(self, runtime: Runtime, objects: tuple[Any, ...], clip_norm: float | None) -> None:
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
        self._schedulers = schedulers
        model.to(runtime.device)
        self.position, state = runtime.load_checkpoint(runtime.checkpoint_path)
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            for scheduler, saved in zip(schedulers, state["schedulers"], strict=True):
                scheduler.load_state_dict(saved)
        self.metrics: dict[str, float] = dict(state["metrics"]) if state is not None else {}
        self.order = _order_of(loader, runtime.plan.seed)
        self.replica, self._exchange = runtime.replicate(
            model,
            optimizer,
            _private_of(state, runtime.rank),
            step=self.position.step,
            steps_per_epoch=self.order.steps_per_epoch,
            clip_norm=clip_norm,
        )
        self._update = Update(self.replica, self._exchange, runtime.recorder, calls=runtime, clip_norm=clip_norm)
        self._share: Share | None = None
        self._without_samples = ExitStack()
        self._batches = PreparedBatches(self, loader)
        self._optimizer = PreparedOptimizer(optimizer, self.step, self.replica.gradients.zero_)
        substitutes = {id(optimizer): self._optimizer, id(loader): self._batches}
        self.objects = tuple(substitutes.get(id(o), o) for o in objects)

    def begin_step(self, share: Share) -> None:
        """The loop has taken its next batch."""
        runtime = self.runtime
        runtime.recorder.mark("data")
        self._share = share
        runtime.in_flight = (share.position.step, share.indices)
        runtime.seed_step(share.position.step)
        if len(share.indices) == 0 and has_global_batch_norm(self.replica.model):
            self._without_samples.enter_context(take_part_without_samples(self.replica.model))
        self._exchange.before_forward()

    def step(self) -> None:
        """The loop calls `optimizer.step()`."""
        share = self._share
        if share is None:
            raise ConfigError(
                "optimizer.step() was called, but no batch was taken from the prepared loader since the last one. "
                "Iterate over the third thing that prepare returned, and step once for each batch."
            )
        self._without_samples.close()
        self.runtime.recorder.mark("compute")
        self.position = share.after
        limit = self.runtime.plan.total_steps
        is_together = self.position.cursor == 0 or self.position.step == limit
        outcome = self._update(share.weight, step=self.position.step, is_together=is_together)
        self._share = None
        lr = float(self.replica.optimizer.param_groups[0]["lr"])
        self.runtime.recorder.step(self.position, len(share.indices), share.batch, None, None, lr)
        if outcome.stop or (limit and self.position.step >= limit):
            self.close()
            if outcome.stop:
                raise LoopStopped(0)
            raise SystemExit(0)
        if outcome.save:
            self.save()

    def save(self, *, is_last: bool = False) -> None:
        """Make a checkpoint, in the background unless it is the last one."""
        states = [s.state_dict() for s in self._schedulers]
        self.runtime.save(self.position, self.replica, self._exchange, states, self.metrics, is_last=is_last)

    def meet(self) -> None:
        """The loop has ended: wait for the others' loops."""
        self._update.meet(self.position.step)

    def close(self) -> None:
        """Nothing more will be fetched."""
        self._batches.close()
        self.runtime.recorder.flush(self.position, float(self.replica.optimizer.param_groups[0]["lr"]))


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
        return self._prepared.order.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self._epochs_begun, self._prepared.position
        self._epochs_begun += 1
        if epoch < start.epoch:
            return  # this epoch was done before the run was resumed
        if epoch > start.epoch:  # the loop left the last epoch before its end
            start = Position(epoch, 0, start.step, start.extra)
        runtime = self._prepared.runtime
        shares = self._prepared.order.shares(start, rank=runtime.rank, size=runtime.plan.size, epochs=epoch + 1)
        self.close()
        self._ahead = ahead_of(
            self._source,
            shares,
            samples=-(-self._prepared.order.batch // runtime.plan.size),
            loaders=self._loaders,
            seed=runtime.plan.seed,
        )
        runtime.recorder.start()
        for fetched in self._ahead:
            self._prepared.begin_step(fetched.share)
            yield to_device(fetched.data, runtime.device)
        self.close()

    def close(self) -> None:
        """End fetching ahead."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None


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


def connect(runtime: Runtime) -> Worker:
    """Make `runtime` what `worker()` returns in this process."""
    global _current
    _current = Worker(runtime)
    return _current


def worker() -> Worker:
    """This process's worker: one of many under `syncline run`, the only one under plain `python`."""
    return _current if _current is not None else connect(Runtime.alone())


def _private_of(state: dict[str, Any] | None, rank: int) -> dict[str, Any] | None:
    """What worker `rank` held for itself when the checkpoint was made."""
    private: list[dict[str, Any]] = state["private"] if state is not None else []
    return private[rank] if rank < len(private) else None


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
