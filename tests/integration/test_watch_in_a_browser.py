"""The live page beside a real run: it follows, and its button stops the run with everything saved."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from browser import Watched, a_browser, needs_browser, serious_findings
from real_runs import ROOT
from report_runs import whole_run, write_run

import syncline
from syncline.coordinator.requests import is_live
from syncline.telemetry.events import RunEnded, RunStarted
from syncline.telemetry.run_dir import RunDir

pytestmark = needs_browser

_RUN = """
import sys
sys.path[:0] = [{tests!r}, {integration!r}]
from pathlib import Path
import syncline
from real_runs import Slow, samples, small_net
inputs, targets = samples()
syncline.train(
    model=Slow(small_net(), 0.03), data=(inputs, targets), test=(inputs, targets), workers=2, epochs=500, batch=32,
    name="run", quiet=True,
)
"""


@contextmanager
def command(*arguments: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is over when this is left."""
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(60)
        process.stdout.close()


def printed_address(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline().rpartition(": ")[2].strip()


def test_the_page_follows_a_run_and_stops_it_with_everything_saved(tmp_path):
    script = _RUN.format(tests=str(ROOT / "tests"), integration=str(ROOT / "tests" / "integration"))
    run = tmp_path / "runs" / "run"
    with command("-c", script, cwd=tmp_path) as training:
        while not is_live(run):
            assert training.poll() is None, training.stdout.read()
            threading.Event().wait(0.05)
        with (
            command("-m", "syncline.cli.main", "watch", str(run), "--no-open", cwd=tmp_path) as watch,
            a_browser() as browser,
        ):
            seen = Watched(browser)
            page = seen.page
            page.goto(printed_address(watch))
            page.wait_for_selector('body[data-status="running"]')
            page.get_by_role("radio", name="time").check()
            first = page.locator(".lead").inner_text()
            page.wait_for_function("before => document.querySelector('.lead').innerText !== before", arg=first)
            page.wait_for_selector('[data-chart="loss"] .by-time path[data-label="train"]')
            assert page.get_by_role("radio", name="time").is_checked()
            assert page.locator("#workers tbody tr").count() == 2
            assert serious_findings(page) == []
            page.get_by_role("button", name="Stop").click()
            page.wait_for_selector('body[data-status="stopped"]')
            assert not page.get_by_role("button", name="Stop").is_visible()
            assert "saved" in page.locator("#status").inner_text()
            assert seen.complaints == []
            page.goto(page.url.partition("?")[0])
            assert "token" in page.content()
            watch.send_signal(signal.SIGINT)
            assert watch.wait(20) == 0
        training.wait(60)
    ended = [e for e in RunDir(run).read_events() if isinstance(e, RunEnded)]
    assert [e.reason for e in ended] == ["stopped"]
    steps = int(re.search(r"step (\d+)", ended[0].message)[1])
    resumed = syncline.resume(run, quiet=True, max_steps=steps + 2)
    assert resumed.steps == steps + 2
    starts = [e.resumed_from_step for e in RunDir(run).read_events() if isinstance(e, RunStarted)]
    assert starts == [None, steps]


def test_a_run_that_is_over_is_shown_without_a_button(tmp_path):
    run = write_run(tmp_path / "run", whole_run())
    with (
        command("-m", "syncline.cli.main", "watch", str(run), "--no-open", cwd=tmp_path) as watch,
        a_browser() as browser,
    ):
        seen = Watched(browser, width="narrow", scheme="dark")
        seen.page.goto(printed_address(watch))
        assert seen.page.locator("h1 .badge").inner_text() == "✓ finished"
        assert not seen.page.get_by_role("button", name="Stop").is_visible()
        assert not seen.is_wider_than_the_screen()
        assert serious_findings(seen.page) == []
        assert seen.complaints == []
