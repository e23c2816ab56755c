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
from syncline.telemetry.events import Contest, Event, Exchanged, RunEnded, RunStarted, StrategySwitched, WorkerReady
from syncline.telemetry.run_dir import EventLog, RunDir
from syncline.view.strategy_account import Ancestor, Staleness, StrategyAccount, account_of
from syncline.view.strategy_report import as_json, as_lines, show


def exchanged(rank: int, step: int, *, steps: int = 10, sent: int = 1000, **more: Any) -> Exchanged:
    return Exchanged(rank=rank, step=step, bytes_sent=sent, **{"steps": steps, "exchanges": 1, **more})


def contest(
    winner: int, loser: int, round_: int, scores: tuple[float, float] = (0.1, 0.2), step: int | None = None
) -> list[Event]:
    """A match as both tell of it, the loser first."""
    at = step if step is not None else 100 * round_
    common = {"step": at, "round": round_}
    return [
        Contest(rank=loser, rival=winner, own_score=scores[1], rival_score=scores[0], took_over=True, **common),
        Contest(rank=winner, rival=loser, own_score=scores[0], rival_score=scores[1], took_over=False,
                hyperparameters={"lr": 0.05}, **common),
    ]  # fmt: skip


def started_with(strategy: str, workers: int = 2, *, at: int | None = None, **more: Any) -> RunStarted:
    event = started(plan(workers, strategy=strategy), resumed_from_step=at)
    return RunStarted(time=event.time, run_dir=event.run_dir, plan={**event.plan, **more}, machine=event.machine,
                      resumed_from_step=at)  # fmt: skip


def text_of(*events: Event, **options: Any) -> str:
    return "\n".join(as_lines(account_of(events), **options))


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
    account = account_of(
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
    assert (account.strategy, account.workers, account.steps, account.status) == ("sparknet", 3, 30, "not ended")
    assert [(s.rank, s.steps, s.exchanges, s.bytes_sent) for s in account.shares] == [
        (0, 12, 2, 400), (1, 30, 2, 800), (2, 10, 1, 100),
    ]  # fmt: skip
    assert account.exchanges == 5
    assert account.bytes_sent_per_step == 1300 / 52
    assert account.bytes_received_per_step == 7 / 52
    assert account.bytes_per_sample == 1307 / 160


def test_without_samples_there_is_nothing_to_divide_by() -> None:
    events = [started(own_loop_plan()), exchanged(0, 10)]
    assert account_of(events).bytes_per_sample is None
    assert "All workers together moved 1.0 kB." in in_one_line(*events)


def test_the_staleness_of_all_workers_is_one_histogram() -> None:
    account = account_of(
        [
            started(plan()),
            exchanged(0, 10, staleness={0: 90, 1: 5}),
            exchanged(1, 10, staleness={1: 3, 9: 1}),
            exchanged(0, 20, staleness={2: 1}),
        ]
    )
    found = account.staleness
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
    account = account_of(
        [
            started(plan()),
            exchanged(0, 10, disagreement=0.2),
            exchanged(1, 10, disagreement=0.4),
            exchanged(1, 20, disagreement=0.1),
            exchanged(0, 20, disagreement=0.3),
            exchanged(0, 30),
        ]
    )
    assert account.disagreement == ((10, pytest.approx(0.3)), (20, pytest.approx(0.2)))


def test_workers_that_report_at_other_steps_count_with_what_was_last_seen_of_them() -> None:
    events = [exchanged(0, 10, disagreement=0.2), exchanged(1, 13, disagreement=0.4), exchanged(0, 20, disagreement=0)]
    account = account_of([started(plan()), *events])
    assert account.disagreement == ((10, 0.2), (13, pytest.approx(0.3)), (20, pytest.approx(0.2)))


def test_disagreement_that_is_not_a_number_is_left_out() -> None:
    account = account_of([started(plan()), exchanged(0, 10, disagreement=float("nan")), exchanged(0, 20)])
    assert account.disagreement == ()


def test_the_disagreement_of_a_very_long_run_stays_small() -> None:
    events = [exchanged(0, step, disagreement=1 / step) for step in range(1, 20_000)]
    assert 100 <= len(account_of([started(plan()), *events]).disagreement) <= 256


def test_a_resumed_run_counts_all_work_and_tells_the_story_from_its_checkpoint_on() -> None:
    account = account_of(
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
    assert account.steps == 200
    assert account.status == "not ended"
    assert account.shares[0].steps == 300, "a hundred steps were done twice"
    assert account.bytes_sent == 3000
    assert account.samples == 300
    assert account.disagreement == ((100, 0.5), (200, 0.1))
    assert [(r.number, r.matches[0].verdicts[0].own_score) for r in account.rounds] == [(1, 0.1), (2, 0.3)]
    assert account.switches == ()


def test_a_run_that_goes_on_with_another_strategy_has_switched() -> None:
    events = [started_with("allreduce"), exchanged(0, 50), started_with("sparknet", at=40), exchanged(0, 60)]
    account = account_of(events)
    assert account.strategy == "sparknet"
    assert account.switches == ((40, "sparknet"),)
    assert "from step 40 on: sparknet" in text_of(*events)


def test_a_switch_that_every_worker_tells_of_is_one_switch() -> None:
    events = [started(plan()), *[StrategySwitched(step=469, strategy="sparknet(10)")] * 2, exchanged(0, 500)]
    assert account_of(events).switches == ((469, "sparknet(10)"),)


def test_measured_bytes_stand_beside_those_of_theory() -> None:
    def sentence(sent: int) -> str:
        return in_one_line(started_with("onebit", expected_bytes_per_step=10_000), exchanged(0, 10, sent=sent))

    assert "A worker sends 10.1 kB (1.2% more than the 10.0 kB of theory) a step." in sentence(101_200)
    assert "A worker sends 9.0 kB (10.0% less than the 10.0 kB of theory) a step." in sentence(90_000)
    assert "A worker sends 10.0 kB (as in theory) a step." in sentence(100_001)
    assert "A worker sends 40.0 kB (4 times the 10.0 kB of theory) a step." in sentence(400_000)


def test_what_workers_expect_goes_before_what_the_plan_expects() -> None:
    ready = WorkerReady(rank=0, pid=1, parameters=5, collective="SharedMemory", expected_bytes_per_step=100.0)
    account = account_of([started_with("onebit", expected_bytes_per_step=7), ready, exchanged(0, 10)])
    assert account.expected_bytes_per_step == 100
    assert "A worker sends 100 bytes (as in theory) a step." in "\n".join(as_lines(account))


@pytest.mark.parametrize("more", [[StrategySwitched(step=5, strategy="sparknet")], []])
def test_several_strategies_are_not_judged_by_the_theory_of_one(more: list[Event]) -> None:
    strategy = "onebit" if more else "allreduce until epoch 1, then onebit"
    assert "theory" not in text_of(started_with(strategy, expected_bytes_per_step=7), *more, exchanged(0, 10))


def test_workers_that_share_their_memory_send_nothing() -> None:
    assert "Nothing had to be sent for that." in in_one_line(started(plan()), exchanged(0, 10, sent=0, exchanges=10))


@pytest.mark.parametrize("expected", [None, "much", 0, float("nan"), True])
def test_a_plan_that_expects_nothing_useful_is_no_obstacle(expected: object) -> None:
    assert "theory" not in text_of(started_with("onebit", expected_bytes_per_step=expected), exchanged(0, 10))


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
    assert ended.splitlines()[0] == f"{title}ended after 300 steps, before its time"


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
    assert "the workers were 1.23% away from what they have in common" in text
    assert "┤" not in text


def test_each_round_of_a_tournament_is_a_line() -> None:
    text = text_of(
        started(plan(4)),
        *contest(0, 2, round_=1, scores=(0.112, 0.131)),
        *contest(1, 3, round_=1, scores=(0.1200001, 0.1200002)),
        *contest(3, 0, round_=2, scores=(0.05, 0.06)),
        *(exchanged(rank, 200) for rank in range(4)),
    )
    assert "2 rounds, 3 contests; 3 models were taken over" in text
    assert "round 1: 0 beat 2 (0.112 < 0.131); 1 beat 3 (0.1200001 < 0.1200002)" in text
    assert "round 2: 3 beat 0 (0.05 < 0.06)" in text


def test_the_winner_is_followed_back_to_where_its_model_began() -> None:
    events = [
        *contest(2, 0, round_=1), *contest(3, 1, round_=1),
        *contest(0, 3, round_=2, scores=(0.08, 0.1)), *contest(1, 2, round_=2),
        *contest(3, 2, round_=3, scores=(0.05, 0.06)), *contest(0, 1, round_=3, scores=(0.07, 0.09)),
    ]  # fmt: skip
    account = account_of([started(plan(4)), *events])
    assert account.ancestry == (Ancestor(2, None), Ancestor(0, 1), Ancestor(3, 2))
    assert account.origins == {0: 2, 1: 2, 2: 2, 3: 2}
    text = in_one_line(started(plan(4)), *events, exchanged(0, 300))
    assert "Best after the last round: worker 3 (0.05, lr 0.05)." in text
    assert "Its model began with worker 2: 2 -> 0 (round 1) -> 3 (round 2)." in text
    assert "All 4 workers go on with descendants of worker 2's model." in text


def test_where_higher_scores_win_the_highest_is_the_best() -> None:
    events = [*contest(0, 1, round_=1, scores=(0.9, 0.8)), *contest(2, 3, round_=1, scores=(0.95, 0.7))]
    account = account_of([started(plan(4)), *events])
    assert account.ancestry == (Ancestor(2, None),)
    text = in_one_line(started(plan(4)), *events, exchanged(0, 100))
    assert "0 beat 1 (0.9 > 0.8)" in text
    assert "Its model was its own all along. 2 of 4 workers go on with descendants of that model." in text


@pytest.mark.parametrize("teller", [0, 1])
def test_a_match_is_known_though_only_one_side_lived_to_tell(teller: int) -> None:
    account = account_of([started(plan()), contest(0, 1, round_=1)[teller]])
    (match,) = account.rounds[0].matches
    assert (match.workers, match.winner) == ((0, 1), 0)
    assert account.origins == {0: 0, 1: 0}
    assert account.ancestry[0] == Ancestor(0, None)
    assert "round 1: 0 beat 1 (0.1 < 0.2)" in as_lines(account)


def test_workers_that_judge_by_data_of_their_own_may_both_keep_their_model_or_swap() -> None:
    def both(took_over: bool, *scores: tuple[float, float]) -> list[Event]:
        return [
            Contest(rank=r, rival=1 - r, step=9, round=1, own_score=own, rival_score=rival, took_over=took_over)
            for r, (own, rival) in enumerate(scores)
        ]

    kept, swapped = both(False, (0.1, 0.2), (0.3, 0.4)), both(True, (0.2, 0.1), (0.4, 0.05))
    assert "round 1: 0 and 1 each kept its own (0.1 < 0.2, 0.3 < 0.4)" in text_of(started(plan()), *kept)
    assert "round 1: 0 and 1 took each other's (0.2 > 0.1, 0.4 > 0.05)" in text_of(started(plan()), *swapped)
    assert account_of(kept).origins == {0: 0, 1: 1}
    assert account_of(kept).ancestry == (Ancestor(0, None),)
    assert account_of(swapped).origins == {0: 1, 1: 0}
    assert account_of(swapped).ancestry == (Ancestor(0, None), Ancestor(1, 1)), "as the worker that holds it scored it"


def test_of_many_rounds_the_first_and_the_last_are_shown() -> None:
    events = [event for i in range(1, 101) for event in contest(i % 2, 1 - i % 2, round_=i)]
    lines = text_of(started(plan()), *events, exchanged(0, 10)).splitlines()
    shown = [line for line in lines if line.startswith("round ")]
    assert len(shown) == 20
    assert shown[0].startswith("round   1: 1 beat 0")
    assert shown[-1].startswith("round 100: 0 beat 1")
    assert "  ... 80 rounds more; --json has them all" in lines


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
    for line in as_lines(account_of(everything(workers)), width=width):
        assert len(line) <= width, line


def test_a_stream_without_unicode_gets_ascii() -> None:
    class Ascii(io.StringIO):
        encoding = "ascii"

    stream = Ascii()
    show(account_of(everything()), stream)
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
    account = account_of(everything())
    plain, terminal = io.StringIO(), Terminal()
    show(account, plain)
    show(account, terminal)
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
        ([], "Nothing has been written to events.jsonl"),
        ([started(plan(1)), summary(1)], "One worker trains by itself: there is nobody to agree with"),
        ([started(plan(1)), exchanged(0, 10, exchanges=0, sent=0)], "One worker trains by itself"),
        ([started(plan()), progress(0, step=3, after_s=1)], "No worker has told of an exchange yet"),
        ([started(plan()), summary()], "No worker told of an exchange: the run ended before the first one"),
        ([started(plan()), exchanged(0, 10, exchanges=0, sent=0)], "There was no exchange in 10 steps."),
    ],
)
def test_a_run_without_anything_to_tell_gets_a_sentence(events: list[Event], sentence: str) -> None:
    assert sentence in in_one_line(*events)


def test_the_command_tells_of_a_run_that_crashed_in_the_middle_of_a_line(tmp_path: Path) -> None:
    run = written(tmp_path / "run", started(plan()), exchanged(0, 10), exchanged(1, 10))
    whole = (run / "events.jsonl").read_bytes()
    (run / "events.jsonl").write_bytes(whole + b'not JSON\n{"event":"exchanged","rank":0,"st')
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
        "own_score": 0.2, "rival_score": 0.1, "took_over": True, "hyperparameters": {},
    }  # fmt: skip
    assert data["ancestry"] == [{"rank": 0, "round": None}]
    assert data["origins"] == {"0": 0, "1": 0, "2": 2, "3": 2}


def test_numbers_that_json_cannot_hold_become_null() -> None:
    account = account_of([started(plan()), *contest(0, 1, round_=1, scores=(0.1, float("inf")))])
    assert json.loads(as_json(account))["rounds"][0]["matches"][0]["verdicts"][0]["rival_score"] is None


def test_an_account_can_be_made_of_nothing() -> None:
    account = account_of([])
    assert isinstance(account, StrategyAccount)
    assert json.loads(as_json(account))["status"] == "no events"
    assert replace(account, workers=3).workers == 3


def test_a_folder_that_is_no_run_is_answered_as_everywhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a run directory: it has no plan\.json"):
        CliRunner().invoke(app, ["strategies", "--run", str(tmp_path / "no")], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--json"], "--json goes with --run RUN or with --compare"),
        (["--epochs", "2"], "--epochs is a setting of a comparison. Add --compare"),
        (["--run", "runs/x", "--only", "sparknet"], "--only is a setting of a comparison"),
        (["--run", "runs/x", "--compare"], "Give one of the two"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CliRunner().invoke(app, ["strategies", *arguments], catch_exceptions=False)
