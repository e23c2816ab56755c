"""The library on known graphs: equal to networkx, to enumeration, or to the matrices that were factored."""

from __future__ import annotations

import itertools

import networkx as nx
import numpy as np
import pytest
from networkx.algorithms.community import label_propagation_communities

import syncline
from syncline.errors import ConfigError, DataError

GRAPHS = {
    "karate": nx.karate_club_graph(),
    "les-miserables": nx.les_miserables_graph(),
    "florentine": nx.florentine_families_graph(),
    "davis": nx.davis_southern_women_graph(),
    "scale-free": nx.DiGraph(nx.scale_free_graph(300, seed=1)),
}


@pytest.fixture(params=GRAPHS)
def pair(request):
    """One of five graphs, as networkx has it and as we do, and the simple undirected form of networkx."""
    network = GRAPHS[request.param]
    simple = nx.Graph(network)
    simple.remove_edges_from(list(nx.selfloop_edges(simple)))
    return network, syncline.Graph.of(network), simple


def test_pagerank(pair):
    network, graph, _ = pair
    for personal in (None, {next(iter(network)): 2.0, list(network)[3]: 1.0}):
        expected = nx.pagerank(network, tol=1e-14, max_iter=1000, weight=None, personalization=personal)
        found = [
            syncline.graph.pagerank(graph, schedule=schedule, until=1e-12, personal=personal)
            for schedule in ("sweep", "fifo", "priority")
        ]  # fmt: skip
        found.append(syncline.graph.pagerank(graph, consistency="edge", until=1e-12, personal=personal))
        for result in found:
            assert result.converged
            assert np.abs(result.values - list(expected.values())).sum() < 1e-9


def test_weighted_pagerank(pair):
    network, _, _ = pair
    weighted = nx.DiGraph(network)
    for number, (_, _, attributes) in enumerate(weighted.edges(data=True)):
        attributes.clear()
        attributes["w"] = 1.0 + number % 5
    expected = nx.pagerank(weighted, tol=1e-14, max_iter=1000, weight="w")
    for schedule in ("sweep", "priority"):
        found = syncline.graph.pagerank(syncline.Graph.of(weighted), weight="w", until=1e-12, schedule=schedule)
        assert np.abs(found.values - list(expected.values())).sum() < 1e-9


def test_components_cores_and_triangles(pair):
    network, graph, simple = pair
    number = {name: place for place, name in enumerate(network)}
    found = syncline.graph.components(graph).values
    for component in nx.connected_components(simple):
        members = [number[name] for name in component]
        assert set(found[members]) == {min(members)}
    cores, corners = nx.core_number(simple), nx.triangles(simple)
    assert syncline.graph.k_core(graph).values.tolist() == [cores[name] for name in network]
    assert syncline.graph.triangles(graph).values.tolist() == [corners[name] for name in network]


@pytest.mark.parametrize("schedule", ["fifo", "priority", "sweep"])
def test_shortest_paths(pair, schedule):
    network, _, _ = pair
    weighted = nx.DiGraph(network) if network.is_directed() else nx.Graph(network)
    for number, (_, _, attributes) in enumerate(weighted.edges(data=True)):
        attributes.clear()
        attributes["km"] = float(number * 7 % 11)
    source = next(iter(network))
    expected = nx.single_source_dijkstra_path_length(weighted, source, weight="km")
    graph = syncline.Graph.of(weighted)
    found = syncline.graph.shortest_paths(graph, source=source, weight="km", schedule=schedule)
    assert found.values.tolist() == [expected.get(name, np.inf) for name in network]


def test_label_propagation_finds_the_communities_of_networkx_with_its_colors(pair):
    _, graph, simple = pair
    colors = nx.coloring.greedy_color(simple)
    found = syncline.graph.label_propagation(graph, colors=[colors[name] for name in simple])
    names = list(simple)
    ours = {frozenset(names[v] for v in np.flatnonzero(found.values == label)) for label in set(found.values.tolist())}
    assert ours == {frozenset(community) for community in label_propagation_communities(simple)}


def test_known_labels_spread_and_stay():
    graph = syncline.Graph([(0, 1), (1, 2), (2, 3), (4, 5)], directed=False)
    found = syncline.graph.label_propagation(graph, labels={0: 7, 3: 2})
    assert found.converged
    assert (found[0], found[3]) == (7, 2)
    assert {found[1], found[2]} <= {2, 7}
    assert found.values[4:].tolist() == [-1, -1]


def markov_field(network, states=3):
    rng = np.random.default_rng(0)
    potentials, coupling = rng.random((len(network), states)) + 0.2, rng.random((states, states)) + 0.2
    return potentials, coupling + coupling.T


def marginals(network, potentials, coupling):
    """By enumeration of all assignments."""
    found = np.zeros_like(potentials)
    for states in itertools.product(range(potentials.shape[1]), repeat=len(network)):
        weight = np.prod([potentials[v, s] for v, s in enumerate(states)])
        weight *= np.prod([coupling[states[a], states[b]] for a, b in network.edges])
        found[np.arange(len(states)), states] += weight
    return found / found.sum(axis=1, keepdims=True)


def test_beliefs_are_the_exact_marginals_of_trees():
    for seed in range(3):
        tree = nx.random_labeled_tree(7, seed=seed)
        field = markov_field(tree)
        found = syncline.graph.belief_propagation(syncline.Graph.of(tree), *field)
        assert found.converged
        assert np.abs(found.values - marginals(tree, *field)).max() < 1e-9


def test_gibbs_samples_approach_the_marginals_of_a_graph_with_cycles():
    network = nx.cycle_graph(6)
    field = markov_field(network, states=2)
    found = syncline.graph.gibbs(syncline.Graph.of(network), *field, samples=4000)
    assert np.abs(found.values - marginals(network, *field)).max() < 0.04
    assert np.allclose(found.values.sum(axis=1), 1)


def test_als_solves_its_normal_equations_and_predicts_ratings_that_it_has_not_seen():
    rng = np.random.default_rng(0)
    users, items = rng.normal(size=(30, 2)), rng.normal(size=(40, 2))
    ratings = users @ items.T
    a, b = np.nonzero(rng.random((30, 40)) < 0.6)
    graph = syncline.Graph((a, 30 + b), size=70, edge_fields={"rating": ratings[a, b]})
    found = syncline.graph.als(graph, factors=2, regularization=1e-4, rounds=60)
    assert np.abs(found.values[:30] @ found.values[30:].T - ratings).max() < 0.05
    item = 5  # items are updated last, so that each solves its own system exactly
    seen = found.values[a[b == item]]
    side = seen.T @ ratings[a[b == item], item]
    solved = np.linalg.solve(seen.T @ seen + 1e-4 * len(seen) * np.eye(2), side)
    assert np.allclose(found.values[30 + item], solved)


def test_longest_paths_are_those_of_networkx_and_a_cycle_is_named():
    for seed in range(5):
        rng = np.random.default_rng(seed)
        ends = np.sort(rng.integers(0, 30, (2, 60)), axis=0)
        ends = np.unique(ends[:, ends[0] < ends[1]], axis=1)
        order = rng.permutation(30)
        graph = syncline.Graph(order[ends], size=30, edge_fields={"hours": rng.integers(0, 9, ends.shape[1])})
        network = nx.DiGraph()
        network.add_nodes_from(range(30))
        hours = graph.edge_fields["hours"].tolist()
        network.add_weighted_edges_from(zip(graph.sources.tolist(), graph.targets.tolist(), hours, strict=True))
        longest = dict.fromkeys(range(30), 0)
        for vertex in nx.topological_sort(network):
            for _, target, weight in network.out_edges(vertex, data="weight"):
                longest[target] = max(longest[target], longest[vertex] + weight)
        for schedule in ("sweep", "fifo"):
            found = syncline.graph.longest_paths(graph, weight="hours", schedule=schedule)
            assert found.values.tolist() == [longest[v] for v in range(30)]
    with pytest.raises(DataError) as caught:
        syncline.graph.longest_paths(syncline.Graph([("z", "a"), ("a", "b"), ("b", "c"), ("c", "a"), ("c", "y")]))
    assert caught.value.code == "cycle"
    assert "abcabc".find("".join(caught.value.facts["cycle"])) >= 0  # in the order of its edges
    assert len(caught.value.facts["cycle"]) == 3


def test_input_that_is_wrong_is_refused():
    graph = syncline.Graph([("a", "b"), ("b", "c")], edge_fields={"w": [1.0, -2.0]})
    for call in (
        lambda: syncline.graph.shortest_paths(graph, source="a", weight="w"),
        lambda: syncline.graph.pagerank(graph, weight="w"),
    ):  # fmt: skip
        with pytest.raises(DataError) as caught:
            call()
        assert (caught.value.code, caught.value.facts["edge"]) == ("negative-weight", 1)
    with pytest.raises(ConfigError) as caught:
        syncline.graph.shortest_paths(graph, source="nowhere")
    assert caught.value.code == "no-vertex"
    with pytest.raises(ConfigError) as caught:
        syncline.graph.als(syncline.Graph([(0, 1), (1, 0)], edge_fields={"rating": [1.0, 2.0]}))
    assert caught.value.code == "not-bipartite"
