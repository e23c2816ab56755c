"""The updates of a script: combining gradients over all workers, and applying them.

Here: `LoopUpdates`, what a prepared optimizer calls (`optimizer.py`): `step` with or without a closure, gradients that
are combined before it because the script clips them, and accumulation. Not here: batches and membership
(`training.py`), the weights of accumulated gradients (`gradient_weights.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from syncline.data.order import Share
from syncline.errors import ConfigError, PeerFailed
from syncline.workers.own_loop.checks import Checks
from syncline.workers.own_loop.gradient_weights import GradientWeights
from syncline.workers.own_loop.lateness import is_aborted
from syncline.workers.own_loop.loss_kind import is_sum
from syncline.workers.own_loop.optimizer import PreparedOptimizer, plain_optimizer

if TYPE_CHECKING:
    from syncline.workers.own_loop.training import LoopTraining
    from syncline.workers.session import Session

_CHECKED_LOSSES = 8
"""Of how many calls of `backward` it is checked whether the loss is a sum."""


class LoopUpdates:
    """What happens in the optimizers of a script."""

    def __init__(self, training: LoopTraining) -> None:
        self._training, self._session, self._round = training, training.session, training.round
        self.weights = GradientWeights()
        self.accumulated: int | None = None
        """Over how many batches `worker.accumulate` accumulates gradients, inside its context."""
        self._is_accumulating = False
        self._combined: set[int] = set()  # the optimizers whose gradients are combined, until they update
        self._checks = Checks(training.session, training.round)
        self._losses_to_check = _CHECKED_LOSSES

    def weight_of(self, share: Share | None) -> float:
        """This worker's part of the samples of a batch."""
        if share is None or self._training.order is None:
            return 1 / self._session.plan.size
        samples = self._training.progress.samples_of_members(share)
        return len(share.indices) / samples if samples else 0.0

    @property
    def _weight(self) -> float:
        """This worker's part of the samples of the batch that came into use last."""
        return self.weight_of(self._training.in_use.share)

    def begin_batch(self) -> None:
        """The script computes with another batch: its gradients are not combined with any."""
        self._combined.clear()

    def set_loss(self, kind: str) -> None:
        """Whether the script's loss is the mean over the samples of a batch or their sum."""
        if kind not in ("mean", "sum"):
            raise ConfigError(f"prepare(loss={kind!r}): the loss is a 'mean' or a 'sum'.", code="loss-kind")
        self.weights.is_summed = kind == "sum"
        self._losses_to_check = 0

    def check_loss(self, loss: torch.Tensor) -> None:
        """Refuse a loss that is a sum over samples, unless the script has said what it is; in its first steps."""
        self._round.taken.has_backward = True
        if not self._losses_to_check or not self._round.is_open or self._session.plan.size == 1:
            return
        if self._training.order is None:  # all workers compute the same
            return
        self._losses_to_check -= 1
        if is_sum(loss):
            raise ConfigError(
                "The loss is a sum over the samples of a batch. Each worker has a part of the batch, so their sums "
                "must be added up, and not averaged as means are. Say so with worker.prepare(..., loss='sum'), or use "
                "a mean (reduction='mean'). If the loss is a mean after all, say loss='mean'.",
                code="summed-loss",
            )

    def step(self, number: int, closure: Callable[[], Any] | None) -> Any:
        """Combine the gradients of all workers and update; what the optimizer or the closure returns."""
        self._training.enter()
        _check_has_batch(self._training)
        self._training.begin_without_data()
        optimizer = self._training.parts.optimizers[number]
        is_divided = self._session.layout.divides_updates and self._session.plan.size > 1
        if closure is not None and self._training.is_lock_step and not is_divided:
            return self._step_with_closure(optimizer, number, closure)
        result = None
        if closure is not None:
            _check_simple_closure(self._session, optimizer)
            with torch.enable_grad():
                result = closure()
            if self._training.is_lock_step:
                # The optimizer treats each number by itself, so it would evaluate the closure once, and first.
                result = self._round.exchange_values(functools.partial(self._mean_loss, result), self._training.recover)
        self._is_accumulating = self.is_incomplete
        if self._is_accumulating:
            return result
        if self._training.is_lock_step:
            self.combine(number)
            self._update(number)
        else:
            self._exchange_and_update(number)
        return result

    def combine(self, number: int) -> None:
        """Replace the gradients of optimizer `number` by their weighted sum over all workers, unless they are that."""
        stepper, round = self._training.stepper, self._round
        assert stepper is not None
        self._training.in_use.end_batch()
        if number in self._combined or round.is_update_done or round.is_dropped:
            return
        self._session.recorder.mark("compute")
        while number not in round.combined:
            try:
                self._sum(number, self.accumulated, round.taken.used)
                break
            except PeerFailed:
                was_alone = self._session.plan.size == 1
                self._training.recover()
                if was_alone:
                    break  # its own gradients are the sum
            if round.is_update_done or round.is_dropped:
                return
        else:
            _assign(stepper.replicas[number].gradients.parameters, round.combined[number])
        self._combined.add(number)

    def _sum(self, number: int, accumulated: int | None, batches: int) -> None:
        """Sum the gradients of optimizer `number` over all workers, including parameters that the script has added.

        That all workers have added them shows in an exchange of the gradients laid out so far, whose sum is discarded.
        """
        stepper, groups, is_alone = self._training.stepper, self._training.parts.groups, self._session.plan.size == 1
        assert stepper is not None
        while True:
            gradients, is_outdated = stepper.replicas[number].gradients, groups.is_outdated(number)
            if not (is_alone and is_outdated):
                weight = self.weights.of_gradients(self._weight, accumulated, batches)
                if is_alone:
                    weight = _scaled(gradients.parameters, weight)
                optimizer = self._training.parts.optimizers[number]
                mark = self._checks.mark(number, self._training.share, gradients, optimizer, is_due=is_outdated)
                is_same = stepper.combine(number, weight, mark=mark)
                kinds = gradients.kinds if is_same else self._checks.settle(number, gradients)
            if not is_outdated:
                return gradients.release_local(kinds, self._session.collective)
            gradients.restore_local()
            groups.lay_out(number, functools.partial(stepper.lay_out, number))

    def combine_early(self, number: int) -> None:
        """Combine before the update, because the script changes the gradients in between: others may need the sum."""
        self._training.enter()
        if not self._training.is_lock_step:
            _check_has_gradients(self._session)
            return  # each worker trains by itself: its own gradients are what it updates with
        is_done = number in self._combined
        self.combine(number)
        if not is_done and number in self._combined and self._session.plan.size > 1:
            parameters = self._training.stepper.replicas[number].gradients.parameters if self._training.stepper else []
            self._round.combined[number] = [None if p.grad is None else p.grad.detach().clone() for p in parameters]

    def _update(self, number: int, update: Callable[[], Any] | None = None) -> None:
        """Update with the combined gradients; the batches taken count."""
        stepper, round = self._training.stepper, self._round
        assert stepper is not None
        while not round.is_update_done and not round.is_dropped and not self._begin_update(number):
            self._training.recover()
        if round.is_update_done:
            return self._pass_update(number)
        if round.is_dropped:
            return None
        stepper.complete(number, self._weight, round.taken.in_use, update=update)
        round.taken.commit()
        round.count_update(number)
        self._combined.discard(number)
        self.weights.begin()
        self._session.recorder.waits = True  # until its next batch, the loop may do anything: that is no sign of a hang
        try:
            stepper.exchanges[number].end_update()
        except PeerFailed:  # in an update that counts
            self._training.recover(is_between_rounds=True)
        return None

    def _begin_update(self, number: int) -> bool:
        """Whether the update counts. If another worker has failed, all begin it again with the same sum."""
        stepper, round = self._training.stepper, self._round
        assert stepper is not None
        try:
            stepper.exchanges[number].begin_update()
        except PeerFailed:
            # Others may have been interrupted before they had the sum.
            parameters = stepper.replicas[number].gradients.parameters
            round.combined.setdefault(number, [p.grad for p in parameters])
            return False
        return True

    def _pass_update(self, number: int) -> None:
        """The other workers have made this update, and this worker's state has it."""
        assert self._training.stepper is not None
        self._training.stepper.pass_over(self._round.taken.commit(), is_used=not self._round.is_repeated)
        self._round.pass_update(number)
        self._combined.discard(number)
        self.weights.begin()

    def _exchange_and_update(self, number: int) -> None:
        """A step of a strategy in which each worker updates its own replica, or servers do."""
        stepper, round = self._training.stepper, self._round
        assert stepper is not None
        self._training.in_use.end_batch()
        if round.is_dropped:
            return
        self._session.recorder.mark("compute")
        weight = self._weight
        gradients = stepper.replicas[number].gradients
        try:
            stepper.combine(number, weight)
            gradients.release_local(gradients.kinds)
            stepper.complete(number, weight, round.taken.commit())
            round.count_update(number)
        except PeerFailed:
            self._training.recover()  # which says whether this step counts, or its samples are assigned again
        self._session.recorder.waits = True

    def _step_with_closure(self, optimizer: PreparedOptimizer, number: int, closure: Callable[[], Any]) -> Any:
        """A step that evaluates the loss itself, perhaps several times: each evaluation is over all workers."""
        stepper, round = self._training.stepper, self._round
        assert stepper is not None
        results: list[Any] = []
        while not round.is_update_done and not round.is_dropped:
            saved, place = self._training.parts.copy_state(number), round.place

            def evaluate() -> Any:
                with torch.enable_grad():
                    loss = closure()
                self._combine_evaluation(number)
                return self._mean_loss(loss)

            try:
                self._update(number, lambda: results.append(plain_optimizer(optimizer).step(evaluate)))
                return results[-1] if results else None
            except PeerFailed:
                round.rewind(place)
                self._training.parts.load_state(number, saved)
                self._training.recover()
        self._update(number)
        return None

    def _combine_evaluation(self, number: int) -> None:
        """Combine the gradients of one of several evaluations; a failure repeats the whole step."""
        assert self._training.stepper is not None
        self._training.in_use.end_batch()
        try:
            self._sum(number, None, 1)
        except PeerFailed:
            if self._session.plan.size > 1 or is_aborted(self._session):
                raise
            # This worker is alone: its own gradients are the sum. It enters the new View after the step.
        self.weights.begin()
        self.weights.take(self._weight, list)

    def _mean_loss(self, loss: Any) -> Any:
        """The loss over all workers: they must all decide alike."""
        if not isinstance(loss, (torch.Tensor, float, int)) or self._session.plan.size == 1:
            return loss
        weight = 1.0 if self.weights.is_summed else self._weight
        own = float(loss.detach()) if isinstance(loss, torch.Tensor) else float(loss)
        value = torch.tensor([own], dtype=torch.float64)
        self._session.collective.all_reduce_(value, weight if math.isfinite(own) else 1.0)
        return loss.detach().new_tensor(float(value)) if isinstance(loss, torch.Tensor) else float(value)

    @property
    def is_incomplete(self) -> bool:
        """Whether `worker.accumulate` has more batches to accumulate before the update."""
        share = self._training.in_use.share
        if self.accumulated is None or share is None:
            return False
        return self._round.taken.used < self.accumulated and share.after.cursor != 0

    def zero_grad(self, number: int) -> bool:
        """The script sets the gradients of an optimizer to zero. False if they must stay: it accumulates them."""
        if self._is_accumulating:
            return False
        self._training.in_use.zero_grad()
        self._combined.discard(number)
        self._round.combined.pop(number, None)
        self.weights.forget()
        self._training.parts.groups.zero_grad(number)
        return True

    def add_group(self, number: int, group: dict[str, Any], add: Callable[[dict[str, Any]], None]) -> None:
        """Parameters are added to optimizer `number`. At its next update all workers lay out its gradients anew."""
        training = self._training
        if not training.is_entered:
            return add(group)
        assert training.stepper is not None
        if not training.is_lock_step or training.stepper.exchange.private_state() is not None:
            raise ConfigError(
                f"Parameters were added to an optimizer after the training had begun, but {self._session.plan.strategy}"
                " keeps values of its own for every parameter from the start. Use --strategy allreduce, or add them "
                "before the loop, frozen (requires_grad_(False)), and unfreeze them later.",
                code="late-parameters",
                strategy=str(self._session.plan.strategy),
            )
        training.parts.groups.add(number, group, add)
        if number in self._combined and any(p.grad is not None for p in group["params"]):
            raise ConfigError(
                "Parameters with gradients were added to an optimizer between clipping or unscaling its gradients and "
                "its step(). Add them before that, or after step().",
                code="parameters-after-clipping",
            )
        return None


def _check_has_batch(training: LoopTraining) -> None:
    if training.order is None or training.share is not None:
        return
    raise ConfigError(
        "optimizer.step() was called, but no batch was taken from the prepared loader. Iterate over the loader "
        "that prepare returned.",
        code="step-without-batch",
    )


def _check_has_gradients(session: Session) -> None:
    """Refuse to clip or unscale where only servers have the gradient of all workers."""
    if session.strategy.method.is_lock_step:
        raise ConfigError(
            f"The script changes gradients before optimizer.step(), but with {session.plan.strategy} only "
            "the servers have those of all workers. Clip with worker.prepare(..., clip_norm=...), or use "
            "--strategy allreduce.",
            code="gradients-on-servers",
        )


def _check_simple_closure(session: Session, optimizer: torch.optim.Optimizer) -> None:
    strategy = str(session.plan.strategy)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            f"LBFGS evaluates the loss several times in a step, each time over all workers, but {strategy} lets "
            "each worker train by itself. Use --strategy allreduce.",
            code="closure-strategy",
            strategy=strategy,
        )


def _scaled(parameters: Iterable[torch.nn.Parameter], weight: float) -> float:
    """Multiply the gradients of a worker that is alone by `weight`; others do so when they sum. The weight then."""
    if weight != 1.0:
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], weight)
    return 1.0


def _assign(parameters: Iterable[torch.nn.Parameter], gradients: Iterable[torch.Tensor | None]) -> None:
    for p, grad in zip(parameters, gradients, strict=False):  # some may have been laid out since
        p.grad = grad
