"""`syncline bench`: what the command takes. Not here: the suites (`lab/bench/`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from syncline.cli.output import exit_if_interrupted
from syncline.errors import ConfigError

SUITES_HELP = (
    "Suites: startup (time from command to first step), training (throughput against DDP), scaling (throughput by "
    "model and number of workers), accuracy (time to 99% on MNIST), inference (predictions per second), growth (speed"
    " and memory of large runs), overhead (cost per step of the built-in loop), servers (parameter servers against "
    "gloo), stragglers (cost of slow workers), recovery (cost of a killed worker), torchrun (an unchanged DDP script "
    "under syncline run), own-loop (a script of your own against DDP), layouts (against FSDP2 and torch's 1F1B), "
    "tolerance (cost of fault tolerance without a failure), allreduce (gradient sum against gloo). Only if named: "
    "graphs (PageRank against an iteration by hand), blocks (Lasso against scikit-learn), "
    "serve (the server against ONNX Runtime alone), serve-load (the server in overload and beside slow clients), "
    "engines (cost per step of Ray and Spark), memory (peak memory by batch size), saving (cost of large checkpoints), "
    "peers (throughput of other frameworks)."
)


def bench(
    suites: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SUITE",
            help="Suites to run. Default: all but graphs, blocks, serve, serve-load, engines, memory, saving, peers.",
        ),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Measurements per contender. Default: 5, or 2 with --quick.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer measurements: faster, but less precise.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for bench.html, bench.md and bench.json. Default: runs/bench-TIME.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print progress as JSON lines; the last line is the report.")
    ] = False,
    peers_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the peers' environments. Default: $SYNCLINE_PEERS, else ~/.cache/syncline/peers.",
            rich_help_panel="Peers",
        ),
    ] = None,
    install: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PEER", help="Create a peer's environment, such as accelerate, and exit.", rich_help_panel="Peers"
        ),
    ] = None,
) -> None:
    """Benchmark Syncline on this machine against the alternatives.

    Contenders take turns, round after round, so that background load affects all
    of them. Each round gives a ratio to the baseline; the report shows the median
    and the spread. Expect a few minutes, and leave the machine idle. Ctrl-C
    prints the results so far.

    syncline bench
    syncline bench startup --repeats 9
    syncline bench overhead --quick --out bench-results
    syncline bench peers --install accelerate && syncline bench peers
    syncline bench serve --install mlserver && syncline bench serve
    """
    from syncline.lab.bench.command import bench as run_bench

    with exit_if_interrupted():
        if install:
            _install_peers(suites or [], install, peers_dir)
        else:
            run_bench(suites or [], repeats=repeats, quick=quick, out=out, as_json=json, peers_dir=peers_dir)


def _install_peers(suites: list[str], keys: list[str], peers_dir: Path | None) -> None:
    from syncline.lab.bench.peer_recipes import adapters_folder, environments_folder, install, peers_named

    if suites not in ([], ["peers"], ["serve"]):
        raise ConfigError(
            f"--install applies to the suites peers and serve, not to {' '.join(suites)}. Leave one of them out."
        )
    suite = suites[0] if suites else "peers"
    environments = environments_folder(peers_dir)
    for peer in peers_named(keys, adapters_folder("servers" if suite == "serve" else "peers")):
        install(peer, environments, say=lambda text: typer.echo(text, err=True))
        typer.echo(f"Installed {peer.name} in {environments / peer.key}. Next: syncline bench {suite}", err=True)
