"""Which of the batches that a script has taken it computes with.

Here: `BatchesInUse`. A batch comes into use when the script takes it, or, if the script may still have to compute the
gradients of the one before, when a prepared model computes next. Not here: taking a batch from the run
(`training.py`), and how the batches are recorded (`workers/taken.py`).

If an update was made meanwhile, the batches taken ahead begin a round of their own when they come into use: a
replacement that repeats this round takes them first, as the script does that it runs from the top.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from syncline.compute.batch_norm import has_global_batch_norm, take_part_without_samples
from syncline.data.order import Share
from syncline.errors import PeerFailed
from syncline.workers.own_loop.script import LoopRestarted

if TYPE_CHECKING:
    from syncline.workers.own_loop.training import LoopTraining


class BatchesInUse:
    """The batches of a script's round, from taking them to their gradients."""

    def __init__(self, training: LoopTraining) -> None:
        self._training, self._round = training, training.round
        self.share: Share | None = None
        """The batch that came into use last."""
        self.on_use: Callable[[Share], None] = lambda _: None
        """Called with each batch that comes into use."""
        self._without_samples = ExitStack()

    def take(self, share: Share, *, is_ahead: bool) -> None:
        """The script takes a batch; `is_ahead`: it may still have to compute the gradients of the one before."""
        self._round.take(share)
        if not is_ahead:
            self._use()

    def compute(self) -> None:
        """A model is about to compute with gradients, with all batches that were taken."""
        round, taken = self._round, self._round.taken
        if not round.is_open:
            return
        if taken.ahead:
            if round.has_updated and not taken.used:
                self._begin_carried_round()
            elif not self._training.parts.has_gradients():
                self.skip(taken.used)  # a forward pass without a backward pass
            self._use()
        taken.is_computed = True

    def _use(self) -> None:
        training, taken = self._training, self._round.taken
        weights, parameters = training.updates.weights, training.parts.parameters if training.is_lock_step else list
        training.updates.begin_batch()
        for share in taken.ahead:
            self.end_batch()
            self.share = share
            weights.take(training.updates.weight_of(share), parameters)
            if len(share.indices) == 0 and has_global_batch_norm(training.parts.model):
                self._without_samples.enter_context(take_part_without_samples(training.parts.model))
            self.on_use(share)
        taken.use()

    def end_batch(self) -> None:
        """The gradients of the batch that came into use last are complete."""
        self._without_samples.close()
        self._training.updates.weights.end_batch()

    def _begin_carried_round(self) -> None:
        """The step is over, and the script computes with the batches that it took in the middle of it."""
        training, stepper = self._training, self._training.stepper
        assert stepper is not None, "the script has taken a batch"
        while training.progress.is_divided_anew:
            # The script holds a batch that is divided among other workers now. It can only take it again.
            try:
                training.session.collective.barrier()  # all scripts start again, or none
            except PeerFailed:
                training.recover(is_between_rounds=True)
                continue
            training.progress.end_inheritance(opens_view=False)
            training.close()
            raise LoopRestarted(0)
        training.end_step(carries=True)
        share = self._round.taken.ahead[0]
        may_fail = stepper.can_be_interrupted
        self._round.begin(share.position.step, training.state, may_fail=may_fail, carries=True)
        training.begin_round()
        while True:
            try:
                training.tuner.before_round()
                return stepper.begin_step(share, is_carried=True)
            except PeerFailed:
                training.recover(is_between_rounds=True)

    def skip(self, count: int) -> None:
        """The script has made no update with the first `count` batches that it took."""
        round, stepper = self._round, self._training.stepper
        skipped = round.taken.drop(count)
        if stepper is not None and not round.is_dropped and not round.is_repeated:
            stepper.skip(skipped)

    def skip_unused(self) -> None:
        """The script asks for other batches: skip those that it has taken, unless their gradients may come yet."""
        taken = self._round.taken
        is_over = taken.has_backward or not taken.is_computed
        if self._round.is_open and is_over and not self._training.parts.has_gradients():
            self.skip(len(taken))

    def zero_grad(self) -> None:
        """The script sets gradients to zero: those of batches before the one that it computes with are thrown away."""
        taken = self._round.taken
        if not self._training.is_entered or not self._round.is_open:
            return
        if taken.ahead and taken.has_backward:
            self.skip(taken.used)
        elif not taken.ahead and taken.used > 1:
            self.skip(taken.used - 1)
