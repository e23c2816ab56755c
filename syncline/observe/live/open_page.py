"""Opening the live page in the browser without showing its token to other users.

Every user can read the arguments of every process, and a browser gets what to open as an argument. So it gets a file
that only this user can read, which leads to the page. Not here: the server (`server.py`).
"""

from __future__ import annotations

import html
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from syncline.config.owned_files import is_our_directory


class OpenedPage:
    """A file that leads to `address`, given to `launch`; it is removed by `close`."""

    def __init__(self, address: str, run_dir: Path, launch: Callable[[str], object]) -> None:
        # A browser in a sandbox (snap, flatpak) sees the user's files, but its own /tmp.
        folder = run_dir if is_our_directory(run_dir) and os.access(run_dir, os.W_OK) else None
        descriptor, name = tempfile.mkstemp(prefix=".watch-", suffix=".html", dir=folder)  # mode 0600
        self._path = Path(name).resolve()
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(_leads_to(address))
        launch(self._path.as_uri())

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


def _leads_to(address: str) -> str:
    shown = html.escape(address, quote=True)
    return f'''<!doctype html>
<meta charset="utf-8"><meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={shown}">
<title>syncline watch</title>
<p><a href="{shown}">Open the live page</a></p>
'''
