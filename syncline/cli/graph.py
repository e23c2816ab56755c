"""`syncline graph PROGRAM`: the programs for graphs. Not here: the programs (`graphs/programs/`)."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from syncline.cli.output import exit_if_interrupted
from syncline.cli.run_options import bundle_options
from syncline.errors import ConfigError, Interrupted

if TYPE_CHECKING:
    from syncline.graphs.graph import Graph
    from syncline.graphs.result import GraphResult

app = typer.Typer(
    help="Compute on graphs: PageRank, components, paths, k-core, triangles, coloring, labels, ALS.",
    epilog="Example: syncline graph pagerank --data edges.csv --out ranks.csv",
    no_args_is_help=True,
)

Data = Annotated[
    str,
    typer.Option(
        metavar="GRAPH",
        help="CSV, Parquet or edge list; a folder with nodes.csv and edges.csv; 'NODES.csv,EDGES.csv'; cora or debian.",
    ),
]
Undirected = Annotated[bool, typer.Option("--undirected", help="Each edge of the file leads in both directions.")]
Limit = Annotated[str | None, typer.Option(help="Refuse a graph that needs more memory, such as 2GB.")]
Out = Annotated[Path | None, typer.Option(help="Save the values of all vertices as .csv, .parquet or .npy.")]
Top = Annotated[int, typer.Option(help="How many vertices to print.", min=0)]
Weight = Annotated[str | None, typer.Option(help="Column of the edges with their weights.")]
_OPTIONS: dict[str, Any] = {
    "schedule": Annotated[
        str | None,
        typer.Option(help="Which vertices are updated next: sweep (all), fifo, priority (most changed), chromatic."),
    ],
    "consistency": Annotated[
        str | None,
        typer.Option(
            help="What is never updated at once: vertex (nothing), edge (neighbors), full (common neighbors)."
        ),
    ],
    "until": Annotated[
        float | None, typer.Option(help="End when a round changes all values by no more than this in sum.")
    ],
    "max_rounds": Annotated[int | None, typer.Option(help="End after so many rounds at the latest.", min=1)],
}
_ON_WORKERS: dict[str, Any] = {
    "workers": Annotated[int | None, typer.Option("--workers", "-w", help="Number of workers. Default: 1.", min=1)],
    "partition": Annotated[
        str | None,
        typer.Option(
            help="How to divide the graph: blocks, hash, greedy, metis, vertex-cut, vertex-hash. Default: blocks."
        ),
    ],
    "asynchronous": Annotated[
        bool | None, typer.Option("--asynchronous", help="Workers do not wait for each other in every round.")
    ],
    "resume": Annotated[str | None, typer.Option(help="Continue an interrupted run: its directory.")],
    "name": Annotated[str | None, typer.Option(help="Name of the run directory. Default: program, graph and time.")],
    "on_worker_failure": Annotated[
        str | None,
        typer.Option(help="If a worker fails: shrink-and-replace (default), replace-only, shrink or stop."),
    ],
}


def _with(*options: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A command of a vertex program with these options, and those of a run on several workers."""
    chosen = {**{name: _OPTIONS[name] for name in options}, **_ON_WORKERS}
    return functools.partial(bundle_options, into="settings", options=chosen)


@app.command()
@_with("schedule", "consistency", "until", "max_rounds")
def pagerank(
    data: Data, undirected: Undirected = False, memory_limit: Limit = None, weight: Weight = None,
    damping: Annotated[float, typer.Option(help="How likely a walker follows an edge.")] = 0.85,
    personal: Annotated[list[str] | None, typer.Option(help="Vertex where walkers start; repeat for several.")] = None,
    out: Out = None, top: Top = 10, *, settings: dict[str, Any],
) -> None:  # fmt: skip
    """Rank vertices by the edges that lead to them, weighted by the ranks of their sources.

    Ranks sum to 1. With the schedule priority only vertices with much to change
    are updated, which reads far fewer edges than sweeps.

    syncline graph pagerank --data debian --workers 2 --schedule priority --until 1e-9
    syncline graph pagerank --data links.csv --weight clicks --out ranks.csv
    """
    starts = dict.fromkeys(personal, 1.0) if personal else None
    options = {"damping": damping, "personal": starts, "weight": weight}
    _run("pagerank", _Input(data, undirected, memory_limit), {**options, **settings}, out, top)


@app.command()
@_with("schedule")
def components(
    data: Data, memory_limit: Limit = None, out: Out = None, top: Top = 10, *, settings: dict[str, Any]
) -> None:
    """Find the connected components; directions do not matter.

    syncline graph components --data edges.csv --out components.csv
    """
    _run("components", _Input(data, False, memory_limit), settings, out, top, show=_print_groups("component"))


@app.command("shortest-paths")
@_with("schedule")
def shortest_paths(
    data: Data, source: Annotated[str, typer.Option(help="Vertex where all paths begin, by name or number.")],
    weight: Weight = None, undirected: Undirected = False, memory_limit: Limit = None, out: Out = None, top: Top = 10,
    *, settings: dict[str, Any],
) -> None:  # fmt: skip
    """Find the distance of every vertex from one.

    Prints the farthest ones that can be reached. Weights must be 0 or more.

    syncline graph shortest-paths --data roads.csv --source Bonn --weight km
    """
    options = {"source": source, "weight": weight, **settings}
    _run("shortest_paths", _Input(data, undirected, memory_limit), options, out, top, show=_print_distances)


@app.command("longest-paths")
@_with("schedule")
def longest_paths(
    data: Data, weight: Weight = None, memory_limit: Limit = None, out: Out = None, top: Top = 10,
    *, settings: dict[str, Any],
) -> None:  # fmt: skip
    """Find the longest path to every vertex of a graph without cycles.

    In a plan with one edge for each task that must come before another, that
    is when a task can begin. A cycle is an error that names it.

    syncline graph longest-paths --data tasks.csv --weight hours
    """
    _run("longest_paths", _Input(data, False, memory_limit), {"weight": weight, **settings}, out, top)


@app.command("k-core")
@_with("schedule")
def k_core(data: Data, memory_limit: Limit = None, out: Out = None, top: Top = 10, *, settings: dict[str, Any]) -> None:
    """Find the core number of every vertex: in how dense a part of the graph it is.

    syncline graph k-core --data edges.csv
    """
    _run("k_core", _Input(data, False, memory_limit), settings, out, top)


@app.command()
def triangles(data: Data, memory_limit: Limit = None, out: Out = None, top: Top = 10) -> None:
    """Count the triangles of every vertex.

    syncline graph triangles --data edges.csv
    """

    def show(found: GraphResult, top: int) -> None:
        typer.echo(f"{int(found.values.sum()) // 3:,} triangles")
        _print_top(found, top)

    _run("triangles", _Input(data, False, memory_limit), {}, out, top, show=show)


@app.command()
@_with("schedule")
def coloring(
    data: Data, memory_limit: Limit = None, out: Out = None, top: Top = 10, *, settings: dict[str, Any]
) -> None:
    """Color vertices so that no two neighbors have the same color.

    syncline graph coloring --data edges.csv --out colors.csv
    """
    _run("coloring", _Input(data, False, memory_limit), settings, out, top, show=_print_groups("color"))


@app.command("label-propagation")
@_with("max_rounds")
def label_propagation(
    data: Data, memory_limit: Limit = None, out: Out = None, top: Top = 10, *, settings: dict[str, Any]
) -> None:
    """Find communities: every vertex takes the label that most of its neighbors have.

    syncline graph label-propagation --data edges.csv --out communities.csv
    """
    _run("label_propagation", _Input(data, False, memory_limit), settings, out, top, show=_print_groups("community"))


@app.command()
@_with()
def als(
    data: Data, rating: Annotated[str, typer.Option(help="Column of the edges with the ratings.")] = "rating",
    factors: Annotated[int, typer.Option(help="Length of each factor vector.", min=1)] = 8,
    regularization: Annotated[float, typer.Option(help="Penalty of large factors, for each rating.")] = 0.1,
    rounds: Annotated[int, typer.Option(help="Rounds over users and items.", min=1)] = 20,
    memory_limit: Limit = None, out: Out = None, *, settings: dict[str, Any],
) -> None:  # fmt: skip
    """Factor ratings on the edges from users to items (alternating least squares).

    syncline graph als --data ratings.csv --factors 16 --out factors.npy
    """
    options = {"rating": rating, "factors": factors, "regularization": regularization, "rounds": rounds}
    source = _Input(data, False, memory_limit)
    _run("als", source, {**options, **settings}, out, 0, show=_print_error(rating))


@app.command()
def partition(
    data: Data, parts: Annotated[int, typer.Option(help="How many parts.", min=1)] = 2, memory_limit: Limit = None,
    methods: Annotated[
        list[str] | None, typer.Option("--method", help="Partitioner; repeat for several. Default: all installed.")
    ] = None,
) -> None:  # fmt: skip
    """Compare partitioners: balance of edges, what is cut, and what a round would send.

    syncline graph partition --data debian --parts 4
    """
    from syncline.graphs.partition import METHODS, divide

    graph = _Input(data, False, memory_limit).read()
    typer.echo(f"{'':<14}{'balance':>9}{'cut edges':>12}{'copies':>10}{'a round sends':>16}")
    for method in methods or METHODS:
        try:
            found = divide(graph, parts, method)
        except ConfigError as error:
            if methods or error.code != "no-metis":
                raise
            typer.echo(f"{method:<14}not installed (pip install pymetis)")
            continue
        cut = f"{found.cut_edges(graph) / max(graph.edge_count, 1):.1%}"
        sent = f"{found.halo_bytes(8) / 1e3:,.1f} kB"
        typer.echo(f"{method:<14}{found.balance:>9.3f}{cut:>12}{found.copies:>10,}{sent:>16}")


class _Input:
    """Where the graph is read from."""

    def __init__(self, data: str, undirected: bool, memory_limit: str | None) -> None:
        self._data, self._undirected, self._limit = data, undirected, memory_limit

    def read(self) -> Graph:
        from syncline.graphs.reading import read_graph

        graph = read_graph(self._data, directed=not self._undirected, memory_limit=self._limit)
        typer.echo(repr(graph), err=True)
        return graph


def _run(
    program: str, source: _Input, options: dict[str, Any], out: Path | None, top: int, *,
    show: Callable[[GraphResult, int], None] | None = None,
) -> None:  # fmt: skip
    """Run a program of the library, show its progress, and print and save what it found."""
    from syncline import graph as library

    if out is not None and out.suffix not in (".csv", ".npy", ".parquet"):
        raise ConfigError(f"--out is {out}, but must end in .csv, .parquet or .npy.", code="ending", path=str(out))
    graph = source.read()
    with exit_if_interrupted(), _progress(program != "triangles") as progress:
        found: GraphResult = getattr(library, program)(graph, **options, **progress)
    (show or _print_top)(found, top)
    state = "converged" if found.converged else "stopped"
    typer.echo(
        f"{state} after {found.rounds:,} rounds, {found.updates:,} updates, {found.edge_updates:,} edge updates, "
        f"{found.seconds:.2f} s", err=True,
    )  # fmt: skip
    if found.facts:
        typer.echo(
            f"{found.workers} workers, {found.facts['cut_edges']:,} of {graph.edge_count:,} edges cut, "
            f"{found.facts['sent_bytes'] / 1e6:,.2f} MB sent across the cut; run directory {found.facts['run_dir']}",
            err=True,
        )
    if out is not None:
        found.save(out)
        typer.echo(f"Saved {graph.size:,} values in {out}", err=True)


@contextmanager
def _progress(has_rounds: bool) -> Iterator[dict[str, Any]]:
    """A line that is redrawn on a terminal, and a message if the run is stopped."""
    shown, is_terminal, rounds = time.monotonic(), sys.stderr.isatty(), 0

    def show(counters: dict[str, Any]) -> None:
        nonlocal shown, rounds
        rounds = counters["rounds"]
        if is_terminal and time.monotonic() - shown > 0.2:
            shown = time.monotonic()
            sys.stderr.write(f"\r\033[Kround {rounds:,}: {counters['pending']:.3g} left to change")
            sys.stderr.flush()

    try:
        yield {"progress": show} if has_rounds else {}
    except Interrupted:
        raise  # several workers have saved what they had
    except KeyboardInterrupt:
        raise Interrupted(f"Stopped after round {rounds:,}. Nothing was saved.", code="stopped", step=rounds) from None
    finally:
        if is_terminal:
            sys.stderr.write("\r\033[K")


def _print_top(found: GraphResult, top: int) -> None:
    for name, value in found.top(top):
        typer.echo(f"{value:<12.6g} {name}")


def _print_groups(kind: str) -> Callable[[GraphResult, int], None]:
    def show(found: GraphResult, top: int) -> None:
        import numpy as np

        groups, sizes = np.unique(found.values, return_counts=True)
        typer.echo(f"{len(groups):,} different {kind}s" if kind != "community" else f"{len(groups):,} communities")
        for place in np.argsort(-sizes, kind="stable")[:top]:
            typer.echo(f"{sizes[place]:<12,} {kind} {groups[place]}")

    return show


def _print_distances(found: GraphResult, top: int) -> None:
    import numpy as np

    reached = np.isfinite(found.values)
    typer.echo(f"{int(reached.sum()):,} of {found.graph.size:,} vertices can be reached. The farthest:")
    order = np.argsort(np.where(reached, -found.values, np.inf), kind="stable")[: min(top, int(reached.sum()))]
    for number in order:
        typer.echo(f"{found.values[number]:<12.6g} {found.graph.name(int(number))}")


def _print_error(rating: str) -> Callable[[GraphResult, int], None]:
    def show(found: GraphResult, top: int) -> None:
        import numpy as np

        del top
        graph, factors = found.graph, found.values
        predicted = (factors[graph.sources] * factors[graph.targets]).sum(axis=1)
        error = np.sqrt(np.mean((predicted - graph.edge_fields[rating]) ** 2))
        typer.echo(f"{error:<12.6g} root mean squared error on these ratings")

    return show
