"""Losses and recoveries as sentences: the cause in each, and nothing out of order."""

from __future__ import annotations

from syncline.telemetry.events import WentOn, WorkerLost
from syncline.view.losses import Losses


def lost(cause: str, detail: str = "", *, at: float = 10.0, rank: int = 1) -> WorkerLost:
    return WorkerLost(
        time=at, rank=rank, name=f"worker {rank}", cause=cause, step=8, workers=1, is_replaced=True, detail=detail
    )


def went_on(members: list[int], *, at: float, seconds: float = 0.02) -> WentOn:
    return WentOn(time=at, view=2, members=members, step=9, seconds=seconds)


def traceback(last: str) -> str:
    return f'Traceback (most recent call last):\n  File "my.py", line 3, in forward\n{last}\n'


def test_an_exception_is_told_with_what_it_said() -> None:
    told = Losses(2).on_lost(lost("raised ValueError", traceback("ValueError: too cold.\nA note.")))
    assert told == "worker 1 raised ValueError at step 8: too cold; another takes its place"
    told = Losses(2).on_lost(lost("raised Cold", traceback("my.weather.Cold: it is: cold")))
    assert told == "worker 1 raised Cold at step 8: it is: cold; another takes its place"


def test_an_exception_that_said_nothing_is_told_by_its_name() -> None:
    told = Losses(2).on_lost(lost("raised MemoryError", traceback("MemoryError")))
    assert told == "worker 1 raised MemoryError at step 8; another takes its place"


def test_an_exception_that_said_too_much_is_cut() -> None:
    told = Losses(2).on_lost(lost("raised ValueError", traceback(f"ValueError: {'x' * 9_000}")))
    assert told == f"worker 1 raised ValueError at step 8: {'x' * 200}...; another takes its place"


def test_of_one_that_said_nothing_only_the_last_known_step_is_told() -> None:
    told = Losses(2).on_lost(lost("was killed by SIGSEGV"))
    assert told == "worker 1 was killed by SIGSEGV after step 8; another takes its place"


def test_how_the_others_went_on_and_who_is_back() -> None:
    losses = Losses(2)
    losses.on_lost(lost("was killed by SIGKILL"))
    assert losses.on_went_on(went_on([0], at=10.02)) == ["1 worker went on after 20 ms, step 9 redone"]
    assert losses.on_went_on(went_on([0, 1], at=10.3)) == ["worker 1 is back after 0.3 s"]


def test_news_of_before_a_loss_that_come_after_it_are_not_taken_for_a_recovery() -> None:
    losses = Losses(2)
    losses.on_lost(lost("was killed by SIGKILL", at=10.0))
    losses.on_went_on(went_on([0], at=10.1))
    losses.on_lost(lost("was killed by SIGKILL", at=10.5))
    assert losses.on_went_on(went_on([0, 1], at=10.4)) == []
    assert losses.on_went_on(went_on([0], at=10.6)) == ["1 worker went on after 0.1 s, step 9 redone"]
    assert losses.on_went_on(went_on([0, 1], at=10.9)) == ["worker 1 is back after 0.4 s"]


def test_workers_who_meet_again_without_a_loss_had_lost_their_connection() -> None:
    told = Losses(2).on_went_on(went_on([0, 1], at=10.0, seconds=0.025))
    assert told == ["a connection between workers broke; 2 workers went on after 25 ms, step 9 redone"]
