"""What the report knows of a run, whatever has become of it."""

from __future__ import annotations

import pytest
from report_runs import START, nobody, progress, started, whole_run, write_run

from syncline.errors import ConfigError
from syncline.observe.report.load import find_run, load, short_names
from syncline.observe.report.phases import step_times
from syncline.observe.report.record import record_of
from syncline.telemetry.events import FatalFailure, MetricsLogged, Recovered, RunEnded, WorkerFailure


def test_curves_are_those_of_one_worker_and_of_every_evaluation():
    record = record_of("a", whole_run())
    assert [p.step for p in record.curves["train/loss"]] == list(range(1, 31))
    assert [(p.step, p.epoch) for p in record.curves["test/accuracy"]] == [(10, 1.0), (20, 2.0), (30, 3.0)]
    assert record.curves["train/loss"][14].epoch == 1.5
    assert record.curves["train/loss"][0].time_s == 2.5


def test_each_worker_has_its_windows_and_what_a_step_takes_it():
    record = record_of("a", whole_run())
    assert {rank: len(worker.windows) for rank, worker in record.workers.items()} == {0: 30, 1: 30}
    first, second = step_times([record])
    assert (first.name, second.name) == ("worker 0", "worker 1")
    assert list(first.seconds) == ["data", "forward", "backward", "exchange", "waiting", "update"]
    assert first.total == pytest.approx(0.25)


def test_of_several_runs_the_mean_over_workers_is_shown():
    a, b = record_of("a", whole_run()), record_of("b", whole_run(workers=4))
    assert [(row.name, round(row.total, 6)) for row in step_times([a, b])] == [("a", 0.25), ("b", 0.25)]


def test_a_resumed_run_forgets_what_it_does_again_and_its_clock_stands_still_meanwhile():
    before = [e for e in whole_run(ends=False) if e.time < START + 14]
    later = START + 10_000
    again = [started(later, after_step=20), *(progress(s, at=later + s - 20) for s in range(21, 31))]
    record = record_of("a", [*before, *again])
    assert [p.step for p in record.curves["train/loss"]] == list(range(1, 31))
    assert record.seconds == pytest.approx(13.5 + 10, abs=1)
    assert [m.text for m in record.marks if m.kind == "start"] == ["resumed after step 20"]
    assert record.workers[0].steps == 23 + 10  # three of them twice


@pytest.mark.parametrize(
    ("events", "is_live", "status"),
    [
        ([], False, "empty"),
        ([], True, "starting"),
        ([started()], True, "starting"),
        (whole_run(5, ends=False), True, "running"),
        (whole_run(5, ends=False), False, "crashed"),
        (whole_run(), False, "finished"),
        ([*whole_run(5, ends=False), RunEnded(reason="stopped", message="saved")], False, "stopped"),
        ([*whole_run(5, ends=False), RunEnded(reason="killed", message="at once")], False, "killed"),
        ([*whole_run(5, ends=False), RunEnded(reason="failed", message="why")], False, "failed"),
    ],
)
def test_the_status_is_what_the_last_words_say(events, is_live, status):
    record = record_of("a", events)
    record.is_live = is_live
    assert record.status == status


def test_failures_and_recoveries_are_marked_with_their_time():
    at = START + 6.0
    failed = WorkerFailure(
        time=at, worker_id=1, name="worker 1", cause="was killed", step=8, workers=1, is_replaced=True
    )
    recovered = Recovered(time=at + 0.5, view=2, members=[0], step=8)
    record = record_of("a", [*whole_run(8, ends=False), failed, recovered])
    assert [(m.kind, m.time_s) for m in record.marks] == [("failure", 6.0), ("change", 6.5)]
    assert "worker 1 was killed" in record.marks[0].text


def test_numbers_of_an_own_loop_become_curves_without_epochs():
    events = [
        started(kind="own-loop", train_samples=0),
        MetricsLogged(time=START + 3, worker_id=0, step=4, metrics={"loss": 0.5}),
    ]
    record = record_of("a", events)
    assert record.curves == {"loss": [(4, None, 3.0, 0.5)]}
    assert record.metrics == {"loss": 0.5}


def test_a_failure_without_a_message_is_no_error():
    record = record_of("a", [started(), FatalFailure(worker_id=0, message=""), RunEnded(reason="failed", message="")])
    assert record.status == "failed"


def test_a_last_line_that_is_cut_off_is_left_out(tmp_path):
    run = write_run(tmp_path / "run", whole_run(5, ends=False))
    with (run / "events.jsonl").open("ab") as file:
        file.write(b'{"event":"progress","time":1')
    (record,) = load([run], nobody)
    assert len(record.curves["train/loss"]) == 5


def test_what_is_no_run_is_answered_with_the_nearest_names(tmp_path):
    write_run(tmp_path / "lenet-digits-1", [])
    with pytest.raises(ConfigError, match=r"Did you mean .*lenet-digits-1"):
        find_run(tmp_path / "lenet-digit-1")
    with pytest.raises(ConfigError, match=r"no plan.json.*lenet-digits-1"):
        find_run(tmp_path)


def test_run_names_include_as_much_of_the_path_as_makes_them_distinct(tmp_path):
    assert short_names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert short_names([tmp_path / "x" / "run", tmp_path / "y" / "run"]) == ["x/run", "y/run"]
    same = short_names([tmp_path / "run", tmp_path / "run"])
    assert len(set(same)) == 2
