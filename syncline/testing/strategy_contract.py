"""What every strategy must do, as one call: `check_strategy`.

    check_strategy("sparknet(tau=5)")
    check_strategy("my_strategy.py:Partial(tau=5)", workers=4)

Here: the promises, each a check of its own in `CONTRACT`. They train a small model with workers that are threads
(`trials.py`), by the step, meeting and exchange code of real runs. Not here: what codecs and collectives must do
(`codec_contract.py`, `collective_contract.py`), and whether a strategy is any good: a contract sees only that the model
learns.

All trainings are short. A strategy that exchanges every so many steps should do so at least every hundred here, or a
request to stop comes too late; give one that does so seldom a smaller number to be checked with.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Final

import torch

from syncline.strategies.reading import read_strategy
from syncline.strategies.switching import AnyStrategy
from syncline.testing.trials import Problem, Trial, linear_problem, train_on_threads

__all__ = ["CONTRACT", "Check", "check_strategy"]

Check = Callable[[AnyStrategy, int], None]

_STEPS_TO_LEARN: Final = 120
_STEPS_TO_STOP: Final = 120


def check_strategy(strategy: AnyStrategy | str, *, workers: int = 3) -> None:
    """Raise `AssertionError`, which says what is wrong, unless this strategy keeps every promise in `CONTRACT`.

    A hierarchy needs as many `workers` as make at least two groups.
    """
    strategy = read_strategy(strategy) if isinstance(strategy, str) else strategy
    for check in CONTRACT:
        check(strategy, workers)


def all_workers_share_one_model_and_it_learns(strategy: AnyStrategy, workers: int) -> None:
    """Inside `Exchange.shared` all replicas hold the same bits, and their loss is far below that of the beginning."""
    problem = _problem()
    trial = train_on_threads(strategy, workers, steps=_STEPS_TO_LEARN, problem=problem)
    _require_agreement(strategy, trial, _STEPS_TO_LEARN)
    before, after = _loss_at_first(problem), trial.losses[0]
    _require(
        after < 0.5 * before,
        strategy,
        f"does not learn: the loss of a linear problem was {before:.3g} before {_STEPS_TO_LEARN} steps of {workers} "
        f"workers, and {after:.3g} after them",
    )


def a_worker_without_samples_takes_part(strategy: AnyStrategy, workers: int) -> None:
    """The last batch of an epoch may have fewer samples than there are workers."""
    problem = _problem(samples=2 * 16 + 1)
    trial = train_on_threads(strategy, workers, steps=8, problem=problem)
    _require_finite(strategy, trial, "a step in which some workers had no samples")
    _require_agreement(strategy, trial, 8)


def a_request_to_stop_stops_all_workers_at_one_step(strategy: AnyStrategy, workers: int) -> None:
    request = 3
    for rank in range(workers):
        trial = train_on_threads(strategy, workers, steps=request + _STEPS_TO_STOP, stop={rank: request})
        _require(
            max(trial.steps) < request + _STEPS_TO_STOP,
            strategy,
            f"does not pass on a request to stop: worker {rank} had one after {request} steps, and {_STEPS_TO_STOP} "
            "steps later "
            "all were still training. Return True where the piggybacked values were summed over workers, or exchange "
            "at least every hundred steps",
        )
        _require_agreement(strategy, trial)


def a_training_resumes_from_what_was_saved(strategy: AnyStrategy, workers: int) -> None:
    """What `private_state` gives can be written and read, and leads on: to the same bits where chance plays no part."""
    problem = _problem(momentum=0.5)
    save, steps = 7, 12
    whole = train_on_threads(strategy, workers, steps=steps, problem=problem, save=save)
    assert whole.saved is not None, "it was not stopped before"
    start = replace(whole.saved, states=[_written_and_read(strategy, state) for state in whole.saved.states])
    is_repeatable = strategy.method.is_repeatable and not whole.was_asynchronous
    more = steps - save if is_repeatable else 40
    resumed = train_on_threads(strategy, workers, steps=more, problem=problem, start=start)
    _require_agreement(strategy, resumed, save + more)
    if is_repeatable:
        places = [rank for rank in range(workers) if not torch.equal(resumed.own[rank], whole.own[rank])]
        _require(
            torch.equal(resumed.shared[0], whole.shared[0]) and not places,
            strategy,
            f"forgets something: a training of {steps} steps was saved after {save}, and one that resumed from there "
            f"ended differently (workers' own models that differ: "
            f"{places}). Everything that a worker remembers from step to step belongs into private_state, but for the "
            "model and optimizer that all share",
        )
    else:
        _require(
            resumed.losses[0] < whole.saved.losses[0],
            strategy,
            f"does not resume where it was: the loss was {whole.saved.losses[0]:.3g} when it was saved, and "
            f"{resumed.losses[0]:.3g} after {more} steps more from there",
        )


def a_loss_that_is_not_a_number_does_no_harm(strategy: AnyStrategy, workers: int) -> None:
    """One worker's gradients are NaN in one step, in the very first one too: nothing of it may stay."""
    for momentum in (0.0, 0.5):
        poison = _Poison(_problem(momentum=momentum), {(workers - 1, 0), (0, 3)})
        trial = train_on_threads(strategy, workers, steps=8, problem=poison.problem, before_step=poison.before_step)
        _require_finite(strategy, trial, "a step in which one worker's loss was NaN")
        _require_agreement(strategy, trial, 8)


def a_worker_alone_trains(strategy: AnyStrategy, workers: int) -> None:
    """Unless it takes two to compete."""
    del workers
    if strategy.method.min_workers > 1:
        return
    problem = _problem()
    trial = train_on_threads(strategy, 1, steps=40, problem=problem)
    _require_agreement(strategy, trial, 40)
    before, after = _loss_at_first(problem), trial.losses[0]
    _require(
        after < 0.9 * before,
        strategy,
        f"does not learn with a single worker: the loss was {before:.3g} and is {after:.3g} after 40 steps",
    )


CONTRACT: Final[tuple[Check, ...]] = (
    all_workers_share_one_model_and_it_learns,
    a_worker_without_samples_takes_part,
    a_request_to_stop_stops_all_workers_at_one_step,
    a_training_resumes_from_what_was_saved,
    a_loss_that_is_not_a_number_does_no_harm,
    a_worker_alone_trains,
)


class _Poison:
    """A problem whose loss is NaN for some (rank, step), once each."""

    def __init__(self, problem: Problem, places: Collection[tuple[int, int]]) -> None:
        self._places, self._loss = places, problem.loss
        self._of_thread = threading.local()
        self.problem = replace(problem, loss=self._poisoned)

    def before_step(self, rank: int, step: int) -> None:
        self._of_thread.is_due = (rank, step) in self._places

    def _poisoned(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = self._loss(output, target)
        if getattr(self._of_thread, "is_due", False):
            self._of_thread.is_due = False  # scores and evaluations after it are sound
            loss = loss * math.nan
        return loss


def _problem(*, samples: int = 64, momentum: float = 0.0) -> Problem:
    problem = linear_problem(samples=samples, momentum=momentum)
    # Near enough for those who go slowly: Downpour's Adagrad moves a weight by a hundredth in a step, at most.
    return replace(problem, targets=0.3 * problem.targets)


def _loss_at_first(problem: Problem) -> float:
    with torch.no_grad():
        return float(problem.loss(problem.make_model()(problem.inputs), problem.targets))


def _written_and_read(strategy: AnyStrategy, state: dict[str, Any] | None) -> dict[str, Any] | None:
    if state is None:
        return None
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    try:
        read: dict[str, Any] = torch.load(file, weights_only=True)
    except Exception as error:
        raise AssertionError(
            f"The strategy {strategy} has a private_state that cannot be read back safely from a file: {error} Put "
            "only tensors, numbers, texts, and lists and dicts of these into it."
        ) from error
    return read


def _require_agreement(strategy: AnyStrategy, trial: Trial, steps: int | None = None) -> None:
    """All workers are at the same step, with the same model."""
    _require(
        len(set(trial.steps)) == 1 and steps in (None, trial.steps[0]),
        strategy,
        f"does not keep its workers' steps together: {trial.steps} were done"
        + (f", not {steps} by each" if steps is not None else ""),
    )
    different = [rank for rank, shared in enumerate(trial.shared) if not torch.equal(shared, trial.shared[0])]
    _require(
        not different,
        strategy,
        "does not give all workers the same model: inside shared() the parameters of workers "
        f"{different} have other bits than those of worker 0",
    )


def _require_finite(strategy: AnyStrategy, trial: Trial, after: str) -> None:
    spoilt = [rank for rank, (a, b) in enumerate(zip(trial.shared, trial.own, strict=True)) if not _is_finite(a, b)]
    _require(
        not spoilt, strategy, f"lets NaN into the parameters: those of workers {spoilt} are not finite after {after}"
    )


def _is_finite(*tensors: torch.Tensor) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def _require(is_so: bool, strategy: AnyStrategy, otherwise: str) -> None:
    if not is_so:
        raise AssertionError(f"The strategy {strategy} {otherwise}.")
