"""Failures, recoveries and stragglers as sentences: the facts in each, and nothing out of order."""

from __future__ import annotations

import pytest

from syncline.observe.incidents import FailureLog, StragglerLog
from syncline.telemetry.events import Recovered, WorkerFailure, WorkerSlow


def failure(cause: str, detail: str = "", *, at: float = 10.0, is_replaced: bool = True) -> WorkerFailure:
    return WorkerFailure(
        time=at, worker_id=1, name="worker 1", cause=cause, step=8, workers=3, is_replaced=is_replaced, detail=detail
    )


def recovered(members: list[int], *, at: float, seconds: float = 0.02, **facts: int) -> Recovered:
    return Recovered(time=at, view=2, members=members, step=9, seconds=seconds, **facts)


def slow(*, is_slow: bool, at: float, work_s: float = 0.041) -> WorkerSlow:
    return WorkerSlow(
        worker_id=2, step=40, is_slow=is_slow, work_s=work_s, median_s=0.008, slowest_phase="data", time=at
    )


def traceback(last: str) -> str:
    return f'Traceback (most recent call last):\n  File "my.py", line 3, in forward\n{last}\n'


@pytest.mark.parametrize(
    ("cause", "last_lines", "shown"),
    [
        ("raised ValueError", "ValueError: too cold.\nA note.", "worker 1 raised ValueError at step 8: too cold;"),
        ("raised Cold", "my.weather.Cold: it is: cold", "worker 1 raised Cold at step 8: it is: cold;"),
        ("raised MemoryError", "MemoryError", "worker 1 raised MemoryError at step 8;"),
    ],
)
def test_an_exception_is_shown_with_its_message_but_its_class_only_once(cause, last_lines, shown):
    assert FailureLog(2).on_failure(failure(cause, traceback(last_lines))).startswith(shown)


def test_a_very_long_message_is_cut() -> None:
    line = FailureLog(2).on_failure(failure("raised ValueError", traceback(f"ValueError: {'x' * 9_000}")))
    assert f"{'x' * 200}..." in line
    assert "x" * 201 not in line


def test_a_killed_worker_is_reported_after_its_last_known_step() -> None:
    assert "was killed by SIGSEGV after step 8" in FailureLog(2).on_failure(failure("was killed by SIGSEGV"))


def test_the_line_says_whether_a_replacement_comes() -> None:
    assert "replacement" in FailureLog(4).on_failure(failure("was killed"))
    assert "3 workers" in FailureLog(4).on_failure(failure("was killed", is_replaced=False))


def test_recovery_time_and_rejoining_worker_are_reported() -> None:
    log = FailureLog(2)
    log.on_failure(failure("was killed by SIGKILL"))
    (line,) = log.on_recovery(recovered([0], at=10.02))
    assert all(fact in line for fact in ("1 worker ", "20 ms", "step 9"))
    (line,) = log.on_recovery(recovered([0, 1], at=10.3, state_bytes=411_000))
    assert all(fact in line for fact in ("worker 1 rejoined", "0.3 s", "411 kB"))


def test_repeated_work_is_reported() -> None:
    for facts, shown in (({"repeated_steps": 20}, "20 steps"), ({"repeated_samples": 16}, "16 samples")):
        log = FailureLog(2)
        log.on_failure(failure("was killed"))
        assert shown in log.on_recovery(recovered([0], at=10.1, **facts))[0]


def test_a_recovery_from_before_a_failure_that_arrives_after_it_is_not_taken_for_its_recovery() -> None:
    log = FailureLog(2)
    log.on_failure(failure("was killed by SIGKILL", at=10.0))
    log.on_recovery(recovered([0], at=10.1))
    log.on_failure(failure("was killed by SIGKILL", at=10.5))
    assert log.on_recovery(recovered([0, 1], at=10.4)) == []
    assert "0.1 s" in log.on_recovery(recovered([0], at=10.6))[0]
    assert "0.4 s" in log.on_recovery(recovered([0, 1], at=10.9))[0]


def test_a_new_view_with_the_same_members_means_a_broken_connection() -> None:
    (line,) = FailureLog(2).on_recovery(recovered([0, 1], at=10.0, seconds=0.025))
    assert all(fact in line for fact in ("connection", "2 workers", "25 ms"))


def test_workers_that_join_or_leave_are_named_by_their_id() -> None:
    lines = FailureLog(3).on_recovery(recovered([0, 2, 3], at=10.0))
    assert [line.split(" at ")[0] for line in lines] == ["worker 3 joined", "worker 1 left"]


def test_a_straggler_is_reported_with_both_times_and_the_phase() -> None:
    log = StragglerLog()
    line = log.on_slow(slow(is_slow=True, at=100.0))
    assert all(fact in line for fact in ("worker 2", "41 ms", "8 ms", "data"))
    assert "worker 2" in log.on_slow(slow(is_slow=False, at=112.0))
    (line,) = log.summary(200.0)
    assert all(fact in line for fact in ("worker 2", "12 s", "5.1 times"))


def test_a_straggler_that_fails_was_slow_until_then() -> None:
    log = StragglerLog()
    log.on_slow(slow(is_slow=True, at=10.0))
    log.on_end(2, 15.0)
    assert "5.0 s" in log.summary(100.0)[0]
