"""`syncline watch RUN`: a live page of a run, served on this machine until Ctrl-C.

Here: what the command takes. Not here: the page and its server (`observe/live/`).
"""

from __future__ import annotations

import webbrowser
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated

import typer


def watch(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run directory; the run may be live, finished or crashed.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to serve on. 0: any free port.")] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the address without opening the browser.")] = False,
) -> None:
    """Watch a run in the browser, and stop it with its work saved.

    Shows the content of the report, updated live. The page is served on loopback
    only and requires the token in its address. Ctrl-C stops the page, not the run.

    syncline watch runs/lenet-mnist-20260101-120000

    From another machine, run ssh -L 8000:localhost:8000 HOST, and on HOST:

    syncline watch RUN --port 8000 --no-open
    """
    from syncline.coordinator.requests import Request, is_live, send_request
    from syncline.observe.live.follow import Follower
    from syncline.observe.live.open_page import OpenedPage
    from syncline.observe.live.server import WatchServer
    from syncline.observe.report.load import find_run

    found = find_run(run_dir)
    follower = Follower(found, is_live)
    with closing(WatchServer(follower, lambda: send_request(found.path, Request(stop=True)), port)) as server:
        typer.echo(f"watching {run_dir}: {server.address}")
        typer.echo("Ctrl-C stops the page, not the run.")
        with ExitStack() as stack:
            if not no_open:
                opened = stack.enter_context(closing(OpenedPage(server.address, found.path, _launch)))
                server.on_page = opened.close
            try:
                server.serve()
            except KeyboardInterrupt:
                typer.echo("")


def _launch(file: str) -> None:
    if typer.launch(file) != 0:  # there is no xdg-open
        webbrowser.open(file)
