"""Graph networks: the formulas of their papers, parts that give what the whole gives, and drawn neighbors."""

from __future__ import annotations

import copy
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch
from graph_examples import two_groups
from torch.nn import functional as F

import syncline
from syncline.comms.collective import Collective
from syncline.comms.halo_exchange import HaloExchange
from syncline.compute.dropout import Dropouts
from syncline.errors import ConfigError
from syncline.graphs.halo import part_of, trades_of
from syncline.graphs.node_data import node_data
from syncline.graphs.partition import METHODS, divide
from syncline.models.graph_networks.sampling import draw
from syncline.models.zoo import registry as zoo
from syncline.testing.threads import run_on_threads

DATA = node_data(two_groups())
SHARED = Path(os.environ.get("SYNCLINE_DATA") or Path(__file__).parents[3].parent / "shared" / "data")
needs_shared = pytest.mark.skipif(not (SHARED / "cora").is_dir(), reason="the real graphs are not on this machine")
SPARSE = copy.copy(DATA)
SPARSE.features = scipy.sparse.csr_matrix(np.where(DATA.features > 0.8, DATA.features, 0))
PARTITIONERS = [name for name in METHODS if name != "metis"]


def network(name, data=DATA, **options):
    torch.manual_seed(0)
    built = zoo.build(name, (data.features.shape[1],), 3, **options).double()
    built.bind(data)
    return built


def adjacency():
    a = torch.zeros(60, 60, dtype=torch.float64)
    a[DATA.edges.targets, DATA.edges.sources] = 1
    return a


def features():
    return torch.from_numpy(DATA.features).double()


def test_gcn_is_the_formula_of_its_paper():
    model = network("gcn", dropout=0.0)
    loops = adjacency() + torch.eye(60)
    scale = loops.sum(1).rsqrt()
    a = scale[:, None] * loops * scale[None, :]
    first, second = model.layers
    hidden = torch.relu(a @ features() @ first.transform.weight + first.bias)
    expected = a @ hidden @ second.transform.weight + second.bias
    torch.testing.assert_close(model(torch.arange(60)), expected)


def test_sage_adds_the_mean_of_the_neighbors():
    model = network("sage", layers=1)
    (layer,) = model.layers
    own, others = layer.transform.weight.chunk(2, dim=1)
    mean = adjacency() / adjacency().sum(1, keepdim=True).clamp(min=1)
    expected = features() @ own + mean @ features() @ others + layer.bias
    torch.testing.assert_close(model.eval()(torch.arange(60)), expected)


def test_gin_is_a_perceptron_of_the_sum():
    model = network("gin", layers=1)
    (layer,) = model.layers
    with torch.no_grad():
        layer.epsilon.fill_(0.3)
    summed = 1.3 * features() + adjacency() @ features()
    expected = layer.second(torch.relu(summed @ layer.transform.weight + layer.bias))
    torch.testing.assert_close(model.eval()(torch.arange(60)), expected)


def test_gat_weighs_neighbors_by_a_softmax():
    model = network("gat", layers=1)
    (layer,) = model.layers
    z = features() @ layer.transform.weight
    scores = F.leaky_relu((z @ layer.source[0])[None, :] + (z @ layer.target[0])[:, None], 0.2)
    scores = scores.masked_fill(adjacency() + torch.eye(60) == 0, -torch.inf)
    torch.testing.assert_close(model.eval()(torch.arange(60)), scores.softmax(1) @ z + layer.bias)


def gradients_in_parts(name, data, parts, method, options):
    whole = network(name, data, **options)
    nodes, labels = torch.from_numpy(data.train), torch.from_numpy(data.labels)

    def step(model, mine):
        with Dropouts(0).of(3, data.train):
            loss = F.cross_entropy(model(mine), labels[mine], reduction="sum")
        loss.backward()
        return float(loss.detach())

    expected = step(whole, nodes)
    division = divide(data.edges, parts, method)
    models = [network(name, data, **options) for _ in range(parts)]

    def work(collective: Collective) -> float:
        model = models[collective.rank]
        exchange = HaloExchange(collective, trades_of(data.edges, division))
        model.divide(part_of(data.edges, division, collective.rank), exchange, cuts_vertices=division.cuts_vertices)
        return step(model, nodes[model.owns(nodes)])

    losses = run_on_threads(parts, work)
    assert sum(losses) == pytest.approx(expected, rel=1e-9)
    for number, p in enumerate(whole.parameters()):
        summed = sum(list(model.parameters())[number].grad for model in models)
        torch.testing.assert_close(summed, p.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", PARTITIONERS)
@pytest.mark.parametrize("parts", [2, 3])
def test_parts_of_a_graph_add_up_to_the_gradient_of_the_whole(parts, method):
    gradients_in_parts("gcn", SPARSE, parts, method, {})


@pytest.mark.parametrize(
    ("name", "method"),
    [("sage", "greedy"), ("sage", "vertex-cut"), ("gin", "hash"), ("gin", "vertex-hash"), ("gat", "blocks")],
)
def test_so_do_parts_of_the_other_networks(name, method):
    gradients_in_parts(name, DATA, 3, method, {"layers": 3})


def test_gat_refuses_a_vertex_cut():
    with pytest.raises(ConfigError) as caught:
        gradients_in_parts("gat", DATA, 2, "vertex-cut", {})
    assert caught.value.code == "partition"


def test_stale_halos_are_read_every_third_step_and_are_never_older_than_their_bound():
    division = divide(DATA.edges, 2, "hash")
    models = [network("gcn") for _ in range(2)]

    def work(collective: Collective) -> tuple[list[int], list[int]]:
        model = models[collective.rank]
        exchange = HaloExchange(collective, trades_of(DATA.edges, division), staleness=2)
        model.divide(part_of(DATA.edges, division, collective.rank), exchange, cuts_vertices=False)
        mine = torch.from_numpy(part_of(DATA.edges, division, collective.rank).own)
        ages, sent = [], []
        for _ in range(7):
            model(mine).sum().backward()
            ages.append(exchange.age or 0)
            sent.append(exchange.bytes_sent)
        return ages, sent

    for ages, sent in run_on_threads(2, work):
        assert ages == [0, 1, 2, 0, 1, 2, 0]
        assert sent[0] == sent[1] == sent[2] < sent[3] == sent[5] < sent[6]


def test_a_network_without_a_graph_says_how_to_give_it_one():
    with pytest.raises(ConfigError) as caught:
        zoo.build("gcn", (8,), 3)(torch.arange(3))
    assert caught.value.code == "no-graph"


def test_outputs_are_computed_anew_when_parameters_change():
    model = network("gcn").eval()
    with torch.no_grad():
        before = model(torch.arange(5))
        assert torch.equal(before, model(torch.arange(5)))
        model.layers[1].bias.add_(1)
        torch.testing.assert_close(model(torch.arange(5)), before + 1)


def test_drawn_neighbors_do_not_depend_on_which_nodes_are_drawn_together():
    edges = DATA.edges.into
    places, others = draw(edges, np.arange(60), 3, key=7)
    together = {node: sorted(others[places == node].tolist()) for node in range(60)}
    for nodes in (np.arange(0, 60, 2), np.arange(59, -1, -1), np.array([17])):
        places, others = draw(edges, nodes, 3, key=7)
        for place, node in enumerate(nodes.tolist()):
            assert sorted(others[places == place].tolist()) == together[node]
    assert {node: sorted(draw(edges, np.array([node]), 3, key=8)[1].tolist()) for node in range(60)} != together


def test_every_neighbor_is_equally_likely_and_none_is_drawn_twice():
    node = int(np.argmax(DATA.edges.in_degree))
    neighbors = set(DATA.edges.into.others[slice(*DATA.edges.into.offsets[node : node + 2])].tolist())
    counts: Counter[int] = Counter()
    for key in range(3000):
        drawn = draw(DATA.edges.into, np.array([node]), 3, key)[1].tolist()
        assert len(set(drawn)) == 3
        counts.update(drawn)
    assert set(counts) == neighbors
    expected = 9000 / len(neighbors)
    assert max(abs(count - expected) for count in counts.values()) < 6 * expected**0.5


def test_with_as_many_drawn_as_there_are_the_result_is_that_of_all():
    torch.manual_seed(0)
    few, every = network("sage", neighbors=60, dropout=0.0), network("sage", dropout=0.0)
    nodes = torch.tensor([3, 50, 3, 9])
    torch.testing.assert_close(few(nodes), every(nodes))


def trained(data, name, epochs, batch, lr, decay, **options):
    """The test accuracy after some epochs of training without Syncline's loop."""
    torch.manual_seed(0)
    model = zoo.build(name, (data.features.shape[1],), data.classes, **options)
    model.bind(data)
    labels, test = torch.from_numpy(data.labels), torch.from_numpy(data.test)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=decay, fused=True)
    dropouts, step = Dropouts(0), 0
    for epoch in range(epochs):
        order = np.random.RandomState(epoch).permutation(data.train)
        for start in range(0, len(order), batch):
            nodes = order[start : start + batch]
            with dropouts.of(step, nodes):
                loss = F.cross_entropy(model(torch.from_numpy(nodes)), labels[nodes])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
    with torch.no_grad():
        return float((model.eval()(test).argmax(1) == labels[test]).float().mean())


@needs_shared
def test_gcn_reaches_the_published_accuracy_on_the_public_split_of_cora():
    cora = node_data("cora")
    assert (len(cora.train), len(cora.test), cora.edges.edge_count) == (140, 1000, 2 * 5278)
    assert trained(cora, "gcn", 200, 140, 0.01, 5e-4) > 0.80


@needs_shared
def test_the_sections_of_packages_are_found_much_better_with_their_dependencies():
    debian = node_data("debian")
    alone = copy.copy(debian)
    alone.edges = syncline.Graph(edges=np.zeros((2, 0), np.int64), size=debian.edges.size)
    options = {"hidden": 32, "neighbors": 10}
    with_edges, without = (trained(data, "sage", 1, 512, 0.02, 0.0, **options) for data in (debian, alone))
    assert with_edges > without + 0.05


@pytest.mark.parametrize("options", [{"hidden": 0}, {"layers": 1.5}, {"dropout": 1.0}, {"neighbors": -1}])
def test_sizes_out_of_range_are_refused(options):
    with pytest.raises(ConfigError) as caught:
        network("sage", **options)
    assert caught.value.code == "invalid-setting"


@pytest.mark.parametrize("name", zoo.graph_names())
def test_cards_know_the_number_of_parameters(name):
    card = zoo.card(name)
    built = zoo.build(name, card.reference.input_shape, card.reference.classes)
    assert sum(p.numel() for p in built.parameters()) == card.reference.parameters
