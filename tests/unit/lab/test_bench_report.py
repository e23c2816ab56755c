"""What a bench tells: tables, words and files, from measurements that are made up."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from syncline.lab.bench.command import write
from syncline.lab.bench.harness import Contender, ContenderOutcome, Goal, Suite, SuiteResult
from syncline.lab.bench.report import Report, as_dict, as_lines, as_markdown, describe_verdict, show
from syncline.lab.machine import BenchMachine

MACHINE = BenchMachine(
    processor="A Processor", cores=2, memory_bytes=16_000_000_000, system="Linux", python="3.11.7", torch="2.13.0",
    syncline="0.1.0", load_at_start=0.1,
)  # fmt: skip


def result(ours: list[float | None], *, limit: float = 1.03, failures: tuple[str, ...] = ()) -> SuiteResult:
    suite = Suite(
        name="speed",
        measures="Time of a thing.",
        unit="ms",
        baseline="theirs",
        contenders=(
            Contender(name="theirs", measure=float, what="The usual way."),
            Contender(name="ours", measure=float, what="Our way."),
        ),
        goals=(Goal(contender="ours", limit=limit),),
    )
    outcomes = {"theirs": ContenderOutcome([10.0] * len(ours)), "ours": ContenderOutcome(ours, list(failures))}
    return SuiteResult(suite, len(ours), outcomes)


def report(*results: SuiteResult, **more) -> Report:
    return Report(MACHINE, is_quick=more.pop("is_quick", False), results=list(results), **more)


def words(found: SuiteResult) -> str:
    return describe_verdict(found, found.verdicts()[0])


def test_a_met_goal_shows_ratio_spread_and_agreement() -> None:
    found = words(result([10.1, 10.2, 10.0, 10.2, 10.1]))
    for fact in ("Goal met", "at most 1.03 times 'theirs'", "1.010 (1.010–1.020)", "1.0% more", "5 of 5 rounds"):
        assert fact in found


def test_a_missed_goal_is_shown_as_plainly() -> None:
    assert words(result([12.0, 12.0, 12.5])).startswith("Goal NOT met: ")
    assert "20.0% more; 3 of 3 rounds" in words(result([12.0, 12.0, 12.5]))


def test_disagreeing_rounds_are_called_uncertain() -> None:
    assert words(result([10.0, 10.2, 11.0, 11.0, 10.1])).endswith("3 of 5 rounds agree, so this is uncertain.")


def test_less_than_the_baseline_is_called_less() -> None:
    assert "0.500 (0.500–0.500), 50.0% less" in words(result([5.0, 5.0]))


def test_a_goal_that_could_not_be_judged_says_why() -> None:
    assert words(result([None, None])).startswith("Goal not judged: 'ours' at most 1.03 times 'theirs'")


def test_a_goal_names_the_contender_it_is_compared_with() -> None:
    found = result([10.0, 10.0])
    found.suite = replace(found.suite, goals=(Goal(contender="theirs", limit=1.0, against="ours"),))
    assert words(found).startswith("Goal met: 'theirs' at most 1.00 times 'ours'; measured 1.000")
    assert as_dict(report(found))["suites"][0]["goals"][0]["against"] == "ours"


def test_plain_lines_show_median_spread_ratio_machine_and_goal() -> None:
    text = "\n".join(as_lines(report(result([20.0, 21.0, 22.0]))))
    assert "speed: Time of a thing." in text
    assert "21 ms" in text
    assert "20.5–21.5" in text
    assert "2.100 (2.050–2.150)" in text
    assert "1 (baseline)" in text
    assert "Goal NOT met" in text
    assert "A Processor, 2 cores, 16 GB of memory" in text


def test_a_failed_contender_is_in_the_table_and_its_error_below() -> None:
    shown = "\n".join(as_lines(report(result([None, None], failures=("OSError: no such program",) * 2))))
    assert "ours (failed)" in shown
    assert "speed: ours failed twice and was skipped. OSError: no such program" in shown


def test_a_terminal_gets_the_same_facts_in_colors() -> None:
    stream = io.StringIO()
    show(report(result([10.0, 10.1])), Console(file=stream, force_terminal=True, width=150, color_system="standard"))
    assert "\x1b[" in stream.getvalue()
    assert "Goal met" in stream.getvalue()


def test_output_to_a_file_has_neither_colors_nor_wrapped_lines() -> None:
    stream = io.StringIO()
    show(report(result([10.0, 10.1])), Console(file=stream, width=40))
    assert stream.getvalue() == "".join(f"{line}\n" for line in as_lines(report(result([10.0, 10.1]))))


def test_a_busy_machine_is_mentioned() -> None:
    busy = Report(replace(MACHINE, load_at_start=3.2), is_quick=False)
    assert "load average at the start was 3.2 on 2 cores: other processes were running" in as_markdown(busy)
    assert "other processes" not in as_markdown(report())


def test_quick_and_interrupted_benches_say_so() -> None:
    text = as_markdown(report(is_quick=True, is_interrupted=True))
    assert "quick bench" in text
    assert "interrupted" in text


def test_an_interrupted_suite_shows_its_progress() -> None:
    found = replace(result([10.0, None]), is_interrupted=True, rounds=5)
    assert "Interrupted in round 2 of 5." in "\n".join(as_lines(report(found)))
    found = replace(result([]), is_interrupted=True, rounds=5)
    assert "Interrupted during warm-up." in "\n".join(as_lines(report(found)))


def test_the_page_explains_its_contenders() -> None:
    page = as_markdown(report(result([10.0])))
    assert "| ours | 10 ms | 10–10 | 1.000 (1.000–1.000) |" in page
    assert "- **ours**: Our way." in page


def test_the_data_holds_every_measurement_and_is_valid_json() -> None:
    data = json.loads(json.dumps(as_dict(report(result([20.0, None, 22.0])))))
    (suite,) = data["suites"]
    theirs, ours = suite["contenders"]
    assert ours["values"] == [20.0, None, 22.0]
    assert ours["ratios"] == [2.0, 2.2]
    assert ours["ratio"]["median"] == pytest.approx(2.1)
    assert theirs["spread"] == {"median": 10, "low": 10, "high": 10, "least": 10, "most": 10, "count": 3}
    assert suite["goals"][0]["is_met"] is False
    assert data["machine"]["cores"] == 2


def test_writing_creates_all_files(tmp_path: Path) -> None:
    write(report(result([10.0])), tmp_path)
    assert (tmp_path / "bench.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert (tmp_path / "bench.md").read_text().startswith("# Syncline bench")
    assert json.loads((tmp_path / "bench.json").read_text())["suites"][0]["name"] == "speed"


def test_this_machine_can_be_described() -> None:
    here = BenchMachine.here()
    assert here.cores >= 1
    assert here.memory_bytes > 0
    assert here.torch.startswith("2.")
