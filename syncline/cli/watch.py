"""`syncline watch RUN`: a live page of a run, served to this machine until Ctrl-C.

Here: what the command takes. Not here: the page and its server (`watch/`).
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["watch"]


def watch(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory; the run may be over.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to serve. 0: any port that is free.")] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Only print the address.")] = False,
) -> None:
    """Follow a run in the browser: what the report shows, kept up to date, and a button to stop with everything saved.

    Only this machine can reach the page, and only with the token in the
    address. The run may be live, finished or crashed; Ctrl-C ends the page, not
    the run.

    syncline watch runs/lenet-mnist-20260101-120000
    From elsewhere: ssh -L 8000:localhost:8000 HOST, there: syncline watch RUN --port 8000 --no-open
    """
    from syncline.coordinator.requests import Wish, is_live, wish
    from syncline.report.load import find_run
    from syncline.watch.follow import Follower
    from syncline.watch.server import WatchServer

    found = find_run(run_dir)
    follower = Follower(found, is_live)
    with closing(WatchServer(follower, lambda: wish(found.path, Wish(stop=True)), port)) as server:
        typer.echo(f"watching {run_dir}: {server.address}")
        typer.echo("Ctrl-C ends the page; the run goes on.")
        if not no_open:
            typer.launch(server.address)
        try:
            server.serve()
        except KeyboardInterrupt:
            typer.echo("")
