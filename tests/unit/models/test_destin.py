"""DeSTIN's nodes: what they learn, what they believe, what they see."""

from __future__ import annotations

import pytest
import torch

from syncline.errors import ConfigError, DataError
from syncline.models import zoo
from syncline.models.destin import cells, transitions
from syncline.models.destin.geometry import Geometry
from syncline.models.destin.network import DestinNetwork

RATES = cells.Rates(memory=50.0, variance=0.1, starvation=0.05)


def network(shape: tuple[int, ...] = (1, 8, 8), **options: object) -> DestinNetwork:
    torch.manual_seed(0)
    made = zoo.build(
        "destin", shape, 10, **{"grid": (4, 2, 1), "centroids": 5, "shared": False, "movements": 1, **options}
    )
    assert isinstance(made, DestinNetwork)
    return made


def images(samples: int, seed: int = 1, shape: tuple[int, ...] = (1, 8, 8)) -> torch.Tensor:
    return torch.rand(samples, *shape, generator=torch.Generator().manual_seed(seed))


def step(net: DestinNetwork, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    net.begin_step(len(batch))
    optimizer.zero_grad()
    loss = net(batch).mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def test_one_observation_at_a_time_follows_the_published_rules() -> None:
    torch.manual_seed(0)
    learned = cells.new_cells(1, 3, 2, center=0.0, spread=1.0)
    mean, variance = learned[0, :, :2].clone(), learned[0, :, 2:4].clone()
    wins, starvation = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    for o in torch.randn(200, 2, dtype=torch.float64):
        observed = o.view(1, 1, 2)
        chosen, _ = cells.winners(observed, learned)
        cells.learn(learned, cells.sums_of(observed, chosen, 3), RATES)
        k = int((starvation * (o - mean).square().sum(1)).argmin())
        wins[k] += 1
        variance[k] += max(RATES.variance, 1 / wins[k]) * ((o - mean[k]).square() - variance[k])
        mean[k] += (o - mean[k]) / min(wins[k], RATES.memory)
        starvation *= 1 - RATES.starvation
        starvation[k] = 1
        assert int(chosen) == k
    own = cells.parts_of(learned)
    for found, expected in zip(own, (mean, variance, wins.unsqueeze(1), starvation.unsqueeze(1)), strict=True):
        torch.testing.assert_close(found[0], expected)


def test_the_sums_of_the_parts_of_a_mini_batch_add_up() -> None:
    torch.manual_seed(0)
    observed, learned = torch.randn(4, 30, 6, dtype=torch.float64), cells.new_cells(4, 3, 6, center=0.0, spread=1.0)
    chosen, _ = cells.winners(observed, learned)
    parts = [cells.sums_of(observed[:, low:high], chosen[:, low:high], 3) for low, high in ((0, 7), (7, 30))]
    torch.testing.assert_close(cells.sums_of(observed, chosen, 3), parts[0] + parts[1])


def test_a_starved_cluster_wins_in_the_end() -> None:
    learned = cells.new_cells(1, 2, 1, center=0.0, spread=0.0)
    cells.parts_of(learned).mean[0, :, 0] = torch.tensor([0.0, 10.0])
    observed = torch.tensor([[[0.5], [-0.5]]], dtype=torch.float64)
    for _ in range(200):
        chosen, _ = cells.winners(observed, learned)
        cells.learn(learned, cells.sums_of(observed, chosen, 2), RATES)
    assert cells.parts_of(learned).mean.flatten().sort().values.tolist() == pytest.approx([-0.5, 0.5], abs=0.1)


@pytest.mark.parametrize("shared", [False, True])
def test_beliefs_add_up_to_1_in_every_node(shared: bool) -> None:
    net = network(shared=shared).eval()
    found = net.beliefs(images(3))
    assert found.shape == (3, (16 + 4 + 1) * 5)
    torch.testing.assert_close(found.view(3, 21, 5).sum(-1), torch.ones(3, 21))


def test_nodes_that_share_clusters_believe_the_same_of_the_same_patch() -> None:
    net = network(shared=True).eval()
    same = images(1)[:, :, :2, :2].repeat(1, 1, 4, 4)
    lowest = net.beliefs(same)[:, : 16 * 5].view(16, 5)
    torch.testing.assert_close(lowest, lowest[:1].expand(16, 5))


@pytest.mark.parametrize("options", [{}, {"shared": True}, {"memory": "table", "movements": 4}])
def test_training_lowers_the_error_on_unseen_images(options: dict[str, object]) -> None:
    net = network(training="concurrent", **options)
    optimizer = net.own_optimizer()
    with torch.no_grad():
        before = float(net(images(64, seed=2)).mean())
    for number in range(30):
        step(net, optimizer, images(32, seed=10 + number))
    with torch.no_grad():
        after = float(net(images(64, seed=2)).mean())
    assert after < 0.7 * before


@pytest.mark.parametrize("options", [{}, {"training": "concurrent", "memory": "table", "movements": 3}])
def test_accumulated_weighted_parts_of_a_step_are_the_whole_step(options: dict[str, object]) -> None:
    batch, whole, parts = images(20), network(**options), network(**options)
    step(whole, whole.own_optimizer(), batch)
    parts.begin_step(20)
    for low, high in ((0, 3), (3, 20)):  # as shares of two workers, whose mean gradients are weighted
        (parts(batch[low:high]).mean() * ((high - low) / 20)).backward()
    parts.own_optimizer().step()
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert cells.parts_of(whole.layers[0].cells).wins.sum() == 20 * 16 * whole.settings.movements


def test_greedy_training_changes_one_layer_at_a_time_and_the_table_last() -> None:
    net = network(memory="table", movements=2)
    optimizer = net.own_optimizer()
    for number, done in enumerate((0.0, 0.25, 0.5, 0.75)):
        net.enter_stage(done)
        before = {name: p.detach().clone() for name, p in net.named_parameters()}
        step(net, optimizer, images(16, seed=number))
        changed = {name for name, p in net.named_parameters() if not torch.equal(p, before[name])}
        of_tables = {f"layers.{n}.table" for n in range(3)}
        assert changed == ({f"layers.{number}.cells"} if number < 3 else of_tables)
    assert [net.stage_at(done) for done in (0.0, 0.25, 0.5, 0.75)] == ["layer1", "layer2", "layer3", "transitions"]


def test_the_table_gives_what_its_equation_says() -> None:
    generator = torch.Generator().manual_seed(0)
    table = transitions.new_table(2, 3, 4)
    states = [torch.randint(high, (2, 50), generator=generator) for high in (3, 4, 4)]
    transitions.learn(table, transitions.counted(table, *states))
    counts = torch.zeros(2, 3, 4, 4, dtype=torch.float64)
    for row in range(2):
        for advice, before, after in zip(*(s[row].tolist() for s in states), strict=True):
            counts[row, advice, before, after] += 1
    belief = torch.rand(2, 5, 4, generator=generator, dtype=torch.float64)
    advice = torch.randint(3, (2, 5), generator=generator)
    found = transitions.expected(table, advice, belief)
    chances = (counts + 0.25) / (counts + 0.25).sum(-1, keepdim=True)
    for row in range(2):
        for sample in range(5):
            expected = belief[row, sample] @ chances[row, advice[row, sample]]
            torch.testing.assert_close(found[row, sample], expected)


def test_a_recurrent_node_observes_its_own_belief_and_its_parents() -> None:
    net = network(memory="recurrent", movements=3, training="concurrent", centroids=(5, 4, 3))
    assert [layer.means.shape[-1] for layer in net.layers] == [4 + 5 + 4, 4 * 5 + 4 + 3, 4 * 4 + 3]
    step(net, net.own_optimizer(), images(8))
    assert net.eval().beliefs(images(2)).shape == (2, 16 * 5 + 4 * 4 + 3)


def test_children_and_parents_are_where_they_lie() -> None:
    geometry = Geometry((1, 4, 4), (4, 2, 1))
    pixels = torch.arange(16.0).view(1, 1, 4, 4)
    lowest = geometry.patches(pixels)
    assert geometry.children(lowest, 1)[0].tolist()[1] == [2.0, 3.0, 6.0, 7.0]
    parents = geometry.of_parents(torch.arange(4).view(1, 4), 0)
    assert parents.view(4, 4).tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3], [2, 2, 3, 3]]


def test_an_image_moves_by_one_pixel_and_is_padded_to_whole_patches() -> None:
    geometry = Geometry((1, 7, 7), (4, 2))
    first, second = geometry.views(torch.arange(49.0).view(1, 1, 7, 7), 2)
    assert first.shape == second.shape == (1, 1, 8, 8)
    torch.testing.assert_close(second[..., :-1], first[..., 1:])


def test_a_number_that_is_not_finite_is_refused_with_its_count() -> None:
    batch = images(4)
    batch[1, 0, 3, 3] = float("nan")
    with pytest.raises(DataError) as caught:
        network()(batch)
    assert caught.value.code == "non-finite-input"
    assert caught.value.facts["count"] == 1


@pytest.mark.parametrize(
    ("shape", "options", "code"),
    [
        ((1, 9, 9), {"grid": (8, 4, 2, 1)}, "destin-size"),
        ((1, 3, 3), {"grid": (8, 4, 2, 1)}, "destin-size"),
        ((64,), {}, "destin-shape"),
        ((1, 8, 8), {"grid": (4, 3)}, "destin-grid"),
        ((1, 8, 8), {"grid": (4, 4)}, "destin-grid"),
        ((1, 8, 8), {"centroids": (5, 5)}, "destin-centroids"),
        ((1, 8, 8), {"centroids": 1}, "destin-centroids"),
        ((1, 8, 8), {"memory": "table"}, "destin-memory"),
        ((1, 8, 8), {"memory": "recurrent", "movements": 2}, "destin-memory"),
        ((1, 8, 8), {"sharpness": 0}, "destin-sharpness"),
    ],
)
def test_what_does_not_fit_is_refused(shape: tuple[int, ...], options: dict[str, object], code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        network(shape, **options)
    assert caught.value.code == code


def test_the_grid_that_a_refusal_proposes_fits() -> None:
    with pytest.raises(ConfigError, match=r"grid=\(3, 1\).*side of 8 or 16"):
        network((1, 9, 9), grid=(8, 4, 2, 1))
    network((1, 9, 9), grid=(3, 1))
