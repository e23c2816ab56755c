"""The browser gets the address of the live page, and other users do not."""

from __future__ import annotations

import os
import stat
import threading
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from other_user import NOBODY, needs_root
from report_runs import nobody, whole_run, write_run

from syncline.cli.watch import watch
from syncline.observe.live.follow import Follower
from syncline.observe.live.open_page import OpenedPage
from syncline.observe.live.server import WatchServer
from syncline.telemetry.run_dir import RunDir

LIMIT_S = 10.0


@pytest.fixture
def browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A browser that writes its arguments to this file."""
    launcher, arguments = tmp_path / "bin" / "xdg-open", tmp_path / "arguments"
    launcher.parent.mkdir()
    launcher.write_text(f'#!/bin/sh\necho "$@" > {arguments}.new && mv {arguments}.new {arguments}\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("PATH", f"{launcher.parent}{os.pathsep}{os.environ['PATH']}")
    return arguments


def read_when_written(path: Path) -> str:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        threading.Event().wait(0.02)
    return path.read_text()


def test_the_token_is_in_no_argument_of_the_browser(tmp_path, monkeypatch, browser):
    run = write_run(tmp_path / "run", whole_run())
    tokens, arguments, pages = [], [], []

    def serve(self: WatchServer) -> None:
        tokens.append(self.token)
        arguments.append(read_when_written(browser).strip())
        opened = Path(arguments[0])
        pages.append((opened.read_text(), stat.S_IMODE(opened.stat().st_mode), self.address))
        raise KeyboardInterrupt

    monkeypatch.setattr(WatchServer, "serve", serve)
    watch(run)
    assert tokens[0] not in arguments[0]
    (page, mode, address) = pages[0]
    assert address in page, "the file leads to the page"
    assert mode == 0o600
    assert not Path(arguments[0]).exists(), "removed with the page"


def test_the_file_is_removed_as_soon_as_the_page_is_there(tmp_path):
    run, launched = write_run(tmp_path / "run", whole_run()), []
    with closing(WatchServer(Follower(RunDir(run), nobody), lambda: None)) as server:
        opened = OpenedPage(server.address, run, launched.append)
        file = Path(unquote(urlsplit(launched[0]).path))
        assert file.parent == run, "where a browser in a sandbox can read it"
        server.on_page = opened.close
        server.page()
        assert not file.exists()
        opened.close()


@needs_root
def test_nothing_is_written_to_another_users_run(tmp_path):
    run, launched = write_run(tmp_path / "run", whole_run()), []
    os.chown(run, NOBODY, -1)
    with closing(OpenedPage("http://127.0.0.1:1/?token=t", run, launched.append)):
        assert Path(unquote(urlsplit(launched[0]).path)).parent != run
