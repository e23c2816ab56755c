"""On random graphs: equal to networkx, and consistency is what it promises."""

from __future__ import annotations

import networkx as nx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import syncline
from syncline.graphs.colors import classes, colors_for


@st.composite
def graphs(draw, most: int = 25):
    size = draw(st.integers(1, most))
    ends = draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)), max_size=80))
    return syncline.Graph(list(dict.fromkeys(ends)), size=size)


def network_of(graph):
    network = nx.DiGraph()
    network.add_nodes_from(range(graph.size))
    network.add_edges_from(zip(graph.sources.tolist(), graph.targets.tolist(), strict=True))
    return network


def simple_of(graph):
    simple = nx.Graph(network_of(graph))
    simple.remove_edges_from(list(nx.selfloop_edges(simple)))
    return simple


@settings(max_examples=30, deadline=None)
@given(graphs(), st.sampled_from(["sweep", "fifo", "priority"]), st.sampled_from(["vertex", "edge", "full"]))
def test_pagerank_does_not_depend_on_schedule_and_consistency(graph, schedule, consistency):
    expected = nx.pagerank(network_of(graph), tol=1e-14, max_iter=2000)
    found = syncline.graph.pagerank(graph, until=1e-12, schedule=schedule, consistency=consistency)
    assert np.abs(found.values - list(expected.values())).sum() < 1e-9


@settings(max_examples=30, deadline=None)
@given(graphs(), st.sampled_from(["sweep", "fifo", "priority"]))
def test_components_cores_and_paths_are_those_of_networkx(graph, schedule):
    simple, network = simple_of(graph), network_of(graph)
    cores = nx.core_number(simple)
    assert syncline.graph.k_core(graph, schedule=schedule).values.tolist() == [cores[v] for v in range(graph.size)]
    found = syncline.graph.components(graph, schedule=schedule).values
    for component in nx.connected_components(simple):
        assert {found[v] for v in component} == {min(component)}
    lengths = nx.single_source_shortest_path_length(network, 0)
    paths = syncline.graph.shortest_paths(graph, source=0, schedule=schedule).values
    assert paths.tolist() == [lengths.get(v, np.inf) for v in range(graph.size)]
    corners = nx.triangles(simple)
    assert syncline.graph.triangles(graph).values.tolist() == [corners[v] for v in range(graph.size)]


@settings(max_examples=40, deadline=None)
@given(graphs(), st.sampled_from(["sweep", "fifo", "priority", "chromatic"]), st.integers(1, 3))
def test_a_greedy_coloring_is_proper_under_edge_consistency_after_any_round(graph, schedule, rounds):
    found = syncline.graph.coloring(graph, schedule=schedule, max_rounds=rounds).values
    assert all(found[a] != found[b] for a, b in simple_of(graph).edges)


def test_a_greedy_coloring_is_not_proper_without_edge_consistency():
    found = syncline.graph.coloring(syncline.Graph([(0, 1)]), consistency="vertex", max_rounds=7).values
    assert found[0] == found[1]


@settings(max_examples=40, deadline=None)
@given(graphs(), st.sampled_from(["edge", "full"]))
def test_batches_keep_apart_what_consistency_says(graph, consistency):
    simple = simple_of(graph)
    if consistency == "full":
        simple = nx.power(simple, 2)
    colors = colors_for(graph, consistency)
    assert all(colors[a] != colors[b] for a, b in simple.edges)
    assert sorted(np.concatenate(classes(colors)).tolist()) == list(range(graph.size))


@settings(max_examples=40, deadline=None)
@given(graphs(), st.sampled_from(["edge", "full"]), st.integers(1, 3))
def test_edge_consistency_equals_updating_one_vertex_after_the_other(graph, consistency, rounds):
    """Exactly: the sums are of integers, and each depends on the order of updates."""

    def update(v):
        return (v.gather("in", lambda e: 3 * e.source.value + 1) + v.value) % 1009

    first = np.arange(graph.size) * 7 % 11
    program = syncline.vertex_program(consistency=consistency, initial=first, until=0)(update)
    found = syncline.graph.run(program, graph, max_rounds=rounds)
    one_by_one = first.copy()
    order = np.concatenate(classes(colors_for(graph, consistency)))
    for _ in range(found.rounds):
        for v in order:
            one_by_one[v] = (
                sum(3 * one_by_one[u] + 1 for u in graph.sources[graph.targets == v]) + one_by_one[v]
            ) % 1009
    assert found.values.tolist() == one_by_one.tolist()
