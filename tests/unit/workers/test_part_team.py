"""Parts of a graph do together what one process does: to the bit, and with only the messages that the cut needs."""

from __future__ import annotations

from functools import partial

import networkx as nx
import numpy as np
import pytest
from rank_processes import GlooRanks, RankProcesses, SharedMemoryRanks, start_fork_server, stop_fork_server

import syncline
from syncline.errors import ConfigError
from syncline.graphs import running
from syncline.graphs.asynchronous import AsynchronousRun, conflicts
from syncline.graphs.cut import edge_routes, vertex_routes
from syncline.graphs.execution import Run
from syncline.graphs.part import Part
from syncline.graphs.partition import METHODS, divide
from syncline.graphs.result import GraphResult
from syncline.graphs.running import first_state
from syncline.graphs.work import OnWorkers, VertexWork
from syncline.workers.part_team import PartTeam
from syncline.workers.turn_team import TurnTeam

pytestmark = pytest.mark.xdist_group("collectives")  # one process, because these tests share ranks
RANKS = 3


@pytest.fixture(scope="module")
def processes():
    start_fork_server()
    opened = {size: RankProcesses(size) for size in (2, RANKS)}
    yield opened
    for ranks in opened.values():
        ranks.close()
    stop_fork_server()


def computed(collective, work: VertexWork):
    """One rank's rows, its counters, and what it has sent."""
    graph = work.graph
    owners = divide(graph, collective.size, work.partition).vertices
    routes, edges = vertex_routes(graph, owners, work.reads.directions), edge_routes(graph, owners, work.reads.scatters)
    part, state = Part(graph, np.flatnonzero(owners == collective.rank)), first_state(work.program, graph)
    end = lambda state, counters: True  # noqa: E731
    if work.asynchronous:
        has_token = conflicts(graph, owners, collective.size, work.program.consistency)
        team = TurnTeam(collective, owners, routes, edges, end, has_token=has_token, first=state)
        counters = {"rounds": 0, "updates": 0, "edge_updates": 0}
        run = AsynchronousRun(
            work.program, part, work.colors, state, team, work.max_rounds, work.seed, counters, owners
        )
    else:
        team = PartTeam(collective, owners, routes, edges, end)
        run = Run(work.program, part, work.colors, state, team, work.max_rounds, work.seed)
    converged = run.to_end()
    return part.own, run.state["value"][part.own], run.counters, converged, team.bytes_sent


@pytest.fixture
def on_ranks(processes, monkeypatch):
    """Runs vertex programs on ranks instead of workers that a driver starts."""

    def launch(ranks, wanted: OnWorkers) -> GraphResult:
        parts = ranks(processes[wanted.workers])(wanted.workers, partial(computed, work=wanted.work))
        values = np.concatenate([rows for _, rows, *_ in parts])[np.argsort(np.concatenate([own for own, *_ in parts]))]
        counters = [found for *_, found, _, _ in parts]
        return GraphResult(
            graph=wanted.work.graph, values=values, converged=all(done for *_, done, _ in parts),
            rounds=counters[0]["rounds"], updates=sum(c["updates"] for c in counters),
            edge_updates=sum(c["edge_updates"] for c in counters), seconds=0.0, workers=wanted.workers,
            facts={"sent": sum(sent for *_, sent in parts)},
        )  # fmt: skip

    def use(ranks) -> None:
        monkeypatch.setattr(running, "launch", partial(launch, ranks))

    use(SharedMemoryRanks)
    return use


def random_graph(seed: int, size: int = 40, edges: int = 120) -> syncline.Graph:
    rng = np.random.default_rng(seed)
    ends = rng.integers(0, size, (2, edges))
    ends = np.unique(ends, axis=1)
    return syncline.Graph(ends, edge_fields={"km": rng.random(ends.shape[1])}, size=size)


def same(one: GraphResult, several: GraphResult) -> None:
    assert one.values.tolist() == several.values.tolist()
    assert (one.converged, one.rounds, one.updates) == (several.converged, several.rounds, several.updates)
    assert one.edge_updates == several.edge_updates


LIBRARY = {
    "pagerank": lambda g, **o: syncline.graph.pagerank(g, **o),
    "by weight": lambda g, **o: syncline.graph.pagerank(g, weight="km", personal={0: 1.0}, **o),
    "paths": lambda g, **o: syncline.graph.shortest_paths(g, source=0, weight="km", **o),
    "components": syncline.graph.components,
    "k_core": syncline.graph.k_core,
    "coloring": syncline.graph.coloring,
}


@pytest.mark.parametrize("program", LIBRARY)
def test_every_schedule_gives_the_bits_and_the_work_of_one_process(on_ranks, program):
    for seed, schedule in enumerate(["sweep", "fifo", "priority"]):
        graph = random_graph(seed)
        one = LIBRARY[program](graph, schedule=schedule)
        for workers, partition in ((2, "hash"), (3, "vertex-cut")):
            same(one, LIBRARY[program](graph, schedule=schedule, workers=workers, partition=partition))


def test_programs_that_scatter_sample_and_solve_give_the_same_too(on_ranks):
    graph = random_graph(5)
    rng = np.random.default_rng(0)
    potentials, coupling = 0.1 + rng.random((graph.size, 3)), np.full((3, 3), 0.2) + 0.8 * np.eye(3)
    users = rng.integers(0, 20, 60)
    ratings = syncline.Graph(np.unique(np.stack([users, rng.integers(20, 40, 60)]), axis=1), size=40, edge_fields=None)
    ratings = ratings.with_fields({}, {"rating": rng.random(ratings.edge_count)})
    calls = (
        lambda **o: syncline.graph.belief_propagation(graph, potentials, coupling, damping=0.3, **o),
        lambda **o: syncline.graph.gibbs(graph, potentials, coupling, samples=20, burn_in=5, seed=3, **o),
        lambda **o: syncline.graph.als(ratings, factors=2, rounds=5, **o),
        lambda **o: syncline.graph.label_propagation(graph, max_rounds=50, **o),
    )
    for call in calls:
        one, several = call(), call(workers=3, partition="hash")
        assert np.allclose(one.values, several.values, rtol=1e-12, atol=1e-12)
        assert (one.rounds, one.updates, one.edge_updates) == (several.rounds, several.updates, several.edge_updates)


@pytest.mark.parametrize("partition", [method for method in METHODS if method != "metis"])
def test_any_division_and_any_consistency_will_do(on_ranks, partition):
    graph = random_graph(7)
    for consistency in ("vertex", "edge", "full"):
        settings = {"consistency": consistency, "schedule": "priority", "until": 1e-10}
        same(
            syncline.graph.pagerank(graph, **settings),
            syncline.graph.pagerank(graph, **settings, workers=RANKS, partition=partition),
        )


def test_over_a_network_the_bits_are_the_same(on_ranks):
    on_ranks(GlooRanks)
    graph = random_graph(3)
    for schedule in ("sweep", "priority"):
        same(
            syncline.graph.pagerank(graph, schedule=schedule),
            syncline.graph.pagerank(graph, schedule=schedule, workers=2, partition="hash"),
        )
    same(syncline.graph.coloring(graph), syncline.graph.coloring(graph, workers=2, partition="hash"))


def test_what_asynchronous_parts_cannot_do_is_refused(on_ranks):
    graph, asynchronously = random_graph(3), {"workers": 2, "asynchronous": True}
    with pytest.raises(ConfigError) as caught:
        syncline.graph.gibbs(graph, np.ones((40, 2)), np.ones((2, 2)), **asynchronously)
    assert caught.value.code == "sampling-asynchronously"
    on_ranks(GlooRanks)
    with pytest.raises(ConfigError) as caught:
        syncline.graph.components(graph, **asynchronously)
    assert caught.value.code == "asynchronous-needs-memory"


def test_edge_consistency_equals_some_sequential_order(on_ranks):
    """Neighbors that were updated at once would have taken the same color."""
    for seed in range(4):
        graph = random_graph(seed)
        found = syncline.graph.coloring(graph, workers=RANKS, partition="hash", max_rounds=2).values
        assert all(found[a] != found[b] for a, b in zip(graph.sources, graph.targets, strict=True) if a != b)


@pytest.mark.parametrize("schedule", ["sweep", "fifo", "priority", "chromatic"])
def test_a_coloring_is_always_proper_under_asynchrony(on_ranks, schedule):
    """After any number of turns, and whatever the parts did meanwhile: neighbors were never updated at once."""
    for seed in range(6):
        graph = random_graph(seed, edges=160)
        settings = {"asynchronous": True, "schedule": schedule, "consistency": ("edge", "full")[seed % 2]}
        for turns in (1, 2, 20):
            found = syncline.graph.coloring(graph, **settings, workers=RANKS, partition="hash", max_rounds=turns).values
            assert all(found[a] != found[b] for a, b in zip(graph.sources, graph.targets, strict=True) if a != b)


def test_without_edge_consistency_a_coloring_is_not_proper(on_ranks):
    settings = {"asynchronous": True, "consistency": "vertex", "workers": 2, "max_rounds": 1}
    found = syncline.graph.coloring(syncline.Graph([(0, 1)]), **settings).values
    assert found[0] == found[1]


def logged(collective, work: VertexWork):
    """What each update of this rank read: (vertex, its new version, the versions of its neighbors)."""
    computed(collective, work)
    return work.program.update.log


@pytest.mark.parametrize("consistency", ["edge", "vertex"])
def test_asynchronous_updates_have_a_sequential_order_if_edges_are_consistent(processes, monkeypatch, consistency):
    """Each read comes after the version that was read was written, and before the next: that must not be a circle."""
    graph = random_graph(4, size=60, edges=200).undirected()

    def update(v):
        versions = v.world.arrays["value"]
        for number in v.numbers.tolist():
            around = v.graph.into.others[v.graph.into.offsets[number] : v.graph.into.offsets[number + 1]]
            update.log.append((number, int(versions[number]) + 1, [(int(n), int(versions[n])) for n in around]))
        return v.value + 1 + 0 * v.gather("in", lambda e: e.source.value)

    update.log = []
    orders = []

    def launch(wanted: OnWorkers) -> GraphResult:
        update.log.clear()  # of the call that found out what it reads
        logs = SharedMemoryRanks(processes[RANKS])(RANKS, partial(logged, work=wanted.work))
        order = nx.DiGraph()
        for number, version, around in (entry for log in logs for entry in log):
            order.add_edge((number, version - 1), (number, version))
            for neighbor, seen in around:
                order.add_edge((neighbor, seen), (number, version))
                order.add_edge((number, version), (neighbor, seen + 1))
        orders.append(nx.is_directed_acyclic_graph(order))
        return GraphResult(
            graph=graph, values=np.zeros(60), converged=False, rounds=0, updates=0, edge_updates=0, seconds=0.0,
            workers=RANKS, facts={},
        )  # fmt: skip

    monkeypatch.setattr(running, "launch", launch)
    program = syncline.vertex_program(consistency=consistency, until=0, initial=0)(update)
    syncline.graph.run(program, graph, workers=RANKS, partition="hash", asynchronous=True, max_rounds=9)
    assert orders == [consistency == "edge"]


@pytest.mark.parametrize("schedule", ["sweep", "fifo", "priority"])
def test_asynchronous_parts_find_the_same_values(on_ranks, schedule):
    for seed, consistency in enumerate(["vertex", "edge", "full"]):
        graph, settings = random_graph(seed), {"schedule": schedule, "consistency": consistency}
        asynchronously = {**settings, "asynchronous": True, "workers": RANKS, "partition": "hash"}
        for name in ("paths", "components", "k_core"):
            program = LIBRARY[name]
            assert program(graph, **asynchronously).values.tolist() == program(graph, **settings).values.tolist()
        found = syncline.graph.pagerank(graph, until=1e-12, **asynchronously)
        assert found.converged
        assert np.abs(found.values - syncline.graph.pagerank(graph, until=1e-13).values).sum() < 1e-10


def test_messages_are_scattered_asynchronously_too(on_ranks):
    tree = syncline.Graph([(v // 2, v) for v in range(1, 40)], size=40)
    rng = np.random.default_rng(0)
    potentials, coupling = 0.1 + rng.random((40, 3)), np.full((3, 3), 0.2) + 0.8 * np.eye(3)
    one = syncline.graph.belief_propagation(tree, potentials, coupling, until=1e-12)
    found = syncline.graph.belief_propagation(
        tree, potentials, coupling, until=1e-12, workers=RANKS, partition="hash", asynchronous=True
    )
    assert np.abs(found.values - one.values).max() < 1e-9


def test_only_what_the_cut_needs_is_sent(on_ranks):
    """Two cliques with one edge between them: one vertex is read on the other side, and only if it has changed."""
    clique = [(a, b) for a in range(10) for b in range(10) if a != b]
    edges = [*clique, *((a + 10, b + 10) for a, b in clique), (9, 10)]
    graph = syncline.Graph(edges)
    program = syncline.vertex_program(initial=1.0, consistency="vertex", until=0)(
        lambda v: v.value + v.gather("in", lambda e: e.source.value) * 1e-3
    )
    found = syncline.graph.run(program, graph, workers=2, max_rounds=5)
    assert found.values.tolist() == syncline.graph.run(program, graph, max_rounds=5).values.tolist()
    assert found.facts["sent"] == 5 * (4 + 8)  # each round: which rows (4 bytes), and one value
    constant = syncline.graph.run(lambda v: v.value, graph, workers=2, max_rounds=5)
    assert constant.facts["sent"] == 0


def test_aggregates_are_those_of_the_whole_graph(on_ranks):
    graph = random_graph(2)
    program = syncline.vertex_program(
        initial=lambda g: np.arange(g.size) % 7, until=0, consistency="vertex",
        aggregates={"total": np.sum, "most": np.max, "median": lambda values: int(np.median(values))},
    )(lambda v: v.value + v.aggregates["total"] % 5 + v.aggregates["most"] % 3 + v.aggregates["median"])  # fmt: skip
    same(
        syncline.graph.run(program, graph, max_rounds=6),
        syncline.graph.run(program, graph, max_rounds=6, workers=RANKS, partition="hash"),
    )


def test_the_routes_are_the_pairs_of_neighbors_that_are_apart():
    graph = random_graph(1)
    owners = divide(graph, 3, "hash").vertices
    routes = vertex_routes(graph, owners, frozenset(["in"]))
    expected = {(owners[a], owners[b], a) for a, b in zip(graph.sources, graph.targets, strict=True)}
    expected = {(p, q, v) for p, q, v in expected if p != q}
    assert {(p, q, v) for (p, q), rows in routes.items() for v in rows} == expected
