"""Rounds: what a worker in a user's own loop has done since it took the batch of the step in progress.

Here: `LoopRound`, one worker's record of it, and how the members of a new View compare their records. Not here: which
state they continue from (`recovery.py`), and the objects that the loop uses (`own_loop/`).

A round begins when the loop takes a batch after an update, and lasts until it does so again; a batch that was taken
before the update begins a round when the loop computes with it (`taken.py`).

    take a batch, or several (gradient accumulation)
    compute; exchange values: batch statistics, sums and means that the script asks for
    combine the gradients and update, once or more (several optimizers)

Everything that workers exchange in a round is numbered by its order, which is the same on all workers. So when a worker
fails, the survivors stay where they are in their scripts: each repeats only the exchange that was interrupted. One of
them may have completed it already; it has the result, and the others are at most one exchange behind. A replacement
runs the round from its start: what the others have exchanged in it comes from their record, until the replacement has
caught up with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from syncline.checkpoint.schema import TrainingProgress
from syncline.comms.collective import Collective
from syncline.comms.serialize import dump_state, load_state
from syncline.data.order import Share
from syncline.errors import PeerFailed
from syncline.workers.taken import TakenBatches
from syncline.workers.train_state import TrainState


class ScriptMustRestart(Exception):
    """The members go back to a checkpoint: scripts cannot continue where they are."""


class _Tail(NamedTuple):
    """The end of a round's record."""

    start: int
    """The step that identifies the round."""
    values: int
    """How many values were exchanged."""
    last: Any
    """The last of them."""
    updates: int = -1
    """How many updates this worker's state has, if gradients of the next ones are combined."""
    gradients: dict[int, list[Any]] | None = None
    """Those gradients, by the number of their optimizer."""


class LoopRound:
    """One worker's record of its round; a worker has one of these, which begins again and again."""

    def __init__(self) -> None:
        self.start = 0
        """The step whose batch was taken first: it identifies the round."""
        self.taken = TakenBatches()
        """The batches that no update has committed yet."""
        self.updates = 0
        """How many updates this worker's state has, over the whole run."""
        self.steps = 0
        """How many rounds had an update, over the whole run: what the user calls steps."""
        self.has_ended = False
        """Whether the script has ended."""
        self.is_dropped = False
        """Whether the gradients of the batches taken must not be applied: their samples were assigned again."""
        self.combined: dict[int, list[Any]] = {}
        """Gradients that were summed over all workers before their update, by the number of their optimizer; copies."""
        self._done = 0  # how many of the updates were in this round
        self._reached = 0  # how many updates the script has come to in this round
        self._values: list[Any] = []
        self._read = 0  # how many of the values the script has come to
        self._is_replayed = False  # a replacement has not yet taken the first batch of the round that it repeats
        self._is_uncounted = False  # a replacement has not yet come to the update by which the round is a step
        self.is_repeated = False
        """Whether this worker repeats the round from its start: it has replaced one that took part in it."""
        self._previous = _Tail(-1, 0, None)
        self._progress: TrainingProgress | None = None

    @property
    def is_open(self) -> bool:
        """Whether batches were taken that no update has committed."""
        return len(self.taken) > 0 and not self.is_dropped

    def begin(self, start: int, state: TrainState, *, may_fail: bool, carries: bool = False) -> None:
        """The script asks for the batch of step `start`: a new round begins, even if it does not get that batch yet.

        Or it `carries` that batch over: it computes with it now, and has taken it before its last update.
        """
        if not self._is_replayed:
            taken = self.taken
            self._begin(start)
            self.taken = taken if carries else self.taken
            state.begin_round()
        self._progress = state.progress() if may_fail else None

    def take(self, share: Share) -> None:
        """The script takes a batch."""
        self._is_replayed = False
        self.taken.take(share)

    @property
    def has_updated(self) -> bool:
        """Whether the script has come to an update in this round."""
        return self._reached > 0

    def _begin(self, start: int) -> None:
        if self._values:
            self._previous = _Tail(self.start, len(self._values), self._values[-1])
        self.start, self.taken, self.combined, self.is_dropped = start, TakenBatches(), {}, False
        self._values, self._done, self._reached, self._read = [], 0, 0, 0
        self.is_repeated = self._is_uncounted = False

    @property
    def recorded(self) -> Any:
        """The value that the script comes to next, if the other workers have exchanged it already; otherwise None."""
        return self._values[self._read] if self._read < len(self._values) else None

    def exchange_values(self, perform: Callable[[], Any], recover: Callable[[], None]) -> Any:
        """The result of `perform`, an exchange with the other workers; after a failure it is repeated.

        `recover` returns when this worker is a member of a new View. If the result is on record then, because another
        worker had completed the exchange, that is it.
        """
        while self._read == len(self._values):
            try:
                result = perform()
            except PeerFailed:
                recover()
                continue
            self._values.append(result)
        result = self._values[self._read]
        self._read += 1
        return result

    @property
    def is_update_done(self) -> bool:
        """Whether this worker's state has the update that the script has come to: others have made it."""
        return self._reached < self._done

    def pass_update(self, optimizer: int) -> None:
        """The script has come to an update of this optimizer that is done."""
        self.combined.pop(optimizer, None)
        self._reached += 1
        self.steps += self._is_uncounted
        self._is_uncounted = False

    def count_update(self, optimizer: int) -> None:
        """This worker has made the update of this optimizer that the script has come to."""
        self._add_update()
        self.pass_update(optimizer)

    def _add_update(self) -> None:
        self.updates += 1
        self.steps += self._done == 0
        self._done += 1

    def adopt_update(self, updates: int) -> None:
        """Others have made the update that this worker was in, and it has loaded their state."""
        assert updates == self.updates + 1, f"{updates} updates instead of {self.updates + 1}"
        self._add_update()

    @property
    def place(self) -> int:
        """Where the script is among the values of the round, for `rewind`."""
        return self._read

    def rewind(self, place: int) -> None:
        """The script exchanges the values from `place` on again: all workers repeat an update from its start."""
        self._read = place
        del self._values[place:]

    def drop(self, start: int) -> None:
        """The members continue at `start` with samples assigned anew: what was taken is nothing any more."""
        self._begin(start)
        self.is_dropped, self._is_replayed = True, False

    def state(self) -> dict[str, Any]:
        """What a replacement needs to repeat the round."""
        return {
            "start": self.start,
            "updates": self.updates,
            "steps": self.steps + self._is_uncounted,
            "done": self._done,
            "values": self._values,
            "combined": self.combined,
        }

    def replay(self, state: dict[str, Any]) -> None:
        """Repeat a round that the other workers are in."""
        self._begin(state["start"])
        self.updates, self._done, self._values = state["updates"], state["done"], list(state["values"])
        self._is_uncounted = state["done"] > 0
        self.combined, self.steps = dict(state["combined"]), state["steps"] - self._is_uncounted
        self._is_replayed = self.is_repeated = True

    def progress_at_start(self, state: TrainState) -> TrainingProgress:
        """What the schedulers and the script's own values were when the round began."""
        return self._progress if self._progress is not None else state.progress()

    def catch_up(self, collective: Collective) -> None:
        """Take the result of the last exchange from a worker that has completed it, if this one has not."""
        last = self._values[-1] if self._values else None
        updates = self.updates if self.combined else -1
        mine = _Tail(self.start, len(self._values), last, updates, self.combined)
        parts = collective.all_gather(dump_state([list(mine), list(self._previous)]))
        tails = [_Tail(*tail) for part in parts for tail in load_state(part)]
        further = [tail for tail in tails if (tail.start, tail.values) == (self.start, len(self._values) + 1)]
        if further and self._read == len(self._values):
            self._values.append(further[0].last)
        for tail in tails:
            if tail.updates == self.updates:
                self.combined = {**(tail.gradients or {}), **self.combined}
