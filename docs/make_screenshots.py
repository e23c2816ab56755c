"""Make the pictures of the pages and of the terminal in docs/pictures: train for real, and look with a browser.

make pictures
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from make_picture import WIDTH, new_console
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

import syncline
from syncline.coordinator.requests import is_live
from syncline.observe.live.follow import Follower
from syncline.observe.live.server import WatchServer
from syncline.observe.report.load import load
from syncline.observe.report.report_page import as_html
from syncline.observe.state import RunState
from syncline.observe.terminal.screen import draw
from syncline.telemetry.events import Event, Progress, WorkerReady
from syncline.telemetry.run_dir import RunDir

PICTURES = Path(__file__).parent / "pictures"
BROWSER = next((b for n in ("chromium", "chromium-browser", "google-chrome") if (b := shutil.which(n))), None)
LARGEST_BYTES = 300_000
COMMAND = "syncline train lenet --data digits --workers 2 --epochs 60"


def main() -> None:
    if BROWSER is None:
        sys.exit("There is no browser: install Chromium (make browser).")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        first = Path("runs/lenet")
        with training("lenet", "lenet", "--workers", "2", "--epochs", "60"):
            kill_a_worker(first, at_step=250)
            wait_for_step(first, 420)
            picture_of_live_page(browser, first)
        for name, *more in (
            ("mlp-sparknet", "mlp", "--strategy", "sparknet"),
            ("mlp-topk", "mlp", "--strategy", "allreduce + topk(0.05)"),
            ("mlp-allreduce", "mlp"),
        ):
            with training(name, *more, "--workers", "2", "--epochs", "25"):
                pass
        pictures_of_report(browser, first)
        several = Path("several.html")
        runs = [Path("runs", name) for name in ("mlp-allreduce", "mlp-sparknet", "mlp-topk")]
        several.write_text(as_html(load(runs, is_live)))
        take(browser, several.resolve().as_uri(), "report-several", height=1180)
        picture_of_try_page(browser)
        picture_of_terminal(browser, list(RunDir(first).read_events()))
        browser.close()


@contextlib.contextmanager
def training(name: str, model: str, *settings: str) -> Iterator[None]:
    """A real run, in a process of its own; it is over when this is left."""
    command = [sys.executable, "-m", "syncline.cli.main", "train", model, "--data", "digits", "--name", name, "--quiet"]
    process = subprocess.Popen([*command, *settings])
    try:
        yield
    finally:
        if process.wait() != 0:
            sys.exit(f"{name} did not come to its end.")


def wait_for_step(run: Path, step: int) -> None:
    while not any(isinstance(e, Progress) and e.step >= step for e in RunDir(run).read_events()):
        time.sleep(0.05)


def kill_a_worker(run: Path, at_step: int) -> None:
    """So that there is something to see on the time axis."""
    wait_for_step(run, at_step)
    ready = [e for e in RunDir(run).read_events() if isinstance(e, WorkerReady) and e.worker_id == 1]
    os.kill(ready[-1].pid, signal.SIGKILL)


def pictures_of_report(browser: Browser, run: Path) -> None:
    page = Path("report.html")
    page.write_text(as_html(load([run], is_live)))
    address = page.resolve().as_uri()
    take(browser, address, "report", height=1290)
    take(browser, address, "report-dark", scheme="dark", height=1290)
    take(browser, address, "report-confusion", part='section[id^="confusion"]')
    take(browser, address, "report-phone", width=390, height=1200)


def picture_of_live_page(browser: Browser, run: Path) -> None:
    server = WatchServer(Follower(RunDir(run), is_live), lambda: None)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        take(browser, server.address, "watch", height=760)
    finally:
        server.shut_down()
        thread.join()
        server.close()


def picture_of_try_page(browser: Browser) -> None:
    """A seven, drawn by hand."""
    with syncline.serve("lenet") as server:
        page = browser.new_page(viewport={"width": 1000, "height": 640})
        page.goto(server.page)
        box = page.locator("canvas").bounding_box()
        assert box is not None
        for k, (right, down) in enumerate([(0.25, 0.2), (0.75, 0.2), (0.45, 0.85)]):
            page.mouse.move(box["x"] + right * box["width"], box["y"] + down * box["height"], steps=1 if k == 0 else 8)
            if k == 0:
                page.mouse.down()
        page.mouse.up()
        page.locator(".answer").wait_for()
        save(page.screenshot(), PICTURES / "try-it.png")
        page.close()


def picture_of_terminal(browser: Browser, events: list[Event]) -> None:
    """What the live view of the terminal showed two thirds through the run."""
    state, console = RunState(), new_console()
    for event in events[: 2 * len(events) // 3]:
        state.apply(event)
    console.print(draw(state, width=WIDTH, height=30))
    drawing = Path("terminal.html")
    svg = console.export_svg(title=COMMAND).replace("Fira Code", "DejaVu Sans Mono")
    drawing.write_text(f"<!DOCTYPE html><meta charset='utf-8'><body style='margin:0'>{svg}")
    take(browser, drawing.resolve().as_uri(), "terminal", part="svg", width=1240)


def take(
    browser: Browser, address: str, name: str, *, scheme: str = "light", width: int = 1280, height: int = 800,
    part: str | None = None,
) -> None:  # fmt: skip
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
    page: Page = context.new_page()
    page.goto(address)
    picture = page.locator(part).first.screenshot() if part else page.screenshot()
    save(picture, PICTURES / f"{name}.png")
    context.close()


def save(picture: bytes, path: Path) -> None:
    """With 256 colors: pages have few, and files in a repository should be small."""
    with Image.open(io.BytesIO(picture)) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    assert path.stat().st_size < LARGEST_BYTES, f"{path} has {path.stat().st_size} bytes"


if __name__ == "__main__":
    main()
