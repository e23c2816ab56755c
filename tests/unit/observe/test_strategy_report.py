"""What `syncline strategies --run` makes of a run's events: the numbers, the look, and runs that broke off."""

from __future__ import annotations

import io
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_run import own_loop_plan, plan, progress, started, summary
from typer.testing import CliRunner

from syncline.cli.main import app
from syncline.errors import ConfigError
from syncline.observe.strategy_stats import Ancestor, Staleness, StrategyStats, strategy_stats
from syncline.observe.terminal.strategy_report import as_json, as_lines, show
from syncline.telemetry.events import (
    Event,
    ExchangeStats,
    RunEnded,
    RunStarted,
    StrategySwitched,
    TournamentMatch,
    WorkerReady,
)
from syncline.telemetry.run_dir import EventLog, RunDir


def exchanged(rank: int, step: int, *, steps: int = 10, sent: int = 1000, **more: Any) -> ExchangeStats:
    return ExchangeStats(worker_id=rank, step=step, bytes_sent=sent, **{"steps": steps, "exchanges": 1, **more})


def contest(
    winner: int, loser: int, round_: int, scores: tuple[float, float] = (0.1, 0.2), step: int | None = None
) -> list[Event]:
    """A match as both tell of it, the loser first."""
    at = step if step is not None else 100 * round_
    common = {"step": at, "round": round_}
    return [
        TournamentMatch(
            worker_id=loser, opponent_id=winner, own_score=scores[1], opponent_score=scores[0], adopted=True, **common
        ),
        TournamentMatch(
            worker_id=winner, opponent_id=loser, own_score=scores[0], opponent_score=scores[1], adopted=False,
            hyperparameters={"lr": 0.05}, **common,
        ),
    ]  # fmt: skip


def started_with(strategy: str, workers: int = 2, *, at: int | None = None, **more: Any) -> RunStarted:
    event = started(plan(workers, strategy=strategy), resumed_from_step=at)
    return RunStarted(time=event.time, run_dir=event.run_dir, plan={**event.plan, **more}, machine=event.machine,
                      resumed_from_step=at)  # fmt: skip


def text_of(*events: Event, **options: Any) -> str:
    return "\n".join(as_lines(strategy_stats(events), **options))


def in_one_line(*events: Event) -> str:
    """For sentences, wherever they were wrapped."""
    return " ".join(text_of(*events).split())


def written(path: Path, *events: Event) -> Path:
    path.mkdir()
    (path / "plan.json").write_text("{}")
    log = EventLog(RunDir(path))
    for event in events:
        log.write(event)
    log.close()
    return path


def test_increments_of_interleaved_workers_add_up() -> None:
    stats = strategy_stats(
        [
            started(plan(3, strategy="sparknet")),
            exchanged(1, 10, sent=300, bytes_received=7),
            exchanged(0, 12, steps=12, sent=400, exchanges=2),
            exchanged(1, 30, steps=20, sent=500),
            progress(0, step=12, after_s=1, samples=100),
            exchanged(2, 10, sent=100),
            progress(1, step=30, after_s=2, samples=60),
        ]
    )
    assert (stats.strategy, stats.workers, stats.steps, stats.status) == ("sparknet", 3, 30, "not ended")
    assert [(s.worker_id, s.steps, s.exchanges, s.bytes_sent) for s in stats.shares] == [
        (0, 12, 2, 400), (1, 30, 2, 800), (2, 10, 1, 100),
    ]  # fmt: skip
    assert stats.exchanges == 5
    assert stats.bytes_sent_per_step == 1300 / 52
    assert stats.bytes_received_per_step == 7 / 52
    assert stats.bytes_per_sample == 1307 / 160


def test_without_samples_there_is_nothing_to_divide_by() -> None:
    events = [started(own_loop_plan()), exchanged(0, 10)]
    assert strategy_stats(events).bytes_per_sample is None
    assert "1.0 kB in total" in in_one_line(*events)


def test_the_staleness_of_all_workers_is_one_histogram() -> None:
    stats = strategy_stats(
        [
            started(plan()),
            exchanged(0, 10, staleness={0: 90, 1: 5}),
            exchanged(1, 10, staleness={1: 3, 9: 1}),
            exchanged(0, 20, staleness={2: 1}),
        ]
    )
    found = stats.staleness
    assert found is not None
    assert found.counts == {0: 90, 1: 8, 2: 1, 9: 1}
    assert (found.updates, found.quantile(0.5), found.quantile(0.99), found.most) == (100, 0, 2, 9)
    assert found.mean == pytest.approx(0.19)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=200))
def test_mean_median_and_maximum_are_those_of_the_single_updates(updates: list[int]) -> None:
    found = Staleness({value: updates.count(value) for value in set(updates)})
    assert found.mean == pytest.approx(statistics.mean(updates))
    assert found.quantile(0.5) == statistics.median_low(updates)
    assert found.quantile(1.0) == found.most == max(updates)
    assert found.quantile(0.99) >= found.quantile(0.5)


def test_disagreement_is_averaged_over_workers_at_the_same_step() -> None:
    stats = strategy_stats(
        [
            started(plan()),
            exchanged(0, 10, disagreement=0.2),
            exchanged(1, 10, disagreement=0.4),
            exchanged(1, 20, disagreement=0.1),
            exchanged(0, 20, disagreement=0.3),
            exchanged(0, 30),
        ]
    )
    assert stats.disagreement == ((10, pytest.approx(0.3)), (20, pytest.approx(0.2)))


def test_workers_that_report_at_other_steps_count_with_what_was_last_seen_of_them() -> None:
    events = [exchanged(0, 10, disagreement=0.2), exchanged(1, 13, disagreement=0.4), exchanged(0, 20, disagreement=0)]
    stats = strategy_stats([started(plan()), *events])
    assert stats.disagreement == ((10, 0.2), (13, pytest.approx(0.3)), (20, pytest.approx(0.2)))


def test_disagreement_that_is_not_a_number_is_left_out() -> None:
    stats = strategy_stats([started(plan()), exchanged(0, 10, disagreement=float("nan")), exchanged(0, 20)])
    assert stats.disagreement == ()


def test_the_disagreement_of_a_very_long_run_stays_small() -> None:
    events = [exchanged(0, step, disagreement=1 / step) for step in range(1, 20_000)]
    assert 100 <= len(strategy_stats([started(plan()), *events]).disagreement) <= 256


def test_a_resumed_run_counts_all_work_and_continues_its_history_from_the_checkpoint() -> None:
    stats = strategy_stats(
        [
            started_with("ltfb"),
            exchanged(0, 100, steps=100, disagreement=0.5),
            *contest(0, 1, round_=1),
            progress(0, step=200, after_s=1, samples=200),
            exchanged(0, 200, steps=100, disagreement=0.9),
            *contest(1, 0, round_=2),
            StrategySwitched(step=150, strategy="sparknet"),
            RunEnded(reason="failed", message="Killed."),
            started_with("ltfb", at=100),
            progress(0, step=200, after_s=1, samples=100),
            exchanged(0, 200, steps=100, disagreement=0.1),
            *contest(0, 1, round_=2, scores=(0.3, 0.4)),
        ]
    )
    assert stats.steps == 200
    assert stats.status == "not ended"
    assert stats.shares[0].steps == 300, "a hundred steps were done twice"
    assert stats.bytes_sent == 3000
    assert stats.samples == 300
    assert stats.disagreement == ((100, 0.5), (200, 0.1))
    assert [(r.number, r.matches[0].verdicts[0].own_score) for r in stats.rounds] == [(1, 0.1), (2, 0.3)]
    assert stats.switches == ()


def test_resuming_with_another_strategy_is_a_switch() -> None:
    events = [started_with("allreduce"), exchanged(0, 50), started_with("sparknet", at=40), exchanged(0, 60)]
    stats = strategy_stats(events)
    assert stats.strategy == "sparknet"
    assert stats.switches == ((40, "sparknet"),)
    assert "step 40: sparknet" in text_of(*events)


def test_a_switch_that_every_worker_reports_is_one_switch() -> None:
    events = [started(plan()), *[StrategySwitched(step=469, strategy="sparknet(10)")] * 2, exchanged(0, 500)]
    assert strategy_stats(events).switches == ((469, "sparknet(10)"),)


def test_measured_bytes_are_compared_with_expected_ones() -> None:
    def sentence(sent: int) -> str:
        return in_one_line(started_with("onebit", expected_bytes_per_step=10_000), exchanged(0, 10, sent=sent))

    assert "10.1 kB (1.2% more than the expected 10.0 kB)" in sentence(101_200)
    assert "9.0 kB (10.0% less than the expected 10.0 kB)" in sentence(90_000)
    assert "10.0 kB (as expected)" in sentence(100_001)
    assert "40.0 kB (4 times the expected 10.0 kB)" in sentence(400_000)


def test_what_workers_expect_goes_before_what_the_plan_expects() -> None:
    ready = WorkerReady(worker_id=0, pid=1, parameters=5, collective="SharedMemory", expected_bytes_per_step=100.0)
    stats = strategy_stats([started_with("onebit", expected_bytes_per_step=7), ready, exchanged(0, 10)])
    assert stats.expected_bytes_per_step == 100
    assert "100 bytes (as expected)" in "\n".join(as_lines(stats))


@pytest.mark.parametrize("more", [[StrategySwitched(step=5, strategy="sparknet")], []])
def test_several_strategies_are_not_compared_with_the_expected_bytes_of_one(more: list[Event]) -> None:
    strategy = "onebit" if more else "allreduce until epoch 1, then onebit"
    assert "expected" not in text_of(started_with(strategy, expected_bytes_per_step=7), *more, exchanged(0, 10))


def test_workers_that_share_their_memory_send_nothing() -> None:
    assert "No bytes were sent" in in_one_line(started(plan()), exchanged(0, 10, sent=0, exchanges=10))


@pytest.mark.parametrize("expected", [None, "much", 0, float("nan"), True])
def test_a_plan_that_expects_nothing_useful_is_no_obstacle(expected: object) -> None:
    assert "expected" not in text_of(started_with("onebit", expected_bytes_per_step=expected), exchanged(0, 10))


def test_the_table_has_a_column_for_what_servers_sent_if_they_did() -> None:
    assert "received" not in text_of(started(plan()), exchanged(0, 10))
    lines = text_of(started(plan()), exchanged(0, 10, bytes_received=2_500_000)).splitlines()
    assert lines[3].split() == ["worker", "steps", "exchanges", "sent", "received"]
    assert lines[4].split() == ["0", "10", "1", "1.0", "kB", "2.5", "MB"]


def test_the_title_says_what_was_trained_how_and_how_far_it_came() -> None:
    begin = [started(plan(4, strategy="ltfb")), exchanged(0, 300)]
    title = "lenet on mnist, 4 workers, ltfb: "
    assert text_of(*begin).splitlines()[0] == f"{title}300 steps so far"
    assert text_of(*begin, summary(4)).splitlines()[0] == f"{title}finished after 1,407 steps"
    ended = text_of(*begin, RunEnded(reason="stopped", message="Stopped."))
    assert ended.splitlines()[0] == f"{title}ended early after 300 steps"


def test_the_histogram_is_drawn_as_bars_and_empty_classes_between_are_shown() -> None:
    lines = text_of(started(plan()), exchanged(0, 10, staleness={0: 300, 1: 600, 3: 1})).splitlines()
    bars = lines[lines.index("Staleness") + 2 :]
    assert [bar.split()[0] for bar in bars[:4]] == ["0", "1", "2", "3"]
    assert bars[0].count("█") == pytest.approx(bars[1].count("█") / 2, abs=1)
    assert bars[1].endswith("600   66.6%")
    assert bars[2].split()[1:] == ["0", "0.0%"]
    assert "▏" in bars[3], "one update is little, but not nothing"
    assert bars[4] == "mean 0.669, median 1, 99% within 1, at most 3, in 901 updates"


def test_a_wide_histogram_is_drawn_in_ranges() -> None:
    text = text_of(started(plan()), exchanged(0, 10, staleness={0: 5, 250: 3}))
    bars = [line for line in text.splitlines() if line.endswith("%")]
    assert len(bars) <= 12
    assert bars[0].split()[0] == "0-20"
    assert bars[-1].split()[0] == "231-251"


def test_disagreement_is_drawn_as_a_curve_over_the_steps() -> None:
    events = [exchanged(rank, step, disagreement=1 / step) for step in range(10, 1000, 10) for rank in (0, 1)]
    lines = text_of(started(plan()), *events).splitlines()
    at = lines.index("Disagreement")
    assert lines[at + 2].startswith("   10% ┤")
    assert lines[at + 6].startswith("0.101% ┤")
    assert lines[at + 8].split() == ["step", "10", "step", "990"]
    assert lines[at + 9] == "10% at first, 0.101% at last, at most 10%"


def test_a_single_disagreement_is_a_sentence() -> None:
    text = in_one_line(started(plan()), exchanged(0, 10, disagreement=0.0123))
    assert "1.23%" in text
    assert "┤" not in text


def test_each_round_of_a_tournament_is_a_line() -> None:
    text = text_of(
        started(plan(4)),
        *contest(0, 2, round_=1, scores=(0.112, 0.131)),
        *contest(1, 3, round_=1, scores=(0.1200001, 0.1200002)),
        *contest(3, 0, round_=2, scores=(0.05, 0.06)),
        *(exchanged(rank, 200) for rank in range(4)),
    )
    assert "2 rounds, 3 matches; 3 models" in text
    assert "round 1: 0 beat 2 (0.112 < 0.131); 1 beat 3 (0.1200001 < 0.1200002)" in text
    assert "round 2: 3 beat 0 (0.05 < 0.06)" in text


def test_the_winner_is_followed_back_to_where_its_model_began() -> None:
    events = [
        *contest(2, 0, round_=1), *contest(3, 1, round_=1),
        *contest(0, 3, round_=2, scores=(0.08, 0.1)), *contest(1, 2, round_=2),
        *contest(3, 2, round_=3, scores=(0.05, 0.06)), *contest(0, 1, round_=3, scores=(0.07, 0.09)),
    ]  # fmt: skip
    stats = strategy_stats([started(plan(4)), *events])
    assert stats.ancestry == (Ancestor(2, None), Ancestor(0, 1), Ancestor(3, 2))
    assert stats.origins == {0: 2, 1: 2, 2: 2, 3: 2}
    text = in_one_line(started(plan(4)), *events, exchanged(0, 300))
    assert "Best after the last round: worker 3 (0.05, lr 0.05)." in text
    assert "worker 2: 2 -> 0 (round 1) -> 3 (round 2)" in text
    assert "All 4 workers" in text


def test_where_higher_scores_win_the_highest_is_the_best() -> None:
    events = [*contest(0, 1, round_=1, scores=(0.9, 0.8)), *contest(2, 3, round_=1, scores=(0.95, 0.7))]
    stats = strategy_stats([started(plan(4)), *events])
    assert stats.ancestry == (Ancestor(2, None),)
    text = in_one_line(started(plan(4)), *events, exchanged(0, 100))
    assert "0 beat 1 (0.9 > 0.8)" in text
    assert "2 of 4 workers" in text


@pytest.mark.parametrize("teller", [0, 1])
def test_a_match_is_known_if_only_one_side_reported_it(teller: int) -> None:
    stats = strategy_stats([started(plan()), contest(0, 1, round_=1)[teller]])
    (match,) = stats.rounds[0].matches
    assert (match.workers, match.winner) == ((0, 1), 0)
    assert stats.origins == {0: 0, 1: 0}
    assert stats.ancestry[0] == Ancestor(0, None)
    assert "round 1: 0 beat 1 (0.1 < 0.2)" in as_lines(stats)


def test_workers_that_judge_by_data_of_their_own_may_both_keep_their_model_or_swap() -> None:
    def both(adopted: bool, *scores: tuple[float, float]) -> list[Event]:
        return [
            TournamentMatch(
                worker_id=r, opponent_id=1 - r, step=9, round=1, own_score=own, opponent_score=rival, adopted=adopted
            )
            for r, (own, rival) in enumerate(scores)
        ]

    kept, swapped = both(False, (0.1, 0.2), (0.3, 0.4)), both(True, (0.2, 0.1), (0.4, 0.05))
    assert "round 1: 0 and 1 each kept their own (0.1 < 0.2, 0.3 < 0.4)" in text_of(started(plan()), *kept)
    assert "round 1: 0 and 1 swapped models (0.2 > 0.1, 0.4 > 0.05)" in text_of(started(plan()), *swapped)
    assert strategy_stats(kept).origins == {0: 0, 1: 1}
    assert strategy_stats(kept).ancestry == (Ancestor(0, None),)
    assert strategy_stats(swapped).origins == {0: 1, 1: 0}
    assert strategy_stats(swapped).ancestry == (Ancestor(0, None), Ancestor(1, 1)), (
        "as the worker that holds it scored it"
    )


def test_of_many_rounds_the_first_and_the_last_are_shown() -> None:
    events = [event for i in range(1, 101) for event in contest(i % 2, 1 - i % 2, round_=i)]
    lines = text_of(started(plan()), *events, exchanged(0, 10)).splitlines()
    shown = [line for line in lines if line.startswith("round ")]
    assert len(shown) == 20
    assert shown[0].startswith("round   1: 1 beat 0")
    assert shown[-1].startswith("round 100: 0 beat 1")
    assert any("80 more rounds" in line for line in lines)


def everything(workers: int = 4) -> list[Event]:
    events: list[Event] = [started(plan(workers, strategy="allreduce until epoch 1, then ltfb(rounds=3, perturb=0.2)"))]
    events += [StrategySwitched(step=469, strategy=f"ltfb({'very' * 30})")]
    for step in range(100, 1100, 100):
        for rank in range(workers):
            events.append(
                exchanged(
                    rank,
                    step,
                    sent=10**9,
                    bytes_received=10**8,
                    staleness={step // 100: 12_345, 2: 1},
                    disagreement=1 / step,
                )
            )
        for rank in range(0, workers - 1, 2):
            events += contest(rank, rank + 1, round_=step // 100)
    return events


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("workers", [2, 4, 64])
def test_every_line_fits_the_width(width: int, workers: int) -> None:
    for line in as_lines(strategy_stats(everything(workers)), width=width):
        assert len(line) <= width, line


def test_a_stream_without_unicode_gets_ascii() -> None:
    class Ascii(io.StringIO):
        encoding = "ascii"

    stream = Ascii()
    show(strategy_stats(everything()), stream)
    assert stream.getvalue().isascii()
    assert "####" in stream.getvalue()


def test_only_a_terminal_gets_escape_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stats = strategy_stats(everything())
    plain, terminal = io.StringIO(), Terminal()
    show(stats, plain)
    show(stats, terminal)
    assert "\x1b" not in plain.getvalue()
    assert "\x1b[1m" in terminal.getvalue()


def test_nothing_in_the_events_can_move_the_cursor() -> None:
    nasty = "\x1b[2J\x1b[31mred\r\x00"
    event = replace_strategy(started(plan()), nasty)
    text = text_of(event, StrategySwitched(step=1, strategy=nasty), exchanged(0, 10))
    assert not set(text) & {chr(c) for c in (*range(10), *range(11, 32), 127)}


def replace_strategy(event: RunStarted, strategy: str) -> RunStarted:
    return RunStarted(run_dir=event.run_dir, plan={**event.plan, "strategy": strategy}, machine={})


@pytest.mark.parametrize(
    ("events", "sentence"),
    [
        ([], "events.jsonl"),
        ([started(plan(1)), summary(1)], "one worker"),
        ([started(plan(1)), exchanged(0, 10, exchanges=0, sent=0)], "one worker"),
        ([started(plan()), progress(0, step=3, after_s=1)], "No exchange recorded yet"),
        ([started(plan()), summary()], "No exchange recorded: "),
        ([started(plan()), exchanged(0, 10, exchanges=0, sent=0)], "No exchange in 10 steps"),
    ],
)
def test_a_run_without_exchanges_says_why(events: list[Event], sentence: str) -> None:
    assert sentence in in_one_line(*events)


def test_the_command_reads_a_run_that_crashed_in_the_middle_of_a_line(tmp_path: Path) -> None:
    run = written(tmp_path / "run", started(plan()), exchanged(0, 10), exchanged(1, 10))
    whole = (run / "events.jsonl").read_bytes()
    (run / "events.jsonl").write_bytes(whole + b'not JSON\n{"event":"exchange_stats","worker_id":0,"st')
    done = CliRunner().invoke(app, ["strategies", "--run", str(run)])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[0] == "lenet on mnist, 2 workers, allreduce: 10 steps so far"
    assert "\x1b" not in done.output


def test_the_command_gives_the_whole_account_as_one_json_object(tmp_path: Path) -> None:
    run = written(tmp_path / "run", *everything())
    done = CliRunner().invoke(app, ["strategies", "--run", str(run), "--json"])
    assert done.exit_code == 0, done.output
    (line,) = done.output.splitlines()
    data = json.loads(line)
    assert data["workers"] == 4
    assert len(data["shares"]) == 4
    assert data["bytes_sent_per_step"] == 10**8
    assert data["staleness"]["counts"]["3"] == 4 * 12_345
    assert data["staleness"]["p99"] == 10
    assert data["disagreement"][0] == [100, 0.01]
    assert data["switches"][0]["step"] == 469
    assert data["rounds"][0]["matches"][0]["verdicts"][1] == {
        "own_score": 0.2, "opponent_score": 0.1, "adopted": True, "hyperparameters": {},
    }  # fmt: skip
    assert data["ancestry"] == [{"worker_id": 0, "round": None}]
    assert data["origins"] == {"0": 0, "1": 0, "2": 2, "3": 2}


def test_numbers_that_json_cannot_hold_become_null() -> None:
    stats = strategy_stats([started(plan()), *contest(0, 1, round_=1, scores=(0.1, float("inf")))])
    assert json.loads(as_json(stats))["rounds"][0]["matches"][0]["verdicts"][0]["opponent_score"] is None


def test_an_account_can_be_made_of_nothing() -> None:
    stats = strategy_stats([])
    assert isinstance(stats, StrategyStats)
    assert json.loads(as_json(stats))["status"] == "no events"
    assert replace(stats, workers=3).workers == 3


def test_a_folder_that_is_no_run_is_answered_as_everywhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a run directory: it has no plan\.json"):
        CliRunner().invoke(app, ["strategies", "--run", str(tmp_path / "no")], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--json"], "--json.*--run RUN.*--compare"),
        (["--epochs", "2"], "--epochs.*--compare"),
        (["--run", "runs/x", "--only", "sparknet"], "--only.*--compare"),
        (["--run", "runs/x", "--compare"], "--run.*--compare"),
    ],
)
def test_conflicting_options_are_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CliRunner().invoke(app, ["strategies", *arguments], catch_exceptions=False)
