"""From events, injections and sample audits to a scorecard."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.lab.chaos.report import as_dict, as_lines, describe, write
from syncline.lab.chaos.score import (
    Injection,
    Recovery,
    Reference,
    RunScore,
    SampleAudit,
    Scorecard,
    recoveries,
    steps_redone,
    times_of,
    unexpected_failures,
)
from syncline.lab.machine import BenchMachine
from syncline.telemetry.events import Event, Progress, Recovered, Summary, WorkerFailure, WorkerReady


def injection(time: float, number: int = 1, *, what: str = "kill worker 1", is_deadly: bool = True) -> Injection:
    return Injection(what=what, time=time, worker_id=number, pid=1000 + number, step=40, is_deadly=is_deadly)


def lost(time: float, number: int = 1, step: int = 40) -> WorkerFailure:
    return WorkerFailure(
        time=time, worker_id=number, name=f"worker {number}", cause="was killed", step=step, workers=2, is_replaced=True
    )


def continued(time: float, *members: int, step: int = 41, view: int = 2, redone: int = 0) -> Recovered:
    return Recovered(time=time, view=view, members=list(members), step=step, repeated_steps=redone)


def ready(time: float, number: int, pid: int) -> WorkerReady:
    return WorkerReady(time=time, worker_id=number, pid=pid, parameters=1, collective="Solo")


def progress(time: float, step: int) -> Progress:
    return Progress(time=time, worker_id=0, epoch=0, step=step, samples=1, seconds=1, cursor=0)


def summary(time: float) -> Summary:
    return Summary(time=time, metrics={}, samples_per_s=1, seconds=1, steps=1, epochs=1, workers=3, run_dir="")


def results_of(
    events: list[Event], *injections: Injection, outcome: str = "finished", limit_s: float = 30
) -> list[Recovery]:
    return recoveries(events, injections, outcome=outcome, workers=3, limit_s=limit_s)  # type: ignore[arg-type]


def test_recovery_ends_with_the_survivors_first_step_and_restoration_with_the_first_step_of_all():
    events = [lost(10.02), continued(10.05, 0, 2), ready(10.2, 1, 77), continued(10.25, 0, 1, 2, view=3), summary(20)]
    (found,) = results_of(events, injection(10))
    assert found.result == "recovered"
    assert (found.detected_s, found.recovered_s, found.restored_s) == pytest.approx((0.02, 0.05, 0.25))
    assert found.redone == 0


def test_an_earlier_view_with_the_failed_worker_is_no_recovery():
    events = [lost(10.02), continued(10.03, 0, 1, 2), continued(10.07, 0, 2, view=3), summary(20)]
    (found,) = results_of(events, injection(10))
    assert found.recovered_s == pytest.approx(0.07)


def test_a_replacement_with_the_same_number_is_another_process():
    events = [lost(10.02), ready(10.4, 1, 77), continued(10.5, 0, 1, 2), summary(20)]
    (found,) = results_of(events, injection(10))
    assert found.result == "recovered", "as with --on-worker-failure replace-only"
    assert found.recovered_s == found.restored_s == pytest.approx(0.5)


def test_two_failures_may_share_one_recovery():
    events = [lost(10.02, 1), lost(10.04, 2), continued(10.1, 0), summary(20)]
    found = results_of(events, injection(10, 1), injection(10.03, 2))
    assert [r.result for r in found] == ["recovered", "recovered"]
    assert [r.recovered_s for r in found] == pytest.approx([0.1, 0.07])


def test_a_failed_server_is_recovered_by_the_next_view():
    events = [lost(10.02, 3), continued(10.4, 0, 1, 2), summary(20)]
    (found,) = results_of(events, injection(10, 3))
    assert found.recovered_s == pytest.approx(0.4)


def test_redone_steps_are_counted_even_if_a_replacement_reports_the_view():
    (found,) = results_of([progress(9, 40), lost(10.02), continued(10.1, 0, 2, step=21), summary(20)], injection(10))
    assert found.redone == 20
    events = [progress(9, 400), continued(9.5, 0, 1, step=1), progress(9.8, 7), lost(10.02), continued(10.1, 0, step=1)]
    (found,) = results_of(events, injection(10))
    assert found.redone == 7, "not the steps of the earlier recovery"


@pytest.mark.parametrize(
    ("events", "outcome", "is_deadly", "result"),
    [
        ([summary(10.5)], "finished", True, "too late"),
        ([lost(10.1), summary(10.5)], "finished", True, "too late"),
        ([lost(10.1), summary(99)], "finished", True, "hang"),
        ([lost(10.1), continued(60, 0, 2), summary(99)], "finished", True, "hang"),
        ([summary(99)], "finished", False, "tolerated"),
        ([lost(10.1)], "hang", True, "hang"),
        ([], "hang", False, "hang"),
        ([lost(10.1)], "failed", True, "fatal"),
        ([], "interrupted", True, "unresolved"),
        ([], "finished", True, "too late"),
        ([lost(9.0), continued(9.1, 0, 2)], "interrupted", True, "unresolved"),
    ],
)
def test_every_injection_has_a_result(events, outcome, is_deadly, result):
    (found,) = results_of(events, injection(10, is_deadly=is_deadly), outcome=outcome)
    assert found.result == result


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60))
def test_times_are_ordered(seconds):
    found = times_of([*seconds, None])
    assert found is not None
    assert min(seconds) <= found.p50 <= found.p95 <= found.most == max(seconds)
    assert found.count == len(seconds)


def test_there_are_no_quantiles_without_times():
    assert times_of([None, None]) is None


def test_steps_redone_counts_failures_and_joins_in_order_of_time():
    events = [
        progress(1, 100), continued(2, 0, step=1), progress(3, 50), continued(4, 0, 1, step=1),
        continued(6, 0, step=81), progress(5.5, 80), progress(7, 90),
    ]  # fmt: skip
    assert steps_redone(events) == 100 + 50


def test_a_cut_link_explains_one_failure_of_each_worker_behind_it():
    cut = replace(injection(10, 1), also=(3,))
    assert unexpected_failures([lost(12, 1), lost(12.1, 3)], [cut]) == []
    again = lost(20, 3)
    assert unexpected_failures([lost(12, 3), again], [cut]) == [again]


def test_a_failure_without_an_injection_is_unexpected():
    events = [lost(9, 1), lost(10.02, 1), lost(10.5, 0), lost(10.6, 1), lost(12.1, 1)]
    found = unexpected_failures(events, [injection(10, 1), injection(12, 1), injection(11, 0)])
    assert [(e.time, e.worker_id) for e in found] == [(9, 1), (10.5, 0), (10.6, 1)]


# The scorecard


def score(strategy: str = "allreduce", outcome: str = "finished", **changes: object) -> RunScore:
    recovery = Recovery(injection=injection(10), result="recovered", detected_s=0.02, recovered_s=0.05, restored_s=0.3)
    settings: dict[str, object] = {
        "seed": 7, "seconds": 9.0, "recoveries": (recovery,), "metrics": {"test/accuracy": 0.98},
        "samples": SampleAudit(lost=0, repeated=0, is_clean=True), **changes,
    }  # fmt: skip
    return RunScore(strategy=strategy, outcome=outcome, **settings)  # type: ignore[arg-type]


def card(*scores: RunScore, **changes: object) -> Scorecard:
    strategies = tuple(dict.fromkeys(s.strategy for s in scores))
    found = Scorecard("mlp on digits, 3 workers", "syncline chaos ...", 7, 2, strategies, list(scores))
    found.references.append(Reference(strategy="allreduce", seed=7, metrics={"test/accuracy": 0.975}, seconds=4))
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def text_of(found: Scorecard) -> str:
    return "\n".join(as_lines(found, BenchMachine.here()))


def test_a_clean_scorecard_says_so_and_fits_80_columns():
    found = card(score(), score("iterative-reduce", redone=1234))
    table = text_of(found).splitlines()[2:6]
    assert table[1].split() == ["allreduce", "1", "0", "50", "ms", "0", "0", "0", "98.00%", "97.50%"]
    assert table[2].split() == ["iterative-reduce", "1", "0", "50", "ms", "1,234", "0", "0", "98.00%", "-"]
    assert table[3].split() == ["all", "2", "0", "50", "ms", "1,234", "0", "0", "-", "-"]
    assert all(len(line) <= 80 for line in table)
    assert "0 hangs, 0 samples lost, 0 repeated" in text_of(found)
    assert "p50 50 ms, p95 50 ms, max 50 ms (2 times)" in text_of(found)
    assert ": syncline chaos ..." in text_of(found)
    assert not found.problems


def test_several_reference_runs_show_the_effect_of_the_seed():
    found = card(score(), score(metrics={"test/accuracy": 0.97}))
    assert "by seed" not in text_of(found), "one run shows no spread"
    found.references.append(Reference(strategy="allreduce", seed=8, metrics={"test/accuracy": 0.99}, seconds=4))
    assert re.search(r"allreduce.*97\.00% to 98\.00% with faults, 97\.50% to 99\.00%", text_of(found))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samples": SampleAudit(lost=3, repeated=0, is_clean=False, lines=("epoch 1: 3 lost",))}, "3 samples lost"),
        ({"samples": SampleAudit(lost=0, repeated=2, is_clean=False)}, "2 samples"),
        ({"samples": SampleAudit(lost=0, repeated=0, is_clean=False)}, "1 sample audit failed"),
        ({"outcome": "failed", "reason": "ZeroDivisionError: no", "samples": None}, "1 of 1 runs failed"),
        ({"outcome": "hang", "reason": "No progress for 60 s.", "samples": None}, "1 hang"),
        ({"missed_faults": ("stop worker 1 at step 50",)}, "1 scripted fault never happened"),
        ({"unexpected": ("worker 0 raised KeyError at step 9",)}, "1 worker failed without an injected fault"),
        ({"recoveries": (Recovery(injection=injection(1), result="hang"),)}, "1 hang"),
    ],
)
def test_a_broken_guarantee_is_named(changes, words):
    found = card(score(**changes))
    assert any(words in problem for problem in found.problems)
    assert "FAILED: " in text_of(found)
    if changes.get("reason"):
        assert changes["reason"].rstrip(".") in text_of(found)


def test_without_a_ledger_nothing_is_claimed_about_samples():
    found = card(score(samples=None))
    assert "no sample audit" in text_of(found)
    assert "-" in text_of(found).splitlines()[3].split()
    assert not found.problems


def test_an_interrupted_scorecard_says_what_is_missing():
    found = card(score(outcome="interrupted", reason="Stopped after step 9."), is_interrupted=True)
    assert "1 fault short: 0 hangs" in text_of(found)
    assert "No run was started" not in text_of(found)
    assert "2 faults short." in text_of(card(is_interrupted=True))


def test_of_many_faults_only_those_that_went_wrong_are_listed():
    many = score(
        recoveries=score().recoveries * 20 + (Recovery(injection=injection(5), result="fatal"),), outcome="failed"
    )
    listed = [line for line in text_of(card(many)).splitlines() if line.startswith("  ")]
    assert listed == ["  kill worker 1 at step 40: the run failed"]


def test_a_line_shows_the_fault_and_its_result():
    stopped = injection(10, what="stop worker 1 at step 50")
    slow = Recovery(injection=stopped, result="recovered", detected_s=1.6, recovered_s=1.7, redone=12)
    assert (
        describe(slow)
        == "stop worker 1 at step 50: survivors continued after 1.7 s, detected after 1.6 s, 12 steps redone"
    )
    assert describe(score().recoveries[0]) == "kill worker 1 at step 40: survivors continued after 50 ms"


def test_the_json_has_every_figure_and_is_written_beside_the_text(tmp_path):
    found = card(score(), score("ssp", outcome="hang", reason="silence"))
    write(found, BenchMachine.here(), tmp_path / "score.txt")
    data = json.loads((tmp_path / "score.json").read_text())
    assert data == json.loads(json.dumps(as_dict(found, BenchMachine.here()))) | {"machine": data["machine"]}
    assert data["problems"] == ["1 hang"]
    assert data["total"]["recovery"]["p95"] == pytest.approx(0.05)
    assert data["runs"][0]["recoveries"][0]["injection"]["worker_id"] == 1
    assert (tmp_path / "score.txt").read_text().startswith("mlp on digits, 3 workers: 2 faults in 2 runs, seed 7\n")
