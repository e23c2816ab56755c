"""The fold over events: what is added up, smoothed, estimated, kept and forgotten."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_run import (
    START,
    evaluated,
    own_loop_plan,
    own_loop_training,
    plan,
    progress,
    ready,
    saved,
    started,
    summary,
    training,
)

from syncline.observe import formatting
from syncline.observe.history import History
from syncline.observe.state import RunState
from syncline.observe.terminal.highlights import loss_series, next_steps, result_series
from syncline.planning.plan import Plan
from syncline.telemetry.events import Event, FatalFailure, MetricsLogged, Progress, WarningMessage


def after(*events: Event) -> RunState:
    state = RunState()
    for event in events:
        state.apply(event)
    return state


def test_the_views_import_neither_torch_nor_numpy_and_plain_ones_not_rich() -> None:
    code = (
        "import sys, syncline.observe.observer\n"
        "from syncline.observe.terminal import plain, quiet\n"
        "assert 'rich' not in sys.modules, 'rich was imported'\n"
        "import syncline.observe.terminal.live_view\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'torch or numpy was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


class TestProgress:
    def test_a_workers_rate_is_samples_over_seconds_of_the_last_few_seconds(self) -> None:
        slow = [progress(step=i, after_s=i, samples=100, seconds=1.0) for i in range(1, 11)]
        fast = [progress(step=10 + i, after_s=10 + i, samples=500, seconds=1.0) for i in range(1, 6)]
        assert after(started(plan()), *slow).samples_per_s == pytest.approx(100)
        assert after(started(plan()), *slow, *fast).samples_per_s == pytest.approx(500)

    def test_one_step_longer_than_the_smoothing_still_gives_a_rate(self) -> None:
        state = after(started(plan()), progress(step=1, after_s=60, samples=120, seconds=60.0))
        assert state.samples_per_s == pytest.approx(2)

    def test_the_total_rate_is_the_sum_over_workers_that_are_there(self) -> None:
        events = [progress(rank, step=5, after_s=1, samples=100, seconds=1.0) for rank in range(3)]
        state = after(started(plan(3)), *events)
        assert state.samples_per_s == pytest.approx(300)
        state.apply(FatalFailure(worker_id=2, message="gone"))
        assert state.samples_per_s == pytest.approx(200)

    def test_an_epoch_that_just_ended_is_still_the_one_shown(self) -> None:
        state = after(started(plan()))
        assert state.epoch == 1
        for step, epoch in [(1, 1), (469, 1), (470, 2), (938, 2), (1406, 3), (1407, 3)]:
            state.apply(progress(step=step, after_s=step / 100))
            assert state.epoch == epoch, step

    def test_the_fraction_counts_steps_up_to_a_limit_on_them(self) -> None:
        limited = replace(plan(), total_steps=500)
        state = after(started(limited), progress(step=250, after_s=1))
        assert state.fraction == pytest.approx(0.5)
        assert state.plan.epochs == 2

    def test_loss_accuracy_and_learning_rate_are_the_latest_that_are_known(self) -> None:
        state = after(
            started(plan()),
            progress(step=1, after_s=1, loss=2.0, accuracy=0.1),
            progress(step=2, after_s=2, loss=None, accuracy=None, lr=0.01),
        )
        assert (state.loss, state.accuracy, state.lr) == (2.0, 0.1, 0.01)

    def test_losses_that_all_workers_report_are_kept_once(self) -> None:
        events = [progress(r, step=s, after_s=s, loss=1.0 / s) for s in (1, 2, 3) for r in range(4)]
        assert after(started(plan(4)), *events).losses.values == pytest.approx([1, 1 / 2, 1 / 3])

    def test_another_worker_reports_the_loss_when_the_first_fails(self) -> None:
        state = after(
            started(plan()), FatalFailure(worker_id=0, message="gone"), progress(1, step=3, after_s=1, loss=0.7)
        )
        assert state.loss == 0.7

    def test_phases_are_summed_over_workers_and_come_in_the_order_of_a_step(self) -> None:
        first = progress(0, step=1, after_s=1, phases={"update": 1.0, "data": 1.0, "something else": 1.0})
        state = after(started(plan()), first, progress(1, step=1, after_s=1, phases={"forward": 5.0, "exchange": 2.0}))
        assert state.phase_fractions == [
            ("data", 0.1), ("forward", 0.5), ("exchange", 0.2), ("update", 0.1), ("something else", 0.1),
        ]  # fmt: skip

    def test_progress_before_any_start_is_not_an_error(self) -> None:
        state = after(progress(3, step=7, after_s=1))
        assert state.fraction is None
        assert state.samples_per_s > 0


class TestTimeLeft:
    def test_it_follows_from_what_is_done_and_how_long_that_took(self) -> None:
        state = after(started(plan()), *[progress(step=s, after_s=s / 100, seconds=1.0) for s in range(100, 701, 100)])
        assert state.left_s == pytest.approx(7.0 * (1407 - 700) / 700, rel=0.2)

    def test_it_counts_from_the_first_step_and_not_from_the_start_of_the_processes(self) -> None:
        late = [progress(step=s, after_s=100 + s / 100, seconds=1.0) for s in range(100, 1001, 100)]
        assert after(started(plan()), *late).left_s == pytest.approx(4.07, rel=0.1)

    def test_a_resumed_run_does_not_take_credit_for_what_was_done_before(self) -> None:
        events = [progress(step=938 + s, after_s=s / 10, seconds=1.0) for s in range(10, 101, 10)]
        state = after(started(plan(), resumed_from_step=938), *events)
        assert state.left_s == pytest.approx(10 * (1407 - 1038) / 100, rel=0.05)

    def test_it_is_unknown_in_the_first_second(self) -> None:
        assert after(started(plan()), progress(step=100, after_s=0.25)).left_s is None

    def test_it_is_unknown_for_a_loop_of_the_users_own(self) -> None:
        assert after(started(own_loop_plan()), *own_loop_training()).left_s is None


class TestWorkers:
    def test_they_start_train_finish_or_fail(self) -> None:
        state = after(started(plan(4)))
        assert {w.status for w in state.workers.values()} == {"starting"}
        for event in (
            ready(1),
            progress(2, step=1407, after_s=20),
            FatalFailure(worker_id=3, message="killed by signal 9"),
        ):
            state.apply(event)
        assert [state.workers[r].status for r in range(4)] == ["starting", "training", "finished", "failed"]

    def test_a_late_event_of_a_failed_worker_does_not_revive_it_but_a_replacement_does(self) -> None:
        state = after(started(plan()), FatalFailure(worker_id=1, message="gone"), progress(1, step=3, after_s=1))
        assert [w.status for w in state.workers.values()] == ["starting", "failed"]
        state.apply(ready(1))
        assert [w.status for w in state.workers.values()] == ["starting", "training"]

    def test_the_summary_finishes_all_who_are_left(self) -> None:
        state = after(started(plan()), FatalFailure(worker_id=1, message="gone"), summary())
        assert [w.status for w in state.workers.values()] == ["finished", "failed"]


class TestResuming:
    def test_it_resumes_in_the_epoch_of_the_checkpoint(self) -> None:
        state = after(started(plan(), resumed_from_step=500))
        assert (state.step, state.epoch) == (500, 2)
        assert state.title[-1] == "resumed at step 500"

    def test_what_came_after_the_checkpoint_is_forgotten(self) -> None:
        state = after(started(plan()), *training(until_step=1000), started(plan(), resumed_from_step=600))
        assert [e.epoch for e in state.evaluations] == [1]
        assert max(step for step, _ in state.losses.points) <= 600
        assert state.failures == []

    def test_the_curves_join_up(self) -> None:
        state = after(
            started(plan()),
            *training(until_step=1000),
            started(plan(), resumed_from_step=600),
            *training(from_step=600),
        )
        assert [e.epoch for e in state.evaluations] == [1, 2, 3]
        steps = [step for step, _ in state.losses.points]
        assert steps == sorted(steps)


class TestOwnLoops:
    def test_there_is_no_epoch_and_no_fraction(self) -> None:
        state = after(started(own_loop_plan()), *own_loop_training())
        assert (state.epoch, state.fraction) == (None, None)
        assert state.step == 400
        assert state.samples_per_s == pytest.approx(2560)

    def test_logged_numbers_are_kept_and_the_loss_is_found_among_them(self) -> None:
        state = after(started(own_loop_plan()), *own_loop_training())
        assert set(state.metrics) == {"loss", "val_accuracy"}
        assert loss_series(state) is not None
        assert len(loss_series(state).values) == 40
        assert result_series(state) is not None
        assert result_series(state).name == "val_accuracy"

    def test_counters_that_a_script_logs_are_no_results(self) -> None:
        """A script that logged its epoch and its loss got a chart of the epoch."""
        logged = [
            MetricsLogged(worker_id=0, step=step, metrics={"epoch": step, "loss": 1 / step}) for step in range(1, 9)
        ]
        state = after(started(own_loop_plan()), *logged)
        assert result_series(state) is None
        assert loss_series(state) is not None

    def test_the_phases_are_those_of_an_own_loop(self) -> None:
        state = after(started(own_loop_plan()), *own_loop_training())
        assert [name for name, _ in state.phase_fractions] == ["data", "compute", "exchange", "update"]


def test_the_series_of_results_is_the_accuracy_over_epochs() -> None:
    state = after(started(plan()), *training())
    series = result_series(state)
    assert series is not None
    assert (series.name, series.first, series.last) == ("test/accuracy", "epoch 1", "epoch 3")
    assert list(series.values) == [0.9712, 0.9833, 0.9871]


def test_a_single_evaluation_is_not_a_series() -> None:
    assert result_series(after(started(plan()), evaluated(1, 5, 0.9))) is None


def test_evaluations_without_end_are_thinned_out_keeping_the_first_and_the_last() -> None:
    state = after(started(plan()), *(evaluated(e, e, 0.5) for e in range(1, 3001)))
    assert len(state.evaluations) <= 512
    assert (state.evaluations[0].epoch, state.evaluations[-1].epoch) == (1, 3000)


def test_the_last_checkpoint_and_its_age_are_known() -> None:
    state = after(started(plan()), saved(100, 1), saved(200, 2), progress(step=250, after_s=5))
    assert state.checkpoint is not None
    assert state.checkpoint.step == 200
    assert state.checkpoint_age_s == pytest.approx(3)


def test_warnings_are_counted_but_only_the_last_ones_kept() -> None:
    state = after(started(plan()), *(WarningMessage(message=str(i)) for i in range(100)))
    assert state.warning_count == 100
    assert len(state.warnings) < 100
    assert state.warnings[-1].message == "99"


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats()), max_size=300), st.sampled_from([2, 4, 16]))
def test_a_history_is_bounded_finite_and_stays_in_the_range_of_its_values(
    points: list[tuple[int, float]], capacity: int
) -> None:
    history = History(capacity)
    for step, value in points:
        history.add(step, value)
    finite = [v for _, v in points if math.isfinite(v)]
    assert len(history.values) == len(history) <= capacity
    assert bool(history.values) == bool(finite)
    slack = 1e-9 * max(map(abs, finite), default=0)
    assert all(min(finite) - slack <= v <= max(finite) + slack for v in history.values)


def test_a_long_history_keeps_its_shape() -> None:
    history = History(64)
    for step in range(10_000):
        history.add(step, float(step))
    assert history.values == sorted(history.values)
    assert history.values[0] < 300
    assert history.values[-1] > 9_700
    assert history.points[-1][0] == 9_999


@given(
    st.lists(
        st.builds(
            Progress,
            time=st.floats(0, 1e10),
            worker_id=st.integers(0, 3),
            epoch=st.integers(0, 5),
            step=st.integers(0, 2000),
            samples=st.integers(0, 10**6),
            seconds=st.floats(0, 1e4),
            cursor=st.integers(0, 60_000),
            loss=st.none() | st.floats(),
            accuracy=st.none() | st.floats(),
            lr=st.none() | st.floats(),
        ),
        max_size=20,
    )
)
def test_odd_numbers_never_break_the_fold(events: list[Progress]) -> None:
    state = after(started(plan()), *events)
    assert state.fraction is not None
    assert 0 <= state.fraction <= 1
    assert state.left_s is None or state.left_s >= 0
    assert state.samples_per_s >= 0


class TestWords:
    @pytest.mark.parametrize(
        ("seconds", "text"),
        [(0.035, "35 ms"), (0.42, "0.4 s"), (0.0, "0.0 s"), (9.97, "10 s"), (12.3, "12 s"), (59.7, "1 min 00 s"),
         (185, "3 min 05 s"), (7620, "2 h 07 min"), (273_600, "3 d 04 h"), (math.inf, "? s"), (math.nan, "? s")],
    )  # fmt: skip
    def test_durations_read_well(self, seconds: float, text: str) -> None:
        assert formatting.duration(seconds) == text

    @pytest.mark.parametrize(
        ("name", "value", "text"),
        [("test/accuracy", 0.98712, "98.71%"), ("test/Accuracy", 1.0, "100.00%"), ("val_acc", 0.5, "50.00%"),
         ("accuracy", 97.5, "97.50%"), ("accuracy", 0.999999, "99.9999%"), ("test/accuracy", math.nan, "nan"),
         ("test/loss", 0.041234, "0.04123"), ("loss", 2.30259, "2.303"), ("loss", 61234.4, "61,234"),
         ("accumulated", 0.5, "0.5"), ("loss", math.inf, "inf")],
    )  # fmt: skip
    def test_metrics_are_shown_as_their_names_suggest(self, name: str, value: float, text: str) -> None:
        assert formatting.metric(name, value) == text

    def test_what_people_look_for_comes_first(self) -> None:
        ordered = formatting.metrics_in_order(
            {"train/loss": 1.0, "test/loss": 1.0, "train/accuracy": 0.5, "test/accuracy": 0.5}
        )
        assert [name for name, _ in ordered] == ["test/accuracy", "test/loss", "train/accuracy", "train/loss"]

    def test_the_headline_of_a_traceback_is_its_exception(self) -> None:
        text = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nValueError: two\nlines\n'
        assert formatting.headline(text) == "ValueError: two"
        assert formatting.headline("Worker 1 was killed.\nMore.") == "Worker 1 was killed."
        assert formatting.headline("") == "no message"

    def test_cleaned_text_has_no_escape_codes_and_shows_a_progress_bars_last_state(self) -> None:
        assert formatting.clean("\x1b[31mred\x1b[0m \x1b]0;title\x07\x07\x08ok\r\n") == "red ok"
        assert formatting.clean(" 10%\r 50%\r100%") == "100%"

    @given(st.text())
    def test_cleaned_text_is_one_line_that_cannot_move_a_cursor(self, text: str) -> None:
        assert not set(formatting.clean(text)) & {chr(c) for c in (*range(9), *range(10, 32), *range(127, 160))}

    def test_what_to_do_next_depends_on_how_the_run_ended(self) -> None:
        def commands(plan_: Plan, cores: int = 2, **changes: Any) -> list[str]:
            return [what for what, _ in next_steps(after(started(plan_, cores=cores), summary(**changes)))]

        assert commands(plan(), stopped_early=True, run_dir="my runs/a") == ["syncline resume 'my runs/a'"]
        assert commands(plan(), cores=8)[:2] == ["syncline resume runs/lenet-mnist-1 --epochs 6", "--workers 8"]
        assert "syncline explain TASK" in commands(plan())
        assert commands(own_loop_plan()) == ["syncline report runs/lenet-mnist-1"]
        assert "syncline resume" not in " ".join(commands(replace(plan(), total_steps=500)))


def test_times_come_from_the_events_alone() -> None:
    assert after(started(plan())).latest_time == START
