"""A real browser for tests of pages: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from axe_core_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
EXECUTABLE = next((found for name in NAMES if (found := shutil.which(name))), None)

needs_browser = pytest.mark.skipif(
    EXECUTABLE is None, reason=f"no browser: none of {', '.join(NAMES)} is installed (make browser)"
)
"""For tests that look at a page as people do. `make test` installs a browser where it can."""

SEEN = {"wide": {"width": 1280, "height": 800}, "narrow": {"width": 360, "height": 740}}


@contextmanager
def a_browser() -> Iterator[Browser]:
    """One that is gone when it is left."""
    # Chromium does not always remove its temporary files.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own, sync_playwright() as playwright:
        # The sandbox needs rights that root in a container does not have.
        flags = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        environment = {**os.environ, "TMPDIR": own}
        browser = playwright.chromium.launch(executable_path=EXECUTABLE, args=flags, env=environment)
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page, and what it asked the network for and complained about."""

    def __init__(self, browser: Browser, *, width: str = "wide", scheme: Any = "light", scripts: bool = True) -> None:
        context = browser.new_context(viewport=SEEN[width], color_scheme=scheme, java_script_enabled=scripts)
        self.page: Page = context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def is_wider_than_the_screen(self) -> bool:
        """Whether one would have to scroll sideways."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth > window.innerWidth"))


def serious_findings(page: Page) -> list[str]:
    """What axe calls serious or critical, one line each."""
    results = Axe().run(page)
    return [
        f"{found['impact']}: {found['id']}: {node['html'][:160]} {node.get('failureSummary', '')}"
        for found in results["violations"]
        if found["impact"] in ("serious", "critical")
        for node in found["nodes"]
    ]
