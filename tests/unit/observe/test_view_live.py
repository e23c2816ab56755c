"""The live view: that its picture fits and holds what matters, and that what is printed above it stays."""

from __future__ import annotations

import io
import re
import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from scripted_run import (
    RUN_DIR,
    own_loop_plan,
    own_loop_training,
    plan,
    progress,
    ready,
    started,
    summary,
    training,
)

from syncline.observe.state import RunState
from syncline.observe.terminal.live_view import LiveView
from syncline.observe.terminal.screen import draw
from syncline.telemetry.events import Event, FatalFailure, RunEnded, WarningMessage, WorkerOutput


def picture(*events: Event, width: int = 100, height: int = 40) -> list[str]:
    state = RunState()
    for event in events:
        state.apply(event)
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=True, record=True)
    console.print(draw(state, width=width, height=height, spin="*"))
    return console.export_text().splitlines()


def shown(*events: Event, width: int = 100) -> tuple[str, str]:
    """What a terminal received from the live view: with its escape codes, and what remains without them."""
    file = io.StringIO()
    console = Console(
        width=width, height=40, file=file, force_terminal=True, markup=False, highlight=False, emoji=False, record=True
    )
    view = LiveView(console)
    for event in events:
        view.on_event(event)
    view.close()
    view.close()
    return file.getvalue(), console.export_text()


RUNS: dict[str, list[Event]] = {
    "starting": [started(plan(4))],
    "training": [started(plan(4)), *training(4, until_step=1000)],
    "complete": [started(plan(4)), *training(4)],
    "crowded": [started(plan(64)), *training(64, until_step=300)],
    "resumed": [started(plan(2), resumed_from_step=600), *training(2, from_step=600, until_step=800)],
    "own loop": [started(own_loop_plan()), *own_loop_training()],
    "failing": [started(plan(4)), *training(4, until_step=100), FatalFailure(worker_id=3, message="gone")],
    "empty": [],
    "long names": [started(plan(2, model="模型" * 40, data="d" * 90), run_dir="runs/" + "x" * 200), *training(2)],
}


class TestScreen:
    @pytest.mark.parametrize("run", RUNS)
    @pytest.mark.parametrize(
        ("width", "height"), [(200, 60), (100, 40), (80, 24), (50, 30), (40, 12), (20, 5), (12, 3)]
    )
    def test_it_fits_any_terminal(self, run: str, width: int, height: int) -> None:
        state = RunState()
        for event in RUNS[run]:
            state.apply(event)
        lines = draw(state, width=width, height=height, spin="*").split("\n")
        assert len(lines) <= height
        assert max(line.cell_len for line in lines) <= width

    def test_its_header_says_what_is_trained_by_how_many_and_how(self) -> None:
        assert picture(*RUNS["training"])[0] == "* lenet on mnist · 4 workers · allreduce"

    def test_it_shows_epoch_fraction_steps_time_left_rate_loss_and_accuracy(self) -> None:
        text = "\n".join(picture(*RUNS["training"])[:3])
        for fact in (
            "epoch 3/3",
            "71%",
            "step 1,000 of 1,407",
            " s left",
            " samples/s",
            "loss 0.04",
            "accuracy 99.0%",
            "lr ",
        ):
            assert fact in text

    def test_a_run_that_is_not_complete_never_shows_100_percent(self) -> None:
        assert "99%" in picture(started(plan()), progress(step=1406, after_s=20))[1]
        assert "100%" in picture(started(plan()), progress(step=1407, after_s=20))[1]

    def test_it_has_a_row_for_each_of_up_to_eight_workers(self) -> None:
        rows = [line for line in picture(started(plan(8)), *(ready(r) for r in range(8))) if "● " in line]
        assert len(rows) == 8

    def test_more_workers_than_eight_are_summed_up_and_failed_ones_come_first(self) -> None:
        lines = picture(*RUNS["crowded"], FatalFailure(worker_id=63, message="gone"))
        assert any("✗ 63 failed" in line for line in lines)
        assert any("+56 more" in line for line in lines)
        assert sum("● " in line for line in lines) == 7

    def test_it_shows_where_the_time_goes(self) -> None:
        text = "\n".join(picture(*RUNS["training"]))
        for part in ("data 2%", "forward 29%", "backward 45%", "exchange 16%", "update 8%"):
            assert part in text

    def test_it_shows_the_last_evaluation_and_checkpoint_and_the_run_directory(self) -> None:
        text = "\n".join(picture(*RUNS["training"]))
        assert re.search(r"test +accuracy 98\.33% +loss 0\.1 +after epoch 2", text)
        assert re.search(r"saved +step 938, \d.* ago", text)
        assert re.search(rf"run +{RUN_DIR}", text)

    def test_a_loss_that_falls_far_is_drawn_by_its_logarithm_and_says_so(self) -> None:
        assert any(line.startswith("loss  logarithmic") for line in picture(*RUNS["training"]))
        level = [progress(step=s, after_s=s, loss=1 + s / 100) for s in range(1, 20)]
        assert any(re.fullmatch(r"loss +workers +samples/s", line) for line in picture(started(plan()), *level))

    def test_an_own_loop_shows_steps_and_what_it_logged_but_no_bar(self) -> None:
        lines = picture(*RUNS["own loop"])
        assert lines[1].startswith("step 400   2,560 samples/s")
        assert "val_accuracy 94.67%" in lines[1]
        assert "compute 67%" in "\n".join(lines)
        assert not any("epoch" in line or " left" in line or "─" in line for line in lines)

    @pytest.mark.parametrize("loss", [None, float("nan"), float("inf"), -1.0, 0.0, 1e308, 5e-324])
    def test_odd_losses_are_no_reason_to_crash(self, loss: float | None) -> None:
        events = [progress(step=s, after_s=s, loss=loss, accuracy=loss, lr=loss) for s in range(1, 5)]
        assert picture(started(plan()), *events, progress(step=5, after_s=6, loss=1.0))

    @settings(max_examples=40, deadline=None)
    @given(
        losses=st.lists(st.none() | st.floats(), max_size=12),
        width=st.integers(1, 130),
        height=st.integers(1, 50),
        workers=st.integers(1, 12),
    )
    def test_anything_can_be_drawn_anywhere(
        self, losses: list[float | None], width: int, height: int, workers: int
    ) -> None:
        state = RunState()
        state.apply(started(plan(workers)))
        for step, loss in enumerate(losses):
            state.apply(progress(step % workers, step=step, after_s=step, loss=loss, accuracy=loss))
        lines = draw(state, width=width, height=height).split("\n")
        assert len(lines) <= max(height, 2)
        assert max(line.cell_len for line in lines) <= max(width, 10)


class TestAboveTheScreen:
    def test_output_is_shown_as_it_is_with_the_worker_unless_it_is_the_first(self) -> None:
        _, text = shown(
            started(plan()),
            WorkerOutput(worker_id=0, text="[bold red]x[/] :smile: [0]"),
            WorkerOutput(worker_id=1, text="[/] hi"),
        )
        assert "[bold red]x[/] :smile: [0]" in text
        assert "[worker 1] [/] hi" in text

    def test_output_cannot_move_the_cursor_but_keeps_its_colors(self) -> None:
        raw, text = shown(WorkerOutput(worker_id=0, text="\x1b[2J\x1b[31mred\x1b[0m \x1b]0;title\x07done\r\n"))
        assert "\x1b[2J" not in raw
        assert "\x1b[31mred\x1b[0m done" in raw
        assert "title" not in text

    def test_warnings_are_printed_up_to_a_limit(self) -> None:
        _, text = shown(started(plan()), *(WarningMessage(message=f"Number {i}.", worker_id=1) for i in range(100)))
        assert "! worker 1: Number 19." in text
        assert "Number 20." not in text
        assert f"{RUN_DIR}/events.jsonl" in text

    def test_a_worker_that_prints_a_lot_does_not_cause_a_lot_of_drawing(self) -> None:
        raw, text = shown(started(plan()), *(WorkerOutput(worker_id=0, text=f"line {i}.") for i in range(2000)))
        assert all(f"line {i}." in text for i in range(2000))
        assert raw.count("lenet on mnist") < 50

    def test_the_notes_of_the_plan_are_printed(self) -> None:
        assert "Each epoch is one step." in shown(started(replace(plan(), notes=("Each epoch is one step.",))))[1]

    def test_a_failed_worker_is_reported_while_the_run_continues(self) -> None:
        failure = FatalFailure(worker_id=1, message="Killed.")
        assert "✗ worker 1 failed: Killed." in shown(started(plan()), failure, progress(step=1, after_s=1))[1]

    def test_a_failed_worker_is_reported_without_a_later_event(self) -> None:
        assert "✗ worker 1 failed: Killed." in shown(started(plan()), FatalFailure(worker_id=1, message="Killed."))[1]


class TestTheEnd:
    @pytest.mark.parametrize("width", [100, 50, 40])
    def test_the_result_has_metrics_speed_curves_place_and_next_steps(self, width: int) -> None:
        ended = summary(4, peak_memory_bytes={0: 398_000_000, 3: 412_000_000})
        _, text = shown(started(plan(4), cores=8), *training(4), ended, width=width)
        end = text[text.index("╭") :]
        for fact in (
            "peak memory 412 MB",
            "98.71%",
            "0.0412",
            "61,234 samples/s",
            "23 s",
            "97.12%",
            "epoch 3",
            "step 1,407",
            RUN_DIR,
            "--workers 8",
        ):
            assert fact in end
        assert all(len(line) <= width for line in end.splitlines())

    def test_a_run_that_stopped_early_shows_how_to_resume(self) -> None:
        _, text = shown(started(plan()), summary(stopped_early=True))
        assert "stopped early" in text
        assert f"syncline resume {RUN_DIR}" in text

    def test_a_result_without_metrics_or_curves_is_still_a_result(self) -> None:
        _, text = shown(summary(metrics={}, samples_per_s=float("nan"), seconds=0.0))
        assert "No metrics" in text

    def test_a_failure_is_red_and_shown_once_with_the_first_cause_first(self) -> None:
        message = "RuntimeError: [size] 7\n\nWorker 1 raised RuntimeError at step 3."
        raw, text = shown(
            started(plan()), FatalFailure(worker_id=1, message=message), RunEnded(reason="failed", message=message)
        )
        assert text.count("RuntimeError: [size] 7") == 1
        assert "\x1b[31mRuntimeError: [size] 7" in raw
        assert text.index("RuntimeError: [size] 7") < text.index("Worker 1 raised")

    def test_a_cause_that_the_end_does_not_repeat_is_put_before_it(self) -> None:
        _, text = shown(
            started(plan()), FatalFailure(worker_id=1, message="First."), RunEnded(reason="failed", message="Last.")
        )
        assert text.index("First.") < text.index("Last.")

    def test_a_run_that_the_user_stopped_shows_how_far_it_came(self) -> None:
        message = f"Stopped after step 1000; everything is saved. To resume: syncline resume {RUN_DIR}"
        _, text = shown(started(plan()), *training(until_step=1000), RunEnded(reason="stopped", message=message))
        end = text[text.index("╭") :]
        assert "step 1,000 of 1,407 · test/accuracy 98.33%" in end
        assert message in end

    def test_the_cursor_is_given_back(self) -> None:
        raw, _ = shown(started(plan()), *training(until_step=50))
        assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l")

    def test_output_after_the_end_is_still_printed(self) -> None:
        assert "late" in shown(started(plan()), summary(), WorkerOutput(worker_id=0, text="late"))[1]


def test_events_and_drawings_at_the_same_time_do_not_disturb_each_other() -> None:
    console = Console(width=100, height=40, file=io.StringIO(), force_terminal=True)
    view = LiveView(console)
    failures: list[BaseException] = []
    done = threading.Event()

    def keep_drawing() -> None:
        try:
            while not done.is_set():
                console.render_lines(view)
        except BaseException as error:
            failures.append(error)

    drawer = threading.Thread(target=keep_drawing)
    view.on_event(started(plan(4)))
    drawer.start()
    for event in training(4, steps_per_event=5):
        view.on_event(event)
        if event.time % 1 < 0.05:
            view.on_event(WorkerOutput(worker_id=0, text="hello"))
    done.set()
    drawer.join(30)
    view.on_event(summary(4))
    assert not drawer.is_alive()
    assert failures == []
