"""Plain lines: which there are, what they say, and that they are plain."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from scripted_run import (
    RUN_DIR,
    START,
    evaluated,
    own_loop_plan,
    own_loop_training,
    plan,
    progress,
    saved,
    started,
    summary,
    training,
)

from syncline.observe.terminal.plain import PlainLines
from syncline.telemetry.events import Event, FatalFailure, RunEnded, StrategySwitched, WarningMessage, WorkerOutput


def lines_of(*events: Event, stream: io.StringIO | None = None) -> list[str]:
    stream = stream or io.StringIO()
    view = PlainLines(stream)
    for event in events:
        view.on_event(event)
    view.close()
    return stream.getvalue().splitlines()


def test_the_start_says_what_is_trained_by_how_many_for_how_long_and_where() -> None:
    assert lines_of(started(plan(4))) == [
        "lenet on mnist, 4 workers, allreduce: 3 epochs of 60,000 samples, 1407 steps",
        f"run directory: {RUN_DIR}",
    ]


def test_a_script_that_takes_no_samples_has_no_speed_in_samples() -> None:
    """It was reported as 0 samples/s."""
    steps = [progress(step=step, after_s=11.0 * step, samples=0) for step in (1, 2, 3)]
    lines = lines_of(started(own_loop_plan()), *steps, summary(samples_per_s=0.0, steps=3))
    assert "finished 3 steps in 23 s with 2 workers" in lines
    assert any(line.startswith("step 2") for line in lines)
    assert not any("samples/s" in line for line in lines)


def test_a_resumed_run_shows_the_step_it_resumes_from() -> None:
    assert "resumed at step 938" in lines_of(started(plan(), resumed_from_step=938))[0]


def test_the_notes_of_the_plan_are_shown() -> None:
    assert "note: Each epoch is one step." in lines_of(started(replace(plan(), notes=("Each epoch is one step.",))))


def test_a_line_of_progress_has_epoch_step_rate_loss_accuracy_and_time_left() -> None:
    lines = lines_of(
        started(plan()),
        progress(step=900, after_s=23, samples=61_234, seconds=1.0, loss=0.05),
        progress(step=938, after_s=24, samples=61_234, seconds=1.0, loss=0.0412, accuracy=0.987),
    )
    assert lines[-1] == "epoch 2/3  step 938/1407  61,234 samples/s  loss 0.0412  accuracy 98.7%  1.0 s left"


def test_each_epoch_has_a_line_and_an_evaluation() -> None:
    lines = lines_of(started(plan()), *training(), summary())
    for epoch, accuracy in ((1, "97.12%"), (2, "98.33%"), (3, "98.71%")):
        assert sum(f"epoch {epoch}/3  step {469 * epoch}/1407" in line for line in lines) == 1
        assert sum(line.startswith(f"epoch {epoch}/3  test/accuracy {accuracy}  test/loss") for line in lines) == 1


def test_there_is_a_line_every_ten_seconds_within_a_long_epoch() -> None:
    events = [progress(step=s, after_s=s, loss=1.0) for s in range(1, 101)]
    lines = [line for line in lines_of(started(plan()), *events) if "step " in line and "loss" in line]
    assert 9 <= len(lines) <= 11


def test_the_other_workers_progress_adds_no_lines() -> None:
    one = lines_of(started(plan(1)), *training(1))
    four = lines_of(started(plan(4)), *training(4))
    assert len(one) == len(four)


def test_warnings_are_shown_up_to_a_limit() -> None:
    lines = lines_of(started(plan()), *(WarningMessage(message=f"Number {i}.", worker_id=1) for i in range(500)))
    warnings = [line for line in lines if line.startswith("warning")]
    assert warnings[0] == "warning (worker 1): Number 0."
    assert len(warnings) == 20
    assert lines[-1].endswith(f"{RUN_DIR}/events.jsonl")


def test_a_strategy_switch_is_reported() -> None:
    lines = lines_of(started(plan()), StrategySwitched(step=469, strategy="updates | every(10)"))
    assert all(fact in lines[-1] for fact in ("469", "updates | every(10)"))


def test_a_failed_server_is_not_called_a_worker() -> None:
    lines = lines_of(started(plan(4)), FatalFailure(worker_id=5, message="It was killed."))
    assert any(line.startswith("server 1 failed") for line in lines)


def test_output_names_its_worker_unless_it_is_the_first() -> None:
    lines = lines_of(WorkerOutput(worker_id=0, text="hello"), WorkerOutput(worker_id=3, text="[bold]hi[/bold]"))
    assert lines == ["hello", "[worker 3] [bold]hi[/bold]"]


def test_only_the_last_checkpoint_is_shown() -> None:
    lines = lines_of(started(plan()), *(saved(step, step / 100) for step in range(100, 1500, 100)), summary())
    assert [line for line in lines if "checkpoint" in line] == ["last checkpoint: step 1400, 1.7 MB"]


def test_the_result_has_speed_metrics_a_curve_and_the_run_directory() -> None:
    lines = lines_of(started(plan(4)), *training(4), summary(4))
    end = lines[lines.index("finished 3 epochs, 1407 steps in 23 s: 61,234 samples/s with 4 workers") :]
    assert end[1] == "test/accuracy"
    assert end[2].startswith("98.71% ┤")
    assert end[6].startswith("97.12% ┤")
    assert end[8].split() == ["epoch", "1", "epoch", "3"]
    assert end[9] == "test/accuracy 98.71%  test/loss 0.0412  train/loss 0.0123"
    assert f"run directory: {RUN_DIR}" in end
    assert end[-1].startswith("next: "), "what to type next comes last"


def test_there_is_no_curve_of_a_single_evaluation() -> None:
    lines = lines_of(started(plan()), evaluated(1, 5, 0.9), summary())
    assert not any("┤" in line for line in lines)


def test_a_stream_without_unicode_gets_a_curve_in_ascii() -> None:
    class Ascii(io.StringIO):
        encoding = "ascii"

    lines = lines_of(started(plan()), *training(), summary(), stream=Ascii())
    assert any("*" in line for line in lines)
    assert all(line.isascii() for line in lines)


def test_a_run_that_stopped_early_shows_how_to_resume() -> None:
    lines = lines_of(started(plan()), summary(stopped_early=True, epochs=1.4213, steps=667))
    assert any(line.startswith("stopped early after 1.421 epochs, 667 steps") for line in lines)
    assert lines[-1].startswith(f"next: syncline resume {RUN_DIR}")


def test_a_failure_is_shown_once_with_the_first_cause_first() -> None:
    cause = 'Traceback (most recent call last):\n  File "my.py", line 3, in forward\nRuntimeError: size 7'
    message = f"{cause}\n\nWorker 1 raised RuntimeError at step 3."
    lines = lines_of(
        started(plan()), FatalFailure(worker_id=1, message=message), RunEnded(reason="failed", message=message)
    )
    assert lines[2:] == message.splitlines()


def test_a_cause_that_the_end_does_not_repeat_is_put_before_it() -> None:
    failure = FatalFailure(worker_id=1, message="Worker 1 was killed.")
    lines = lines_of(failure, RunEnded(reason="failed", message="The run is over."))
    assert lines == ["Worker 1 was killed.", "", "The run is over."]


def test_a_failure_is_one_line_while_the_run_continues() -> None:
    failure = FatalFailure(time=START + 2, worker_id=1, message="Killed.\nMore.")
    lines = lines_of(started(plan()), failure, progress(step=1, after_s=1))
    assert lines[2:] == ["worker 1 failed: Killed."]


def test_an_own_loop_shows_steps_and_what_it_logged() -> None:
    lines = lines_of(started(own_loop_plan()), *own_loop_training(), summary(metrics={"loss": 0.2}))
    assert lines[0].startswith("my_loop.py, 2 workers, allreduce:")
    progress_line = next(line for line in lines if line.startswith("step "))
    assert progress_line == "step 320  2,560 samples/s  val_accuracy 90.86%  loss 0.3198"
    assert not any("epoch" in line or " left" in line for line in lines)


@pytest.mark.parametrize("loss", [None, float("nan"), float("inf"), -1e-300, 1e300])
def test_odd_losses_are_shown_as_they_are(loss: float | None) -> None:
    lines = lines_of(started(plan()), progress(step=469, after_s=10, loss=loss), summary(metrics={"loss": loss or 0.0}))
    assert any("step 469/1407" in line for line in lines)


def test_there_is_never_an_escape_code() -> None:
    nasty = "\x1b[31mred\x1b[0m\x1b]0;title\x07 \x1b[2J\rafter\x08\x00"
    stream = io.StringIO()
    lines_of(
        started(plan(model=f"le{nasty}net")),
        *training(),
        WorkerOutput(worker_id=0, text=nasty),
        WarningMessage(message=nasty),
        FatalFailure(worker_id=1, message=nasty),
        RunEnded(reason="failed", message=nasty),
        summary(),
        stream=stream,
    )
    assert not set(stream.getvalue()) & {chr(c) for c in (*range(10), *range(11, 32), 127)}


def test_a_log_without_any_start_still_ends_well() -> None:
    assert f"run directory: {RUN_DIR}" in lines_of(summary())


def test_peak_memory_is_shown_with_the_worker_that_reached_it() -> None:
    assert "peak memory: 412 MB (worker 1, the largest)" in lines_of(
        started(plan()), summary(peak_memory_bytes={0: 398_000_000, 1: 412_000_000})
    )
    assert "peak memory: 1.5 GB" in lines_of(started(plan(1)), summary(1, peak_memory_bytes={0: 1_500_000_000}))
    assert not any("peak memory" in line for line in lines_of(started(plan()), summary()))
