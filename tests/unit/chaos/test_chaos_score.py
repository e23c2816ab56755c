"""From events, blows and the account of samples to a score."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.bench.machine import BenchMachine
from syncline.chaos.report import as_dict, as_lines, in_words, write
from syncline.chaos.score import (
    Blow,
    Card,
    Recovery,
    Reference,
    RunScore,
    Samples,
    recoveries,
    steps_redone,
    stray_losses,
    times_of,
)
from syncline.telemetry.events import Event, Progress, Summary, WentOn, WorkerLost, WorkerReady


def blow(time: float, number: int = 1, *, what: str = "kill worker 1", is_deadly: bool = True) -> Blow:
    return Blow(what=what, time=time, number=number, pid=1000 + number, step=40, is_deadly=is_deadly)


def lost(time: float, number: int = 1, step: int = 40) -> WorkerLost:
    return WorkerLost(
        time=time, rank=number, name=f"worker {number}", cause="was killed", step=step, workers=2, is_replaced=True
    )


def went_on(time: float, *members: int, step: int = 41, view: int = 2, redone: int = 0) -> WentOn:
    return WentOn(time=time, view=view, members=list(members), step=step, redone=redone)


def ready(time: float, number: int, pid: int) -> WorkerReady:
    return WorkerReady(time=time, rank=number, pid=pid, parameters=1, collective="Solo")


def progress(time: float, step: int) -> Progress:
    return Progress(time=time, rank=0, epoch=0, step=step, samples=1, seconds=1, cursor=0)


def summary(time: float) -> Summary:
    return Summary(time=time, metrics={}, samples_per_s=1, seconds=1, steps=1, epochs=1, workers=3, run_dir="")


def what_came(events: list[Event], *blows: Blow, outcome: str = "finished", limit_s: float = 30) -> list[Recovery]:
    return recoveries(events, blows, outcome=outcome, workers=3, limit_s=limit_s)  # type: ignore[arg-type]


def test_a_recovery_is_told_by_the_first_step_without_the_lost_and_by_the_first_with_all():
    events = [lost(10.02), went_on(10.05, 0, 2), ready(10.2, 1, 77), went_on(10.25, 0, 1, 2, view=3), summary(20)]
    (found,) = what_came(events, blow(10))
    assert found.came == "recovered"
    assert (found.noticed_s, found.went_on_s, found.whole_s) == pytest.approx((0.02, 0.05, 0.25))
    assert found.redone == 0


def test_an_earlier_view_with_the_lost_one_in_it_is_no_recovery():
    events = [lost(10.02), went_on(10.03, 0, 1, 2), went_on(10.07, 0, 2, view=3), summary(20)]
    (found,) = what_came(events, blow(10))
    assert found.went_on_s == pytest.approx(0.07)


def test_a_replacement_with_the_same_number_is_another_process():
    events = [lost(10.02), ready(10.4, 1, 77), went_on(10.5, 0, 1, 2), summary(20)]
    (found,) = what_came(events, blow(10))
    assert found.came == "recovered", "as with --on-loss replace-only"
    assert found.went_on_s == found.whole_s == pytest.approx(0.5)


def test_two_losses_may_have_one_recovery():
    events = [lost(10.02, 1), lost(10.04, 2), went_on(10.1, 0), summary(20)]
    found = what_came(events, blow(10, 1), blow(10.03, 2))
    assert [r.came for r in found] == ["recovered", "recovered"]
    assert [r.went_on_s for r in found] == pytest.approx([0.1, 0.07])


def test_the_loss_of_a_server_is_made_good_by_the_next_view():
    events = [lost(10.02, 3), went_on(10.4, 0, 1, 2), summary(20)]
    (found,) = what_came(events, blow(10, 3))
    assert found.went_on_s == pytest.approx(0.4)


def test_steps_that_were_done_again_are_counted_even_if_who_tells_is_new():
    (found,) = what_came([progress(9, 40), lost(10.02), went_on(10.1, 0, 2, step=21), summary(20)], blow(10))
    assert found.redone == 20
    events = [progress(9, 400), went_on(9.5, 0, 1, step=1), progress(9.8, 7), lost(10.02), went_on(10.1, 0, step=1)]
    (found,) = what_came(events, blow(10))
    assert found.redone == 7, "not what it had gone back before"


@pytest.mark.parametrize(
    ("events", "outcome", "is_deadly", "came"),
    [
        ([summary(10.5)], "finished", True, "too late"),
        ([lost(10.1), summary(10.5)], "finished", True, "too late"),
        ([lost(10.1), summary(99)], "finished", True, "hang"),
        ([lost(10.1), went_on(60, 0, 2), summary(99)], "finished", True, "hang"),
        ([summary(99)], "finished", False, "borne"),
        ([lost(10.1)], "hang", True, "hang"),
        ([], "hang", False, "hang"),
        ([lost(10.1)], "failed", True, "fatal"),
        ([], "interrupted", True, "open"),
        ([], "finished", True, "too late"),
        ([lost(9.0), went_on(9.1, 0, 2)], "interrupted", True, "open"),
    ],
)
def test_what_came_of_a_blow_has_a_name(events, outcome, is_deadly, came):
    (found,) = what_came(events, blow(10, is_deadly=is_deadly), outcome=outcome)
    assert found.came == came


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60))
def test_times_are_ordered(seconds):
    found = times_of([*seconds, None])
    assert found is not None
    assert min(seconds) <= found.p50 <= found.p95 <= found.most == max(seconds)
    assert found.count == len(seconds)


def test_no_times_are_no_times():
    assert times_of([None, None]) is None


def test_steps_redone_counts_losses_and_joins_in_the_order_of_time():
    events = [
        progress(1, 100), went_on(2, 0, step=1), progress(3, 50), went_on(4, 0, 1, step=1),
        went_on(6, 0, step=81), progress(5.5, 80), progress(7, 90),
    ]  # fmt: skip
    assert steps_redone(events) == 100 + 50


def test_who_is_behind_a_link_that_was_cut_is_no_stray_but_only_once():
    cut = replace(blow(10, 1), also=(3,))
    assert stray_losses([lost(12, 1), lost(12.1, 3)], [cut]) == []
    again = lost(20, 3)
    assert stray_losses([lost(12, 3), again], [cut]) == [again]


def test_a_loss_that_nobody_caused_is_a_stray():
    events = [lost(9, 1), lost(10.02, 1), lost(10.5, 0), lost(10.6, 1), lost(12.1, 1)]
    found = stray_losses(events, [blow(10, 1), blow(12, 1), blow(11, 0)])
    assert [(e.time, e.rank) for e in found] == [(9, 1), (10.5, 0), (10.6, 1)]


# The card


def score(strategy: str = "allreduce", outcome: str = "finished", **changes: object) -> RunScore:
    recovery = Recovery(blow=blow(10), came="recovered", noticed_s=0.02, went_on_s=0.05, whole_s=0.3)
    settings: dict[str, object] = {
        "seed": 7, "seconds": 9.0, "recoveries": (recovery,), "metrics": {"test/accuracy": 0.98},
        "samples": Samples(lost=0, repeated=0, is_clean=True), **changes,
    }  # fmt: skip
    return RunScore(strategy=strategy, outcome=outcome, **settings)  # type: ignore[arg-type]


def card(*scores: RunScore, **changes: object) -> Card:
    strategies = tuple(dict.fromkeys(s.strategy for s in scores))
    found = Card("mlp on digits, 3 workers", "syncline chaos ...", 7, 2, strategies, list(scores))
    found.references.append(Reference(strategy="allreduce", seed=7, metrics={"test/accuracy": 0.975}, seconds=4))
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def text_of(found: Card) -> str:
    return "\n".join(as_lines(found, BenchMachine.here()))


def test_a_clean_card_says_so_and_fits_80_columns():
    found = card(score(), score("iterative-reduce", redone=1234))
    table = text_of(found).splitlines()[2:6]
    assert table[1].split() == ["allreduce", "1", "0", "50", "ms", "0", "0", "0", "98.00%", "97.50%"]
    assert table[2].split() == ["iterative-reduce", "1", "0", "50", "ms", "1,234", "0", "0", "98.00%", "-"]
    assert table[3].split() == ["all", "2", "0", "50", "ms", "1,234", "0", "0", "-", "-"]
    assert all(len(line) <= 80 for line in table)
    assert "0 hangs, 0 samples lost, 0 used twice, every run came to its end." in text_of(found)
    assert "p50 50 ms, p95 50 ms, longest 50 ms (2 times)" in text_of(found)
    assert "Again with: syncline chaos ..." in text_of(found)
    assert not found.problems


def test_several_unharmed_runs_show_what_the_seed_alone_does():
    found = card(score(), score(metrics={"test/accuracy": 0.97}))
    assert "by seed" not in text_of(found), "one run shows no spread"
    found.references.append(Reference(strategy="allreduce", seed=8, metrics={"test/accuracy": 0.99}, seconds=4))
    told = "allreduce, by seed: test/accuracy 97.00% to 98.00% with faults, 97.50% to 99.00% unharmed."
    assert told in text_of(found)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samples": Samples(lost=3, repeated=0, is_clean=False, words=("epoch 1: 3 lost",))}, "3 samples lost"),
        ({"samples": Samples(lost=0, repeated=2, is_clean=False)}, "2 samples used twice"),
        ({"samples": Samples(lost=0, repeated=0, is_clean=False)}, "account of samples of 1 runs is not clean"),
        ({"outcome": "failed", "why": "ZeroDivisionError: no", "samples": None}, "1 of 1 runs failed"),
        ({"outcome": "hang", "why": "It made no progress for 60 s.", "samples": None}, "1 hang"),
        ({"missed": ("stop worker 1 at step 50",)}, "1 scripted fault never came about"),
        ({"strays": ("worker 0 raised KeyError at step 9",)}, "1 lost to whom nothing was done"),
        ({"recoveries": (Recovery(blow=blow(1), came="hang"),)}, "1 hang"),
    ],
)
def test_a_broken_promise_is_named(changes, words):
    found = card(score(**changes))
    assert any(words in problem for problem in found.problems)
    assert "Not well: " in text_of(found)
    if changes.get("why"):
        assert changes["why"].rstrip(".") in text_of(found)


def test_without_an_account_of_samples_nothing_is_claimed_about_them():
    found = card(score(samples=None))
    assert "no account of samples was kept" in text_of(found)
    assert "-" in text_of(found).splitlines()[3].split()
    assert not found.problems


def test_a_card_that_was_interrupted_says_what_is_missing():
    found = card(score(outcome="interrupted", why="Stopped after step 9."), is_interrupted=True)
    assert "Stopped before the end, 1 fault short: 0 hangs" in text_of(found)
    assert "Nothing was tried" not in text_of(found)
    assert "Stopped before the end, 2 faults short." in text_of(card(is_interrupted=True))


def test_of_many_blows_only_those_that_did_not_end_well_are_told_one_by_one():
    many = score(recoveries=score().recoveries * 20 + (Recovery(blow=blow(5), came="fatal"),), outcome="failed")
    told = [line for line in text_of(card(many)).splitlines() if line.startswith("  ")]
    assert told == ["  kill worker 1 at step 40: the run failed"]


def test_a_line_tells_what_was_done_and_what_came_of_it():
    stopped = blow(10, what="stop worker 1 at step 50")
    slow = Recovery(blow=stopped, came="recovered", noticed_s=1.6, went_on_s=1.7, redone=12)
    assert (
        in_words(slow) == "stop worker 1 at step 50: the others went on after 1.7 s, noticed after 1.6 s, 12 steps back"
    )
    assert in_words(score().recoveries[0]) == "kill worker 1 at step 40: the others went on after 50 ms"


def test_the_json_has_every_figure_and_is_written_beside_the_text(tmp_path):
    found = card(score(), score("ssp", outcome="hang", why="silence"))
    write(found, BenchMachine.here(), tmp_path / "score.txt")
    data = json.loads((tmp_path / "score.json").read_text())
    assert data == json.loads(json.dumps(as_dict(found, BenchMachine.here()))) | {"machine": data["machine"]}
    assert data["problems"] == ["1 hang"]
    assert data["total"]["went_on"]["p95"] == pytest.approx(0.05)
    assert data["runs"][0]["recoveries"][0]["blow"]["number"] == 1
    assert (tmp_path / "score.txt").read_text().startswith("mlp on digits, 3 workers: 2 faults in 2 runs, seed 7\n")
