"""Rounds: whatever fails in between, every worker's script sees what it would have seen without failures.

The rounds are the real ones; the exchanges, the failures and the order of things are simulated, one exchange at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.data.assignment import Position
from syncline.data.order import Share
from syncline.workers.rounds import LoopRound

WORKERS = 3


class NoState:
    """A training state without schedulers and buffers."""

    def progress(self) -> None:
        return None

    def begin_round(self) -> None: ...


class Gathered:
    """A collective that has gathered what the members will pass: each passes it twice, first to be collected."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.is_complete = False

    def all_gather(self, payload: bytes) -> list[bytes]:
        if not self.is_complete:
            self.parts.append(payload)
            return []
        return self.parts


@dataclass
class Script:
    """One worker: its round, where it is in the program, and what it has seen so far."""

    round: LoopRound = field(default_factory=LoopRound)
    at: int = 0
    seen: list[Any] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)

    def begin(self, step: int) -> None:
        """Compute with the batch of this step: the one that was taken ahead, or one taken now."""
        state: Any = NoState()
        if self.round.taken.ahead:
            self.round.begin(step, state, may_fail=True, carries=True)
        else:
            self.round.begin(step, state, may_fail=True)
            self.round.take(_share(step))
        self.round.taken.use()
        self.at, self.seen = 0, []

    def take_ahead(self) -> None:
        self.round.take(_share(self.round.start + 1))
        self.at += 1

    def is_repeating(self, kind: str) -> bool:
        """Whether the others have done what the script comes to next."""
        return self.round.is_update_done if kind == "update" else self.round.recorded is not None

    def complete(self, kind: str, result: int) -> None:
        """The exchange that the script is in is complete, or was before."""
        if kind == "value":
            self.seen.append(self.round.exchange_values(lambda: result, _never))
        else:
            self.committed += [share.position.step for share in self.round.taken.commit()]
            if self.round.is_update_done:
                self.round.pass_update(0)
            else:
                self.parameters.append(result)
                self.round.count_update(0)
        self.at += 1


def _share(step: int) -> Share:
    return Share(Position(step=step), np.empty(0, np.int64), 1, (), Position(step=step + 1))


def _never() -> None:
    raise AssertionError("nothing was interrupted")


Fault = tuple[int, int, int]
"""At which exchange; which worker fails; which of the others complete it all the same, as bits."""


def simulate(program: list[str], steps: int, faults: list[Fault], *, replaces: bool) -> list[Script]:
    """Run the program in every step. With `replaces`, failed workers are replaced at once; otherwise they stay away."""
    scripts = {n: Script() for n in range(WORKERS)}
    waiting = list(faults)
    for step in range(steps):
        for script in scripts.values():
            script.begin(step)
        while any(script.at < len(program) for script in scripts.values()):
            for script in scripts.values():  # what is on record, and taking a batch, needs no other worker
                while script.at < len(program):
                    if program[script.at] == "take":
                        script.take_ahead()
                    elif script.is_repeating(program[script.at]):
                        script.complete(program[script.at], -1)
                    else:
                        break
            places = {script.at for script in scripts.values()}
            if places == {len(program)}:
                break
            assert len(places) == 1, "all scripts are at the same exchange"
            place = places.pop()
            kind, result = program[place], step * len(program) + place
            if waiting and waiting[0][0] <= result and len(scripts) > 1:
                _, failed, completed = waiting.pop(0)
                fail(scripts, sorted(scripts)[failed % len(scripts)], kind, result, completed, replaces=replaces)
                continue  # the exchange is repeated by those who have not completed it
            for script in scripts.values():
                script.complete(kind, result)
    return list(scripts.values())


def fail(scripts: dict[int, Script], failed: int, kind: str, result: int, completed: int, *, replaces: bool) -> None:
    """A worker fails in an exchange that some of the others complete; all survivors enter the next view."""
    del scripts[failed]
    survivors = list(scripts.values())
    for number, script in enumerate(survivors):
        if completed >> number & 1:
            script.complete(kind, result)
    source = max(survivors, key=lambda s: (s.round.updates, s.at))
    for script in survivors:  # those that missed an update load the parameters
        if script.round.updates < source.round.updates:
            script.parameters = list(source.parameters)
            script.round.adopt_update(source.round.updates)
    _exchange(lambda gathered: [s.round.catch_up(gathered) for s in survivors])
    if replaces:
        newcomer = Script(parameters=list(source.parameters), committed=list(range(source.round.start)))
        newcomer.round.replay(source.round.state())
        newcomer.begin(source.round.start)
        scripts[failed] = newcomer


def _exchange(call: Callable[[Any], object]) -> None:
    gathered = Gathered()
    call(gathered)
    gathered.is_complete = True
    call(gathered)


def _with_a_batch_ahead(program: list[str], at: int) -> list[str]:
    """The script takes its next batch at this place, before its first update."""
    at = min(at, program.index("update"))
    return [*program[:at], "take", *program[at:]]


PROGRAMS = st.lists(st.sampled_from(["value", "value", "update"]), min_size=1, max_size=6).map(lambda p: [*p, "update"])
FAULTS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, WORKERS - 1), st.integers(0, 3)), max_size=5, unique_by=lambda f: f[0]
).map(sorted)


@settings(max_examples=300)
@given(
    program=PROGRAMS,
    ahead=st.none() | st.integers(0, 6),
    steps=st.integers(1, 4),
    faults=FAULTS,
    replaces=st.booleans(),
)
def test_every_script_sees_what_it_would_have_seen_without_failures(program, ahead, steps, faults, replaces):
    program = program if ahead is None else _with_a_batch_ahead(program, ahead)
    whole = simulate(program, steps, [], replaces=False)
    found = simulate(program, steps, list(faults), replaces=replaces)
    assert len(found) == WORKERS if replaces else 1 <= len(found) <= WORKERS
    for script in found:
        assert script.seen == whole[0].seen
        assert script.parameters == whole[0].parameters
        assert script.round.updates == whole[0].round.updates
        assert script.round.steps == steps
        assert script.committed == list(range(steps))
