"""`syncline cluster up|status|cut|heal|down`: several hosts on one machine, to see how a strategy does on a network.

Here: the commands. Not here: the cluster (`testing/cluster.py`), and training on it (`--engine cluster`).
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Mapping
from contextlib import closing
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(
    help="Several hosts on this machine, joined by a network as slow as you like, whose links can be cut. Needs root.",
    no_args_is_help=True,
)

_Name = Annotated[str, typer.Option(help="Which cluster, if there are several.")]
_Host = Annotated[int, typer.Argument(metavar="HOST", min=0, help="Its number, from 0.")]


@app.command()
def up(
    hosts: Annotated[int, typer.Option(min=1, max=100, help="How many.")] = 4,
    rate: Annotated[str | None, typer.Option(help="What each link lets through each way: 1gbit, 100mbit.")] = None,
    delay: Annotated[str | None, typer.Option(help="How long a packet takes from host to host: 1ms, 0.5ms.")] = None,
    name: _Name = "default",
) -> None:
    """Make the hosts, and keep them until Ctrl-C or 'syncline cluster down'.

    sudo syncline cluster up --hosts 4 --rate 1gbit --delay 1ms
    sudo syncline train lenet --data mnist --workers 4 --engine cluster      (in another terminal)
    """
    from syncline.testing.cluster import ClusterHost
    from syncline.testing.faults import read_seconds
    from syncline.testing.namespaces import Namespaces

    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    delay_s = read_seconds(delay) if delay else 0.0
    with Namespaces(hosts, rate=rate, delay_s=delay_s) as namespaces:
        told = {"hosts": hosts, "rate": rate, "delay": delay}
        with closing(ClusterHost(namespaces, name, told)) as cluster:
            engine = "cluster" if name == "default" else f"cluster:{name}"
            addresses = ", ".join(host.address for host in namespaces.network.hosts)
            typer.echo(f"{_in_words(told)}: {addresses}; the driver is {namespaces.network.driver}")
            typer.echo(f"train on it in another terminal: --workers {hosts} --engine {engine}")
            typer.echo("Ctrl-C takes it down.")
            cluster.serve(over.is_set)
    typer.echo("taken down")


@app.command()
def status(name: _Name = "default") -> None:
    """Say what a cluster is, and which of its links are cut."""
    from syncline.testing.cluster import ask

    known = json.loads(ask(name, {"do": "status"}))
    cut = ", ".join(map(str, known["cut"]))
    typer.echo(f"{_in_words(known)}; {f'cut off: {cut}' if cut else 'all links are whole'}; process {known['pid']}")


@app.command()
def cut(
    host: _Host,
    for_: Annotated[str | None, typer.Option("--for", help="How long: 5s. Default: until it is healed.")] = None,
    name: _Name = "default",
) -> None:
    """Cut a host off: nothing that is sent to it or by it arrives, and nobody is told."""
    from syncline.testing.cluster import ask
    from syncline.testing.faults import read_seconds

    ask(name, {"do": "cut", "host": host, "for_s": read_seconds(for_) if for_ else None})
    typer.echo(f"host {host} is cut off{f' for {for_}' if for_ else ''}")


@app.command()
def heal(host: _Host, name: _Name = "default") -> None:
    """Make a link whole again."""
    from syncline.testing.cluster import ask

    ask(name, {"do": "heal", "host": host})
    typer.echo(f"host {host} is reached again")


@app.command()
def down(name: _Name = "default") -> None:
    """Take a cluster away."""
    from syncline.testing.cluster import ask

    ask(name, {"do": "down"})
    typer.echo("taken down")


def _in_words(told: Mapping[str, object]) -> str:
    rate, delay = told["rate"] or "no limit", told["delay"] or "no delay"
    return f"{told['hosts']} hosts, {rate}, {delay}"
