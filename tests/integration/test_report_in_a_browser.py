"""The report and the bench page as people see them: in a browser, in light and dark, wide and narrow."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import Watched, a_browser, needs_browser, serious_findings
from report_runs import START, nobody, started, whole_run, write_run

from syncline.lab.bench.harness import Contender, ContenderOutcome, Goal, Suite, SuiteResult
from syncline.lab.bench.html import as_html as bench_page
from syncline.lab.bench.report import Report
from syncline.lab.machine import BenchMachine
from syncline.observe.report.load import load
from syncline.observe.report.report_page import as_html
from syncline.telemetry.events import FatalFailure, RunEnded, WorkerFailure

pytestmark = needs_browser

FAILED = [FatalFailure(worker_id=1, message="A line\n" * 60), RunEnded(reason="failed", message="Out of luck.\n" * 60)]


def written(folder: Path, *names: str) -> str:
    runs = [write_run(folder / name, [started(strategy=name), *whole_run()[1:]]) for name in names]
    page = folder / "report.html"
    page.write_text(as_html(load(runs, nobody)))
    return page.as_uri()


def with_losses(folder: Path) -> str:
    lost = WorkerFailure(
        time=START + 6, worker_id=1, name="worker 1", cause="was killed", step=8, workers=1, is_replaced=True
    )
    run = write_run(folder / "failed", [*whole_run(20, ends=False), lost, *FAILED])
    page = folder / "failed.html"
    page.write_text(as_html(load([run], nobody)))
    return page.as_uri()


def a_bench(folder: Path) -> str:
    suite = Suite(
        name="speed", unit="samples/s", measures="How fast it is.", baseline="plain",
        contenders=(
            Contender(name="plain", measure=lambda: 1.0, what="By hand."),
            Contender(name="syncline", measure=lambda: 2.0, what="This."),
        ),
        goals=(Goal(contender="syncline", limit=1.0, bound="at least"),),
    )  # fmt: skip
    outcomes = {
        "plain": ContenderOutcome([100.0, 110.0]),
        "syncline": ContenderOutcome([120.0, 121.0], failures=["A line\n" * 60]),
    }
    machine = BenchMachine(
        processor="A Processor", cores=2, memory_bytes=16_000_000_000, system="Linux", python="3.11", torch="2",
        syncline="0.1.0", load_at_start=0.1,
    )  # fmt: skip
    page = folder / "bench.html"
    page.write_text(bench_page(Report(machine=machine, results=[SuiteResult(suite, 2, outcomes)], is_quick=True)))
    return page.as_uri()


@pytest.mark.parametrize(("width", "scheme"), [("wide", "light"), ("narrow", "dark")])
def test_pages_ask_the_network_for_nothing_fit_the_screen_and_are_accessible(tmp_path, width, scheme):
    pages = [written(tmp_path / "one", "a"), written(tmp_path / "three", "a", "b", "c"), with_losses(tmp_path)]
    with a_browser() as browser:
        for address in [*pages, a_bench(tmp_path)]:
            seen = Watched(browser, width=width, scheme=scheme)
            seen.page.goto(address)
            assert seen.requests == [address]
            assert seen.complaints == []
            assert not seen.is_wider_than_the_screen()
            assert serious_findings(seen.page) == []
            background = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, background[4:-1].split(","))) > 384) is (scheme == "light")


def test_curves_are_drawn_over_the_axis_that_is_chosen_also_without_a_script(tmp_path):
    address = written(tmp_path, "a")
    with a_browser() as browser:
        for scripts in (True, False):
            page = Watched(browser, scripts=scripts).page
            page.goto(address)
            shown = page.locator('[data-chart="loss"] .by:visible')
            assert shown.count() == 1
            assert shown.locator('path[data-label="train"]').get_attribute("d").count("L") == 29
            assert shown.locator('path[data-label="test"]').get_attribute("d").count("L") == 2
            page.get_by_label("epochs").check()
            assert page.locator('[data-chart="loss"] .by-epoch').is_visible()
            assert not page.locator('[data-chart="loss"] .by-step').is_visible()


def test_hovering_shows_the_values_under_the_pointer(tmp_path):
    with a_browser() as browser:
        page = Watched(browser).page
        page.goto(written(tmp_path, "a"))
        area = page.locator('[data-chart="loss"] .by-step .area')
        box = area.bounding_box()
        page.mouse.move(box["x"] + box["width"] - 1, box["y"] + box["height"] / 2)
        told = area.locator(".tip").inner_text()
        assert "step 30" in told
        assert "0.066" in told  # 2 / 30, read back from the drawing
        page.mouse.move(0, 0)
        assert page.locator(".tip").count() == 0


def test_several_runs_are_drawn_over_each_other_in_their_own_colors(tmp_path):
    with a_browser() as browser:
        page = Watched(browser).page
        page.goto(written(tmp_path, "a", "b", "c"))
        lines = page.locator('[data-chart="accuracy"] .by-step path[data-label]')
        assert lines.evaluate_all("all => all.map(path => path.dataset.label)") == [
            "a, training", "a", "b, training", "b", "c, training", "c",
        ]  # fmt: skip
        colors = lines.evaluate_all("all => all.map(path => getComputedStyle(path).stroke)")
        assert len(set(colors)) == 3
        assert page.locator("#comparison tbody tr").count() == 3


def test_pictures_of_what_was_confused_are_shown(tmp_path):
    with a_browser() as browser:
        page = Watched(browser).page
        page.goto(written(tmp_path, "a"))
        assert page.locator(".examples img").evaluate_all("all => all.map(image => image.naturalWidth)") == [2]
        assert page.locator(".matrix tbody tr").count() == 3
