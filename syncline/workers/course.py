"""One worker's way through a run: where it is in the data, what it has used, and how it goes on with the others when
some of them are gone or new.

Here: `Course`, which every loop has, the built-in one and a user's own. At the start of each View the members find out
from where to go on (`rejoin.py` has the rule) and bring each other up to date. Not here: the moments of a step
(`job.py`, `own_loop.py`), and what is trained (`trained.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import astuple, replace
from typing import Any

from syncline.data.ledger import Closed, Opened, Tally, Used
from syncline.data.order import Position, SampleOrder, Share
from syncline.data.stint import Range, Stint, total
from syncline.strategies.exchange import Exchange, Replica
from syncline.telemetry.events import WentOn
from syncline.testing import faults
from syncline.workers.rejoin import Agreement, Standing, agree, decode, encode
from syncline.workers.runtime import Runtime, packed, unpacked
from syncline.workers.trained import Trained

__all__ = ["Course"]

_TELL_EVERY_S = 1.0
"""How often a worker says which samples it has used."""


class Course:
    """A worker's way through the samples of `order`, up to epoch `epochs` (None: the loop decides)."""

    def __init__(self, runtime: Runtime, order: SampleOrder, *, epochs: int | None) -> None:
        self.runtime, self.order, self._epochs = runtime, order, epochs
        self.position = self.start = Position()
        """Where this worker is, and where the present View began."""
        self.stint = self._stint_from(self.position, runtime.plan.size)
        self.replica: Replica
        self.exchange: Exchange
        self._trained: Trained | None = None  # what the exchange of the last View works on
        self._earlier: Exchange | None = None  # that exchange
        self._view = self._view_of_tally = 0
        self._tally, self._told_at = Tally(), time.monotonic()
        self._went_on: Callable[[int], WentOn] | None = None
        self._faults = faults.scripted()

    @property
    def can_be_interrupted(self) -> bool:
        """Whether a step may come to nothing because somebody is lost in the middle of it."""
        return self.runtime.plan.size > 1 or self.runtime.plan.servers > 0

    def enter_view(
        self,
        trained: Trained,
        *,
        clip_norm: float | None = None,
        score: Callable[[], tuple[float, float]] | None = None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """Find out together with the other members from where to go on, and get ready for it.

        `settle` is called when `trained` is up to date, before its gradients are laid out.
        `trained` may be other objects than in the last View: a user's script that was begun again has made new ones.
        """
        self.tell_used()
        runtime, order = self.runtime, self.order
        runtime.recorder.waits = True
        before = self.position.step
        standings = [decode(data) for data in runtime.collective.gather(encode(self._standing()))]
        agreed = agree(standings, count=order.count, batch=order.batch, epochs=self._epochs)
        if self._trained is not None:
            self._trained.forget_step()
        private = self._load_saved(trained) if agreed is None else self._share_state(agreed, trained)
        self.position = self.start = self.stint.start
        settle()
        self.replica, self.exchange = runtime.replicate(
            trained.model,
            trained.optimizer,
            private,
            step=self.start.step,
            steps_per_epoch=order.steps_per_epoch,
            clip_norm=clip_norm,
            score=score,
        )
        self._earlier, self._trained = self.exchange, trained
        self._view_of_tally = runtime.view
        runtime.note(
            Opened(
                view=runtime.view,
                members=runtime.members,
                start=astuple(self.start),
                count=order.count,
                batch=order.batch,
                epochs=self._epochs,
                makeup=list(self.stint.makeup),
                went_back=agreed is None,
            )
        )
        self._went_on = self._account_of_view(before if agreed is None else 0) if runtime.view > 1 else None

    def look_up(self) -> None:
        """Leave the loop if the workers are others from now on; suffer a fault if one is scripted for this step."""
        self.runtime.look_up()
        if self._faults is not None and self.runtime.run_dir is not None:
            self._faults.at_step(self.runtime.number, self.position.step, self.runtime.run_dir.path)

    def advance(self, share: Share) -> None:
        """A step is done."""
        self.position = share.after
        self._tally.add(share.ranges, share.after.step)
        if time.monotonic() - self._told_at > _TELL_EVERY_S:
            self.tell_used()

    def tell_how_it_went_on(self) -> None:
        """After the first step in a View, to the user; one worker tells it for all."""
        if self._went_on is not None and self.runtime.rank == 0:
            self.runtime.recorder.emit(self._went_on(self.position.step))
        self._went_on = None

    def left(self) -> Stint:
        """What the present workers still have to do."""
        size = self.runtime.plan.size
        return self.stint.next(size, dict.fromkeys(range(size), self.position.step))

    def leave_out_until(self, position: Position) -> None:
        """The loop has left an epoch before its end: go on here. All workers do it after the same step."""
        left = self.left()
        self.position, self.stint = position, replace(left, start=position)

    def tell_used(self) -> None:
        """Write into the ledger which samples this worker has used since the last time."""
        self._told_at = time.monotonic()
        if runs := self._tally.take():
            self.runtime.note(Used(self._view_of_tally, self.runtime.number, self._tally.steps, runs))

    def close_ledger(self, *, stopped_early: bool) -> None:
        """All is saved."""
        self.tell_used()
        if self.runtime.rank == 0:
            self.runtime.note(Closed(astuple(self.position), list(self.left().makeup), stopped_early))

    def save(self, *, is_last: bool = False) -> None:
        """Make a checkpoint, in the background unless it is the last one. All workers call this together."""
        assert self._trained is not None, "a View was entered"
        self.runtime.recorder.waits = True
        self.tell_used()
        progress = {**self._trained.progress_state(), "makeup": [list(r) for r in self.left().makeup]}
        self.runtime.save(self.position, self.replica, self.exchange, progress, is_last=is_last)

    def _standing(self) -> Standing:
        """What this worker brings along from the last View."""
        exchange = self._earlier
        if exchange is None:
            return Standing(self.runtime.number)
        way, effects = exchange.recovery, exchange.effects() if exchange.recovery == "merge" else None
        if way == "merge" and effects is None:
            way = "saved"
        # A worker that was stopped after its own update, while exchanging, has done that step.
        step = max(self.position.step, (effects or {}).get(self.replica.collective.rank, 0))
        if step > self.position.step and self._trained is not None:
            self._trained.end_step()
        return Standing.of(self.runtime.number, self._view, step, self.stint, way, effects or {})

    def _share_state(self, agreed: Agreement, trained: Trained) -> dict[str, Any] | None:
        """Go on in place. What this worker holds for itself from now on."""
        runtime, exchange = self.runtime, self._earlier
        is_holder, is_needy = runtime.rank in agreed.holders, runtime.rank in agreed.needy
        if agreed.merges:
            with closing(runtime.collective.split(int(is_holder))) as survivors:
                if is_holder and exchange is not None:
                    exchange.merge(survivors)
        given = self._give_state(agreed)
        # Not before: if that had failed, this worker would stand where it stood.
        self.stint, self._view = agreed.stint, runtime.view
        taken = unpacked(given) if given else None
        if is_needy:
            assert taken is not None, "there is always somebody who gives"
            trained.load(taken)
            private: dict[str, Any] | None = taken["private"]
            return private
        if trained is not self._trained and self._trained is not None:
            trained.load(self._trained.whole_state())
        if taken is not None:
            trained.load_progress(taken)  # as far in the schedule as the furthest is
        return exchange.carried_state() if exchange is not None else None

    def _give_state(self, agreed: Agreement) -> bytes:
        """The giver's state: whole if somebody needs it, otherwise only how far the furthest is."""
        runtime, exchange, trained = self.runtime, self._earlier, self._trained
        if not agreed.needy and not agreed.merges:
            return b""
        state = b""
        if runtime.rank == agreed.giver and exchange is not None and trained is not None:
            if agreed.needy:
                state = packed({**trained.whole_state(), "private": exchange.newcomers_state()})
            else:
                state = packed(trained.progress_state())
        given = runtime.collective.gather(state)[agreed.giver]
        runtime.bytes_of_state = len(given) if agreed.needy else 0
        return given

    def _load_saved(self, trained: Trained) -> dict[str, Any] | None:
        """Go on from a checkpoint, or from the beginning. What this worker held for itself then."""
        runtime = self.runtime
        position, state = runtime.load_newest()
        makeup: tuple[Range, ...] = ()
        if state is None:
            trained.start_over()
        else:
            trained.load(state)
            makeup = tuple((e, low, high) for e, low, high in state["makeup"])
        self.stint = self._stint_from(position, runtime.plan.size, makeup)
        self._view = runtime.view
        private: list[dict[str, Any]] = state["private"] if state is not None else []
        return private[runtime.rank] if runtime.rank < len(private) else None

    def _stint_from(self, position: Position, size: int, makeup: tuple[Range, ...] = ()) -> Stint:
        return Stint(position, size, self.order.count, self.order.batch, self._epochs, makeup)

    def _account_of_view(self, step_before: int) -> Callable[[int], WentOn]:
        """What will be told when the first step in this View is done."""
        runtime, start, makeup = self.runtime, self.start.step, self.stint.makeup
        return lambda step: WentOn(
            view=runtime.view,
            members=runtime.members,
            step=step,
            redone=max(0, step_before - start),
            made_up=total(makeup),
            seconds=time.monotonic() - runtime.noticed_at,
            bytes_of_state=runtime.bytes_of_state,
        )
