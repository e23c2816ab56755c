"""`syncline cluster up|status|cut|heal|down`: an emulated cluster on one machine.

Here: the commands. Not here: the cluster (`lab/cluster.py`), and training on it (`--engine cluster`).
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Mapping
from contextlib import closing
from typing import Annotated

import typer

app = typer.Typer(
    help="Emulate a cluster on this machine, with link rate, delay and partitions. Needs root.",
    no_args_is_help=True,
)

_Name = Annotated[str, typer.Option(help="Name of the cluster, if there are several.")]
_Host = Annotated[int, typer.Argument(metavar="HOST", min=0, help="Host number, from 0.")]


@app.command()
def up(
    hosts: Annotated[int, typer.Option(min=1, max=100, help="Number of hosts.")] = 4,
    rate: Annotated[str | None, typer.Option(help="Bandwidth of each link per direction: 1gbit, 100mbit.")] = None,
    delay: Annotated[str | None, typer.Option(help="One-way latency between hosts: 1ms, 0.5ms.")] = None,
    name: _Name = "default",
) -> None:
    """Start a cluster and keep it until Ctrl-C or 'syncline cluster down'.

    sudo syncline cluster up --hosts 4 --rate 1gbit --delay 1ms
    sudo syncline train lenet --data mnist --workers 4 --engine cluster      (in another terminal)
    """
    from syncline.lab.cluster import ClusterServer
    from syncline.lab.faults import read_seconds
    from syncline.lab.namespaces import Namespaces

    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    delay_s = read_seconds(delay) if delay else 0.0
    with Namespaces(hosts, rate=rate, delay_s=delay_s) as namespaces:
        facts = {"hosts": hosts, "rate": rate, "delay": delay}
        with closing(ClusterServer(namespaces, name, facts)) as cluster:
            engine = "cluster" if name == "default" else f"cluster:{name}"
            addresses = ", ".join(host.address for host in namespaces.network.hosts)
            typer.echo(f"{_summary(facts)}: {addresses}; the driver is {namespaces.network.driver}")
            typer.echo(f"train on it from another terminal: --workers {hosts} --engine {engine}")
            typer.echo("Ctrl-C shuts it down.")
            cluster.serve(over.is_set)
    typer.echo("shut down")


@app.command()
def status(name: _Name = "default") -> None:
    """Show the cluster and its cut links.

    syncline cluster status
    """
    from syncline.lab.cluster import send_command

    known = json.loads(send_command(name, {"do": "status"}))
    cut = ", ".join(map(str, known["cut"]))
    typer.echo(f"{_summary(known)}; {f'cut off: {cut}' if cut else 'all links are up'}; process {known['pid']}")


@app.command()
def cut(
    host: _Host,
    for_: Annotated[str | None, typer.Option("--for", help="Duration: 5s. Default: until healed.")] = None,
    name: _Name = "default",
) -> None:
    """Partition a host: drop all packets to and from it silently.

    sudo syncline cluster cut 1 --for 5s
    """
    from syncline.lab.cluster import send_command
    from syncline.lab.faults import read_seconds

    send_command(name, {"do": "cut", "host": host, "for_s": read_seconds(for_) if for_ else None})
    typer.echo(f"host {host} is cut off{f' for {for_}' if for_ else ''}")


@app.command()
def heal(host: _Host, name: _Name = "default") -> None:
    """Restore the link of a host.

    sudo syncline cluster heal 1
    """
    from syncline.lab.cluster import send_command

    send_command(name, {"do": "heal", "host": host})
    typer.echo(f"host {host} is reachable again")


@app.command()
def down(name: _Name = "default") -> None:
    """Shut the cluster down.

    sudo syncline cluster down
    """
    from syncline.lab.cluster import send_command

    send_command(name, {"do": "down"})
    typer.echo("shut down")


def _summary(facts: Mapping[str, object]) -> str:
    rate, delay = facts["rate"] or "no rate limit", facts["delay"] or "no delay"
    return f"{facts['hosts']} hosts, {rate}, {delay}"
