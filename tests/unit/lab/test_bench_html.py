"""The page that a bench leaves: from measurements that are made up, read by a strict parser."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.lab.bench.bars import BarAxis, axis_for, draw_bar, ticks
from syncline.lab.bench.comparisons import better, comparison, describe_finding, describe_goal, factor, range_of
from syncline.lab.bench.harness import Contender, ContenderOutcome, Goal, Suite, SuiteResult
from syncline.lab.bench.html import as_html
from syncline.lab.bench.report import Report
from syncline.lab.machine import BenchMachine
from syncline.lab.statistics import spread

MACHINE = BenchMachine(
    processor="A Processor", cores=2, memory_bytes=16_000_000_000, system="Linux", python="3.11.7", torch="2.13.0",
    syncline="0.1.0", load_at_start=0.1,
)  # fmt: skip
NASTY = "<script>alert('x')</script> & \"quotes\" \x1b[31mred\x1b[0m \x00"
VOID = {"meta"}


class Page(HTMLParser):
    """Its text, its elements, and whether each was closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    def all(self, tag: str, kind: str = "") -> list[dict[str, str]]:
        return [a for t, a in self.elements if t == tag and kind in ["", *a.get("class", "").split()]]


def suite_of(values: dict[str, list[float | None]], unit: str = "ms", goals: tuple[Goal, ...] = (), **more) -> Suite:
    contenders = tuple(Contender(name=name, measure=float, what=f"What {name} is.") for name in values)
    return Suite(
        name=more.pop("name", "speed"), measures="Time of a thing.", unit=unit, baseline=next(iter(values)),
        contenders=contenders, goals=goals, **more,
    )  # fmt: skip


def result(values: dict[str, list[float | None]], failures: dict[str, list[str]] | None = None, **more) -> SuiteResult:
    kept = {k: more.pop(k) for k in ("is_interrupted", "entry") if k in more}
    suite = suite_of(values, **more)
    outcomes = {name: ContenderOutcome(list(found), (failures or {}).get(name, [])) for name, found in values.items()}
    return SuiteResult(suite, max(map(len, values.values())), outcomes, **kept)


def page(*results: SuiteResult, **more) -> Page:
    return Page(as_html(Report(MACHINE, is_quick=more.pop("is_quick", False), results=list(results), **more)))


GOAL = (Goal(contender="ours", limit=0.1),)


def test_the_page_explains_syncline_the_machine_and_the_results() -> None:
    found = page(result({"theirs": [10.0] * 3, "ours": [5.0] * 3}, goals=GOAL, entry="speed"))
    for words in (
        "Syncline trains PyTorch models",
        "A Processor, 2 cores",
        "0 of 1 goal met, 1 not met.",
        "✗ not met",
        "ours: 2.00 times as fast as theirs (2.00–2.00, 3 of 3 rounds)",
        "at least 10 times as fast as theirs",
        "Time of a thing. 3 rounds.",
        "What ours is.",
        "ms, less is better",
        "syncline bench speed --repeats 3",
    ):
        assert words in found.text


def test_the_summary_links_to_every_suite() -> None:
    found = page(result({"a": [1.0]}, name="one"), result({"a": [1.0], "ours": [1.0]}, name="two", goals=GOAL))
    targets = {a["href"] for a in found.all("a")}
    assert targets == {"#suite-0", "#suite-1"}
    assert {f"#{a['id']}" for a in found.all("section", "suite")} == targets
    assert "Measured without a goal: one." in found.text


def test_each_contender_has_a_bar_a_whisker_and_a_dot_for_every_round() -> None:
    found = page(result({"a": [1.0, 2.0, 3.0], "b": [2.0, None, 4.0]}))
    assert len(found.all("svg", "bar")) == 2
    assert len(found.all("rect", "fill")) == 2
    assert len(found.all("line", "median")) == 2
    assert len(found.all("line", "whisker")) == 6
    assert len(found.all("circle")) == 5
    assert "round 3: 4 ms" in found.text


def test_the_page_needs_nothing_from_outside() -> None:
    text = as_html(Report(MACHINE, is_quick=True, results=[result({"a": [1.0], "ours": [2.0]}, goals=GOAL)]))
    assert not re.search(r"https?:|//[a-z]|url\(|@import|<script|<link|<img|<iframe|\ssrc=", text)
    assert "default-src 'none'" in text
    assert all(a["href"].startswith("#") for a in Page(text).all("a"))


def test_quoted_output_is_escaped() -> None:
    contenders = (Contender(name=f"a {NASTY}", measure=float, what=NASTY), Contender(name="b", measure=float))
    suite = Suite(
        name=f"s {NASTY}", measures=NASTY, unit="<b>&", contenders=contenders, baseline="b",
        goals=(Goal(contender=f"a {NASTY}", limit=1.0),),
    )  # fmt: skip
    outcomes = {contenders[0].name: ContenderOutcome([1.0, 2.0], [NASTY, NASTY]), "b": ContenderOutcome([1.0, 1.0])}
    nasty = SuiteResult(suite, 2, outcomes, entry=NASTY)
    text = as_html(Report(MACHINE, is_quick=False, results=[nasty], problems=[NASTY]))
    found = Page(text)
    assert not found.all("script")
    assert "<script>alert('x')</script> & \"quotes\" red" in found.text
    assert "\x1b" not in text
    assert "\x00" not in text


def test_failures_are_shown_with_their_errors() -> None:
    found = page(
        result(
            {"a": [1.0, 1.0], "ours": [None, None]},
            failures={"ours": ["OSError: one", "OSError: no such program\nTry another."]},
            goals=GOAL,
        ),
        problems=["servers could not be measured. ValueError: no"],
    )
    assert "ours failed twice and was skipped. OSError: no such program Try another." in found.text
    assert "Failures servers could not be measured. ValueError: no" in found.text
    assert "Some measurements failed" in found.text
    assert "? not judged" in found.text
    assert "1 not judged" in found.text


def test_quick_interrupted_and_empty_reports_say_so() -> None:
    found = page(
        result({"a": [], "ours": []}, is_interrupted=True, goals=GOAL), is_quick=True, is_interrupted=True
    )  # nobody was measured even once
    assert "quick bench" in found.text
    assert "interrupted" in found.text
    assert "Interrupted during warm-up." in found.text
    assert "no value" in found.text
    assert "Nothing was measured." in page().text


def test_values_of_zero_have_bars_too() -> None:
    found = page(result({"a": [0.0, 0.0], "ours": [0.0, 0.0]}, unit="MB", goals=GOAL))
    assert [r["width"] for r in found.all("rect", "fill")] == ["0.00%", "0.00%"]
    assert "no round measured both ours and a" in found.text


def test_very_different_magnitudes_get_a_logarithmic_axis() -> None:
    found = page(result({"a": [4000.0] * 3, "b": [0.02] * 3, "c": [1.0] * 3}))
    assert "logarithmic scale" in found.text
    assert not found.all("rect", "fill"), "the length of a bar would mean nothing"
    ends = [float(a["x2"].rstrip("%")) for a in found.all("line", "stem")]
    assert ends[0] > ends[2] > ends[1] > 2


def test_one_outlier_does_not_shrink_all_bars() -> None:
    found = page(result({"a": [1.0] * 9 + [100.0], "b": [1.0] * 10}))
    assert len(found.all("circle", "beyond")) == 1
    assert "a ring at the edge" in found.text
    assert all(float(r["width"].rstrip("%")) >= 50 for r in found.all("rect", "fill"))


@pytest.mark.parametrize(
    ("unit", "ratio", "words"),
    [
        ("ms", 0.5, "2.00 times as fast as it (2.00–2.00)"),
        ("ms", 1.08, "1.08 times as long as it (1.08–1.08)"),
        ("ms", 0.0, "0 times as long as it (0–0)"),
        ("images/s", 0.5, "0.5 times as fast as it (0.5–0.5)"),
        ("images/s", 1.9, "1.90 times as fast as it (1.90–1.90)"),
        ("MB", 0.5, "0.5 times it (0.5–0.5)"),
    ],
)
def test_a_ratio_is_phrased_for_its_unit(unit: str, ratio: float, words: str) -> None:
    found = spread([ratio] * 3)
    assert found is not None
    assert comparison(found, unit, "it") == words


@pytest.mark.parametrize(
    ("unit", "bound", "limit", "words"),
    [
        ("s", "at most", 1.0, "at least as fast as a"),
        ("s", "at most", 0.05, "at least 20 times as fast as a"),
        ("s", "at most", 1.03, "at most 1.03 times as long as a"),
        ("steps/s", "at least", 1.0, "at least as fast as a"),
        ("steps/s", "at least", 2.0, "at least 2 times as fast as a"),
        ("MB", "at most", 1.0, "at most 1 times a"),
    ],
)
def test_a_goal_is_phrased_for_its_unit(unit: str, bound, limit: float, words: str) -> None:
    suite = suite_of({"a": [], "ours": []}, unit=unit)
    assert describe_goal(suite, Goal(contender="ours", bound=bound, limit=limit)) == words


def test_a_goal_against_another_contender_names_that_one() -> None:
    goal = Goal(contender="ours", limit=1.0, against="c")
    found = result({"a": [1.0], "ours": [2.0], "c": [4.0]}, goals=(goal,))
    (verdict,) = found.verdicts()
    assert describe_finding(found.suite, verdict) == "2.00 times as fast as c (2.00–2.00, 1 of 1 round)"


def test_the_better_direction_follows_from_the_unit_or_else_from_the_goals() -> None:
    assert better(suite_of({"a": []}, unit="s")) == "less"
    assert better(suite_of({"a": []}, unit="images/s")) == "more"
    assert better(suite_of({"a": []}, unit="%")) is None
    assert (
        better(suite_of({"ours": []}, unit="%", goals=(Goal(contender="ours", limit=1, bound="at least"),))) == "more"
    )


def test_ranges_below_zero_can_be_read() -> None:
    assert range_of("-2", "-1") == "-2 to -1"
    assert range_of("1", "2") == "1–2"


@given(st.floats(min_value=1e-9, max_value=1e12))
def test_a_factor_is_close_to_the_number_it_shows(value: float) -> None:
    assert float(factor(value).replace(",", "")) == pytest.approx(value, rel=0.006)


values = st.floats(min_value=-1e12, max_value=1e12, allow_subnormal=False) | st.floats(min_value=1e-9, max_value=1e9)


@given(st.lists(st.lists(values, min_size=1, max_size=6), min_size=1, max_size=4))
def test_every_axis_has_few_ticks_and_shows_every_median(contenders: list[list[float]]) -> None:
    spreads = [found for found in map(spread, contenders) if found is not None]
    axis = axis_for(spreads)
    assert axis.low < axis.high
    assert len(ticks(axis)) <= 12
    for found, its_values in zip(spreads, contenders, strict=True):
        assert axis.holds(found.median) or math.isclose(found.median, axis.high) or math.isclose(found.median, axis.low)
        Page(draw_bar(axis, its_values, found, "other", "ms"))


def test_an_axis_without_values_is_an_axis() -> None:
    assert axis_for([]) == BarAxis(0.0, 1.0)
    assert ticks(BarAxis(0.0, 1.0)) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
