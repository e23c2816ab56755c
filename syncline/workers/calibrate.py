"""Measuring, before the first step, which tuning is fastest for this model on this machine.

Here: trial steps on all workers at once, as in training. They leave no side effects: no update, no statistics, no
gradients, no random numbers drawn. Not here: the choices and how they are decided (`compute/tuning.py`), and applying
the decision (`tuning.py`).

Workers gather every measurement, and the slowest worker's counts. So all of them come to the same decision.
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

from syncline.comms.collective import Collective, Solo
from syncline.compute.compare_layers import compare_layers
from syncline.compute.convolutions import tunable_convolutions
from syncline.compute.kernels.build import library
from syncline.compute.memory import without_side_effects
from syncline.compute.pooling import tunable_pools
from syncline.compute.tuning import (
    PASSES,
    PassTimes,
    TunedLayers,
    Tuning,
    TuningResult,
    describe_results,
    losses_agree,
    search,
    with_layers,
    with_loaders,
)
from syncline.planning.plan import Plan
from syncline.telemetry.events import InfoMessage
from syncline.workers.session import Session
from syncline.workers.tuning import computing_in, lay_out, planned
from syncline.workers.tuning_cache import cache_file, forget, key_of, look_up, remember

_Found: TypeAlias = tuple[Tuning, tuple[TuningResult, ...]]

_FAILED_BEFORE = "not tuned: a worker failed while measuring in an earlier run. Delete {} to measure again."
_LEAST_SAMPLES = 2  # batch normalization needs two
_STEP_S = 0.25
"""The target time of a trial step: large models are measured with part of the samples."""
_LONGEST_STEP_S = 1.0
"""If even the fewest samples take longer, measuring is skipped."""
_ROUNDS = 3
"""How often each tuning is measured after a warm-up; large models once less."""
_TOO_SLOW = 2.0
"""A tuning that is this many times slower than the fastest is not measured again."""
_MAX_DIFFERENCE = 0.1
"""The tolerated difference between the losses of tunings; more means that the model computes something else."""
_CHECK_STEPS = 8
_FEW = 1.5
"""If training uses this many times the samples of a trial step, whole steps are not representative."""
_TIMED = [(which, algorithm) for which, algorithms in PASSES for algorithm in algorithms]


def find_tuning(
    session: Session, trial: CalibrationTrial, *, batch: int, is_alone: bool = False, checks_cache: bool = False
) -> Tuning:
    """The fastest tuning, from the cache or measured now; reported to the user.

    All workers call this together, each with its own share of a `batch`; one that `is_alone` decides for itself.
    `checks_cache`: try what is in the cache first, because the model may compute otherwise than the one it was for.
    """
    plan, collective = session.plan, Solo() if is_alone else session.collective
    start = planned(plan)
    if not has_choice(plan, trial.model, has_slow_data=trial.has_slow_data):
        return start
    key = key_of(trial.model, plan, -(-batch // plan.size))
    found = _from_rank_0(collective, look_up(key) if collective.rank == 0 else None)
    if found is not None and checks_cache and not works(trial, found[0], start, collective):
        found = None
    seconds = 0.0
    if found is None:
        begun = time.monotonic()
        if collective.rank == 0:
            remember(key, start, ())  # if a process crashes while measuring, later runs do not try again
        found = calibrate(trial, plan, start, collective)
        seconds = time.monotonic() - begun
        if collective.rank == 0:
            remember(key, *found) if found[1] else forget(key)
    tuning, results = found
    if session.rank == 0 and (results or not seconds):
        message = describe_results(results, seconds) if results else _FAILED_BEFORE.format(cache_file())
        session.recorder.emit(InfoMessage(message=message, details={"tuning": tuning.to_dict()}))
    return tuning


def has_choice(plan: Plan, model: nn.Module, *, has_slow_data: bool) -> bool:
    """Whether there is anything to measure; for many models there is not."""
    return (
        ("memory-format" in plan.measured and _has_images(model))
        or (
            "convolutions" in plan.measured and any(True for _ in (*tunable_convolutions(model), *tunable_pools(model)))
        )
        or "precision" in plan.measured
        or ("threads" in plan.measured and plan.workers[0].threads > 1)
        or ("loaders" in plan.measured and has_slow_data and plan.workers[0].threads > 1)
    )


def _has_images(model: nn.Module) -> bool:
    """Whether channels-last memory is an option.

    With it, torch 2.13 (oneDNN, AVX2) writes out of bounds in the backward pass of 1x1 convolutions with a stride and
    fewer than 8 channels: models with such layers stay contiguous.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    is_unsafe = any(max(c.kernel_size) == 1 and max(c.stride) > 1 and c.in_channels < 8 for c in layers)
    return not is_unsafe and any(p.dim() == 4 for p in model.parameters())


def _from_rank_0(collective: Collective, mine: _Found | None) -> _Found | None:
    """What rank 0 has in its cache."""
    sent = collective.all_gather(msgspec.json.encode(mine))[0]
    found: _Found | None = msgspec.json.decode(sent, type=_Found | None)
    return found


class CalibrationTrial:
    """What is measured: a model with its optimizer, its loss on a batch, and batches of any number of samples."""

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
        lay_out: Callable[[nn.Module, torch.optim.Optimizer, Tuning], None] = lay_out,
        tolerance: float = _MAX_DIFFERENCE,
    ) -> None:
        """`tolerance` is that of the relative difference between the losses of two tunings."""
        self.model, self.optimizer, self._loss, self._fetch = model, optimizer, loss, fetch
        self.samples, self.device, self.has_slow_data = samples, device, has_slow_data
        self._lay_out, self.tolerance = lay_out, tolerance
        self.batch: Any = None
        self.scale = 1.0
        """The samples of a training step, relative to the trial's."""
        self.fetch_s = 0.0
        """How long fetching the batch took."""

    def take(self, samples: int) -> None:
        """Fetch a batch of `samples` for the next trials."""
        start = time.perf_counter()
        self.batch = self._fetch(samples)
        self.scale = self.samples / max(samples, 1)
        self.fetch_s = time.perf_counter() - start

    def step(self, tuning: Tuning) -> tuple[float, float]:
        """Run forward and backward; the time and the loss."""
        self._lay_out(self.model, self.optimizer, tuning)
        torch.manual_seed(0)
        self.model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        loss = self._backward(self.model, tuning)
        return time.perf_counter() - start, loss

    def losses_of_training(self, tuning: Tuning) -> list[float]:
        """The losses of a few training steps on a copy of the model."""
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        self._lay_out(model, optimizer, tuning)
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
    def without_side_effects(self) -> Iterator[None]:
        """Restore everything that the trial steps inside change."""
        threads = torch.get_num_threads()
        try:
            with without_side_effects(self.model, self.device):
                yield
        finally:
            torch.set_num_threads(threads)
            self.model.zero_grad(set_to_none=True)
            self.batch = None


def calibrate(trial: CalibrationTrial, plan: Plan, start: Tuning, collective: Collective) -> _Found:
    """The fastest tuning that the plan allows, found by all workers together; `start` if measuring fails.

    A model that raises here will raise in its first step as well, with a better error report.
    """
    measurer = _Measurer(trial, collective)
    with trial.without_side_effects():
        if not measurer.choose_samples(start):
            return start, ()
        try:
            tuning, results = search(
                start,
                plan.measured,
                measurer.times,
                has_images=_has_images(trial.model),
                threads=plan.workers[collective.rank].threads,
                check_bf16=measurer.objection_to_bf16,
                tune_layers=measurer.tune_layers,
            )
            if not trial.has_slow_data or "loaders" not in plan.measured:
                return tuning, results
            fetch_s, step_s = measurer.fetch_s(), measurer.times([tuning])[0]
            tuning, more = with_loaders(tuning, fetch_s, step_s, plan.workers[collective.rank].threads)
            return tuning, results + more
        except _CannotMeasure:
            return start, ()


def works(trial: CalibrationTrial, tuning: Tuning, usual: Tuning, collective: Collective) -> bool:
    """Whether a step with `tuning` computes the loss of one with the `usual` tuning, on all workers."""
    with trial.without_side_effects():
        return _Measurer(trial, collective).agree(tuning, usual)


class _CannotMeasure(Exception):
    """Not even the default tuning works."""


class _Measurer:
    """Measures on all workers at once."""

    def __init__(self, trial: CalibrationTrial, collective: Collective) -> None:
        self._trial, self._collective = trial, collective
        self._has_few = False

    def choose_samples(self, tuning: Tuning) -> bool:
        """Use as many samples as keep a step short enough on every worker. False if even the fewest do not.

        Two steps of different size give the time per sample and the fixed time.
        """
        few = min(_LEAST_SAMPLES, self._trial.samples)
        seconds = self._seconds_of(few, tuning)
        if not 0 < seconds <= _LONGEST_STEP_S:
            return False
        more = min(2 * few, self._trial.samples)
        per_sample = (self._seconds_of(more, tuning) - seconds) / max(more - few, 1)
        wanted = few + (_STEP_S - seconds) / max(per_sample, seconds / max(few, 1) / 10)
        self._trial.take(min(max(int(wanted), few), self._trial.samples))
        # Shares may differ by a sample, so all workers decide together whether the samples are few.
        self._has_few = max(scale for (scale,) in self._gather([self._trial.scale])) > _FEW
        return True

    def _seconds_of(self, samples: int, tuning: Tuning) -> float:
        """The time of a step with `samples` on the slowest worker; 0 if it fails on one of them."""
        try:
            self._trial.take(samples)
            self._trial.step(tuning)
            mine = self._trial.step(tuning)[0]
        except Exception:
            mine = 0.0
        gathered = [seconds for (seconds,) in self._gather([mine])]
        return max(gathered) if all(gathered) else 0.0

    def times(self, candidates: Sequence[Tuning]) -> list[float]:
        """Seconds per step with each candidate, alternately: one warm-up, then the minimum counts."""
        warm_up = self._one_round(candidates)
        if math.isinf(warm_up[0]):
            raise _CannotMeasure
        limit = max(_TOO_SLOW * min(warm_up), 2 * _STEP_S)
        left = [k for k, seconds in enumerate(warm_up) if k == 0 or seconds <= limit]
        number = _ROUNDS if sum(warm_up[k] for k in left) < 2 * _STEP_S else _ROUNDS - 1
        rounds = [self._one_round([candidates[k] for k in left]) for _ in range(number)]
        best = {k: min(times) for k, times in zip(left, zip(*rounds, strict=True), strict=True)}
        return [best.get(k, seconds) for k, seconds in enumerate(warm_up)]

    def agree(self, tuning: Tuning, usual: Tuning) -> bool:
        """Whether a step with each works, with the fewest samples, and has the same loss."""
        return self._seconds_of(min(_LEAST_SAMPLES, self._trial.samples), usual) > 0 and all(
            math.isfinite(seconds) for seconds in self._one_round([usual, tuning])
        )

    def fetch_s(self) -> float:
        """How long the slowest worker took to read the samples of a step."""
        return max(times[0] for times in self._gather([self._trial.fetch_s]))

    def tune_layers(self, tuning: Tuning) -> TunedLayers:
        """The tuning with the fastest algorithms for its layers."""
        tuned = with_layers(tuning, self.layers(tuning))
        return tuned if self._has_few else replace(tuned, layer_s={})

    def layers(self, tuning: Tuning) -> dict[str, PassTimes]:
        """Seconds for the passes of each layer by each algorithm, on the slowest worker."""
        if tuning.precision != "float32":
            return {}
        if self._collective.rank == 0:
            library()  # compile once, not on all workers at the same time
        self._gather([])
        mine: dict[str, PassTimes] = {}
        with contextlib.suppress(Exception):  # out of memory, for example: then no worker changes its layers
            mine = compare_layers(self._trial.model, lambda: self._trial.step(tuning), self._trial.scale)
        gathered = self._gather([of_layer[key] for of_layer in mine.values() for key in _TIMED])
        if len({len(seconds) for seconds in gathered}) > 1:
            return {}
        slowest = iter([max(seconds) for seconds in zip(*gathered, strict=True)])
        return {name: {key: next(slowest) for key in _TIMED} for name in mine}

    def objection_to_bf16(self, tuning: Tuning) -> str:
        """The objection to bf16, if any."""
        usual = Tuning(memory_format=tuning.memory_format, threads=tuning.threads)
        try:
            agree = losses_agree(self._trial.losses_of_training(usual), self._trial.losses_of_training(tuning))
        except Exception:
            agree = False
        is_fine = all(answers[0] for answers in self._gather([float(agree)]))
        return "" if is_fine else "its loss diverges from float32's"

    def _one_round(self, candidates: Sequence[Tuning]) -> list[float]:
        """The time of each on the slowest worker; infinite if it fails on one of them."""
        mine: list[float] = []
        usual_loss = math.nan
        for tuning in candidates:
            try:
                seconds, loss = self._trial.step(tuning)
            except Exception:  # such as a view of a tensor in another memory format
                seconds = loss = math.inf
            if not mine:
                usual_loss = loss
            is_the_same = abs(loss - usual_loss) <= self._trial.tolerance * max(abs(usual_loss), 1.0)
            mine.append(seconds if is_the_same else math.inf)
        return [max(times) for times in zip(*self._gather(mine), strict=True)]

    def _gather(self, mine: list[float]) -> list[list[float]]:
        return [msgspec.msgpack.decode(data) for data in self._collective.all_gather(msgspec.msgpack.encode(mine))]
