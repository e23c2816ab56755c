"""Measuring, before the first step, how this model computes fastest on this machine.

Here: steps that are tried out with all workers at once, as it will be in training, and that leave nothing behind: no
update, no statistics, no gradients, no random numbers drawn. Not here: which choices there are and what decides
(`plan/tuning.py`), and what becomes of the decision (`tuning.py`).

Workers tell each other every measurement, and the slowest counts. So all of them come to the same decision.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec
import torch
from torch import nn

from syncline.comms.collective import Collective
from syncline.data.augmented import untransformed
from syncline.data.order import Share
from syncline.data.source import DatasetSource, Source
from syncline.kernels.build import library
from syncline.plan.plan import Plan
from syncline.plan.tuning import (
    PASSES,
    Equipped,
    Finding,
    PassTimes,
    Tuning,
    in_words,
    losses_agree,
    search,
    with_layers,
    with_loaders,
)
from syncline.telemetry.events import Noted
from syncline.workers.build import Loss
from syncline.workers.compare_layers import compare_layers
from syncline.workers.compute import leaving_nothing_behind, loss_of, to_device
from syncline.workers.convolutions import candidates
from syncline.workers.max_pooling import pool_candidates
from syncline.workers.runtime import Runtime
from syncline.workers.tuning import computing_in, lay_out, planned
from syncline.workers.tuning_cache import cache_file, forget, key_of, look_up, remember

__all__ = ["Trial", "calibrate", "find_tuning"]

_Found: TypeAlias = tuple[Tuning, tuple[Finding, ...]]

_NOT_AGAIN = "not tuned: a worker ended when that was tried out. Delete {} to try again."
_LEAST_SAMPLES = 2  # batch normalisation needs as many
_STEP_S = 0.25
"""A step that is tried out should take no longer: large models are tried out with part of the samples."""
_LONGEST_STEP_S = 1.0
"""If not even the fewest samples are done in this time, trying out would take too long."""
_ROUNDS = 3
"""How often each form is tried out after a first time; large models once less."""
_HOPELESS = 2.0
"""What is so many times slower than the fastest is not tried a second time."""
_APART = 0.1
"""The losses of one step in different forms may be so far apart; more is a sign that the model computes otherwise."""
_CHECK_STEPS = 8
_FEW = 1.5
"""If training has so many times the samples that steps are tried out with, they say too little about it."""
_PASSES_IN_WAYS = [(which, way) for which, ways in PASSES for way in ways]


def find_tuning(
    runtime: Runtime, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, source: Source, share: Share
) -> Tuning:
    """What is fastest for these, as remembered from an earlier run or as measured now; the user is told.

    All workers call it together, each with its own first share of the samples.
    """
    plan, collective = runtime.plan, runtime.collective
    start = planned(plan)
    if not _has_choice(plan, model, source):
        return start
    key = key_of(model, plan, -(-plan.batch // plan.size))
    found = _of_the_first(collective, look_up(key) if runtime.rank == 0 else None)
    seconds = 0.0
    if found is None:
        begun = time.monotonic()
        trial = Trial(
            model,
            optimizer,
            lambda model, batch: loss_of(model, loss, batch)[0],
            lambda samples: to_device(source.fetch(share.indices[:samples]), runtime.device),
            samples=len(share.indices),
            device=runtime.device,
            has_slow_data=isinstance(untransformed(source), DatasetSource),
        )
        if runtime.rank == 0:
            remember(key, start, ())  # should a process end while this is tried out, it is not tried again
        found = calibrate(trial, plan, start, collective)
        seconds = time.monotonic() - begun
        if runtime.rank == 0:
            remember(key, *found) if found[1] else forget(key)
    tuning, findings = found
    if runtime.rank == 0 and (findings or not seconds):
        told = in_words(findings, seconds) if findings else _NOT_AGAIN.format(cache_file())
        runtime.recorder.emit(Noted(message=told, details={"tuning": tuning.to_dict()}))
    return tuning


def _has_choice(plan: Plan, model: nn.Module, source: Source) -> bool:
    """Whether there is anything to measure: for many a model there is nothing."""
    return (
        ("memory-format" in plan.measured and _has_images(model))
        or ("convolutions" in plan.measured and any(True for _ in (*candidates(model), *pool_candidates(model))))
        or "precision" in plan.measured
        or ("threads" in plan.measured and plan.workers[0].threads > 1)
        or (
            "loaders" in plan.measured
            and isinstance(untransformed(source), DatasetSource)
            and plan.workers[0].threads > 1
        )
    )


def _has_images(model: nn.Module) -> bool:
    """Whether channels-last memory is an option.

    With it torch 2.13 (oneDNN, AVX2) writes beyond the end of its memory in the backward pass of 1x1 convolutions with
    a stride and fewer than 8 channels: models with such layers stay as they are.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    is_unsafe = any(max(c.kernel_size) == 1 and max(c.stride) > 1 and c.in_channels < 8 for c in layers)
    return not is_unsafe and any(p.dim() == 4 for p in model.parameters())


def _of_the_first(collective: Collective, mine: _Found | None) -> _Found | None:
    """What the first worker remembers."""
    told = collective.gather(msgspec.json.encode(mine))[0]
    found: _Found | None = msgspec.json.decode(told, type=_Found | None)
    return found


class Trial:
    """What is tried out: a model with its optimiser, its loss on a batch, and batches of any number of samples."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[nn.Module, Any], torch.Tensor],
        fetch: Callable[[int], Any],
        *,
        samples: int,
        device: torch.device,
        has_slow_data: bool = False,
    ) -> None:
        self.model, self.optimizer, self._loss, self._fetch = model, optimizer, loss, fetch
        self.samples, self.device, self.has_slow_data = samples, device, has_slow_data
        self.batch: Any = None
        self.scale = 1.0
        """How many times as many samples a step has in training."""
        self.fetch_s = 0.0
        """How long it took to get it."""

    def take(self, samples: int) -> None:
        """Try out with so many samples."""
        start = time.perf_counter()
        self.batch = self._fetch(samples)
        self.scale = self.samples / max(samples, 1)
        self.fetch_s = time.perf_counter() - start

    def step(self, tuning: Tuning) -> tuple[float, float]:
        """Forward and backward: how long it took, and the loss."""
        lay_out(self.model, self.optimizer, tuning)
        torch.manual_seed(0)
        self.model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        loss = self._backward(self.model, tuning)
        return time.perf_counter() - start, loss

    def losses_of_training(self, tuning: Tuning) -> list[float]:
        """The loss of a few steps of training a copy."""
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        lay_out(model, optimizer, tuning)
        torch.manual_seed(0)
        losses = []
        for _ in range(_CHECK_STEPS):
            optimizer.zero_grad()
            losses.append(self._backward(model, tuning))
            optimizer.step()
        return losses

    def _backward(self, model: nn.Module, tuning: Tuning) -> float:
        with computing_in(tuning.precision, self.device):
            loss = self._loss(model, self.batch)
        torch.autograd.backward(loss)
        return loss.item()

    @contextmanager
    def leaving_nothing_behind(self) -> Iterator[None]:
        """What the steps inside change is put back."""
        threads = torch.get_num_threads()
        try:
            with leaving_nothing_behind(self.model, self.device):
                yield
        finally:
            torch.set_num_threads(threads)
            self.model.zero_grad(set_to_none=True)
            self.batch = None


def calibrate(trial: Trial, plan: Plan, start: Tuning, collective: Collective) -> _Found:
    """The fastest tuning that the plan allows, found by all workers together; `start` if nothing can be tried out.

    A model that raises here will raise in its first step as well, which tells it better.
    """
    measurer = _Measurer(trial, collective)
    with trial.leaving_nothing_behind():
        if not measurer.choose_samples(start):
            return start, ()
        try:
            tuning, findings = search(
                start,
                plan.measured,
                measurer.times,
                has_images=_has_images(trial.model),
                threads=plan.workers[collective.rank].threads,
                check_bf16=measurer.objection_to_bf16,
                equip=measurer.equip,
            )
            if not trial.has_slow_data or "loaders" not in plan.measured:
                return tuning, findings
            fetch_s, step_s = measurer.fetch_s(), measurer.times([tuning])[0]
            tuning, more = with_loaders(tuning, fetch_s, step_s, plan.workers[collective.rank].threads)
            return tuning, findings + more
        except _NotToBeTriedOut:
            return start, ()


class _NotToBeTriedOut(Exception):
    """Not even the usual way works."""


class _Measurer:
    """Measures with all workers at once."""

    def __init__(self, trial: Trial, collective: Collective) -> None:
        self._trial, self._collective = trial, collective
        self._has_few = False

    def choose_samples(self, tuning: Tuning) -> bool:
        """Take as many samples as make a step short enough on every worker. False if there is no such thing.

        Two steps of different size tell what a sample takes, and what is the same for any number of them.
        """
        few = min(_LEAST_SAMPLES, self._trial.samples)
        seconds = self._seconds_of(few, tuning)
        if not 0 < seconds <= _LONGEST_STEP_S:
            return False
        more = min(2 * few, self._trial.samples)
        per_sample = (self._seconds_of(more, tuning) - seconds) / max(more - few, 1)
        wanted = few + (_STEP_S - seconds) / max(per_sample, seconds / max(few, 1) / 10)
        self._trial.take(min(max(int(wanted), few), self._trial.samples))
        # Shares may differ by a sample: whether those tried out are few is decided for all of them.
        self._has_few = max(scale for (scale,) in self._told([self._trial.scale])) > _FEW
        return True

    def _seconds_of(self, samples: int, tuning: Tuning) -> float:
        """How long a step with so many samples takes the slowest worker; 0 if it does not work for one of them."""
        try:
            self._trial.take(samples)
            self._trial.step(tuning)
            mine = self._trial.step(tuning)[0]
        except Exception:
            mine = 0.0
        told = [seconds for (seconds,) in self._told([mine])]
        return max(told) if all(told) else 0.0

    def times(self, candidates: Sequence[Tuning]) -> list[float]:
        """Seconds for a step with each of them, by turns: one to warm up, and of the others the least counts."""
        warm_up = self._one_round(candidates)
        if math.isinf(warm_up[0]):
            raise _NotToBeTriedOut
        limit = max(_HOPELESS * min(warm_up), 2 * _STEP_S)
        left = [k for k, seconds in enumerate(warm_up) if k == 0 or seconds <= limit]
        number = _ROUNDS if sum(warm_up[k] for k in left) < 2 * _STEP_S else _ROUNDS - 1
        rounds = [self._one_round([candidates[k] for k in left]) for _ in range(number)]
        best = {k: min(times) for k, times in zip(left, zip(*rounds, strict=True), strict=True)}
        return [best.get(k, seconds) for k, seconds in enumerate(warm_up)]

    def fetch_s(self) -> float:
        """How long it took the slowest worker to read the samples of a step."""
        return max(told[0] for told in self._told([self._trial.fetch_s]))

    def equip(self, tuning: Tuning) -> Equipped:
        """The tuning, with layers in the ways that are fastest in it."""
        equipped = with_layers(tuning, self.layers(tuning))
        return equipped if self._has_few else replace(equipped, layer_s={})

    def layers(self, tuning: Tuning) -> dict[str, PassTimes]:
        """Seconds for the passes of each layer in each way, on the slowest worker."""
        if tuning.precision != "float32":
            return {}
        if self._collective.rank == 0:
            library()  # compiled once, not by all at the same time
        self._told([])
        mine: dict[str, PassTimes] = {}
        with contextlib.suppress(Exception):  # no memory for it, say; then nobody goes over to anything
            mine = compare_layers(self._trial.model, lambda: self._trial.step(tuning), self._trial.scale)
        told = self._told([of_layer[key] for of_layer in mine.values() for key in _PASSES_IN_WAYS])
        if len({len(seconds) for seconds in told}) > 1:
            return {}
        slowest = iter([max(seconds) for seconds in zip(*told, strict=True)])
        return {name: {key: next(slowest) for key in _PASSES_IN_WAYS} for name in mine}

    def objection_to_bf16(self, tuning: Tuning) -> str:
        """What speaks against bf16, if anything."""
        usual = Tuning(memory_format=tuning.memory_format, threads=tuning.threads)
        try:
            agree = losses_agree(self._trial.losses_of_training(usual), self._trial.losses_of_training(tuning))
        except Exception:
            agree = False
        is_fine = all(told[0] for told in self._told([float(agree)]))
        return "" if is_fine else "the loss goes another way"

    def _one_round(self, candidates: Sequence[Tuning]) -> list[float]:
        """How long each took the slowest worker; infinite if it did not work for one of them."""
        mine: list[float] = []
        usual_loss = math.nan
        for tuning in candidates:
            try:
                seconds, loss = self._trial.step(tuning)
            except Exception:  # a view of a tensor that is laid out otherwise, say
                seconds = loss = math.inf
            if not mine:
                usual_loss = loss
            is_the_same = abs(loss - usual_loss) <= _APART * max(abs(usual_loss), 1.0)
            mine.append(seconds if is_the_same else math.inf)
        return [max(times) for times in zip(*self._told(mine), strict=True)]

    def _told(self, mine: list[float]) -> list[list[float]]:
        return [msgspec.msgpack.decode(data) for data in self._collective.gather(msgspec.msgpack.encode(mine))]
