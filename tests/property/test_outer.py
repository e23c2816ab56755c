"""What becomes of the change that workers made on their own."""

from __future__ import annotations

import math

import pytest
import torch
from generators import flats
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.compute.outer import average, block_momentum, elastic, nesterov, sgd

OUTERS = [
    average(),
    sgd(0.5),
    nesterov(0.7, 0.9),
    block_momentum(0.75),
    block_momentum(0.75, nesterov=False),
    elastic(0.2),
]
every_outer = pytest.mark.parametrize("outer", OUTERS, ids=repr)
few = settings(max_examples=20)
rates = st.floats(0.01, 2.0)
momenta = st.floats(0.0, 0.99)
steps = st.lists(st.integers(1, 10_000), min_size=1, max_size=6)


def normal(seed, size=5):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(outer, anchor, deltas):
    state = outer.initial_state(anchor)
    anchors = []
    for delta in deltas:
        anchor, state = outer.step(anchor, delta, state)
        anchors.append(anchor)
    return torch.stack(anchors)


@every_outer
def test_an_outer_optimizer_prints_as_one_would_type_it(outer):
    assert eval(repr(outer)) == outer
    assert repr(nesterov(lr=0.7, momentum=0.9)) == "nesterov(lr=0.7, momentum=0.9)"


@every_outer
@few
@given(seeds=steps)
def test_a_step_changes_neither_its_anchor_nor_its_state(outer, seeds):
    anchor = normal(0)
    _, state = outer.step(anchor, normal(1), outer.initial_state(anchor))
    kept = {name: value.clone() for name, value in state.items()}
    outer.step(anchor, normal(seeds[0]), state)
    assert torch.equal(anchor, normal(0))
    assert all(torch.equal(state[name], kept[name]) for name in kept)


@every_outer
def test_where_nobody_moved_and_nothing_was_moving_the_anchor_stays(outer):
    anchor = normal(0)
    assert torch.equal(outer.step(anchor, torch.zeros(5), outer.initial_state(anchor))[0], anchor)


@every_outer
def test_a_value_that_is_not_finite_shows_in_the_anchor(outer):
    anchor = normal(0)
    delta = torch.tensor([0.0, math.nan, math.inf, 0.0, 0.0])
    after, _ = outer.step(anchor, delta, outer.initial_state(anchor))
    assert after.isfinite().tolist() == [True, False, False, True, True]


@few
@given(steps)
def test_averaging_moves_to_the_mean_of_the_workers(seeds):
    anchor = normal(0)
    mean = torch.stack([normal(seed) for seed in seeds]).mean(0)
    after, _ = average().step(anchor, mean - anchor, {})
    torch.testing.assert_close(after, mean)


@few
@given(flats(min_size=1), st.floats(-0.5, 0.5))
def test_one_worker_that_averages_with_itself_is_where_it_was(anchor, change):
    worker = anchor * (1 + change)
    after, _ = average().step(anchor, worker - anchor, {})
    slack = 2**-23 * (anchor.abs() + worker.abs()) + 1e-45
    assert ((after - worker).abs() <= slack).all()


@few
@given(flats(), steps)
def test_outer_sgd_of_rate_one_is_averaging_bit_for_bit(anchor, seeds):
    delta = normal(seeds[0], len(anchor)).float()
    assert torch.equal(sgd(1.0).step(anchor, delta, {})[0], average().step(anchor, delta, {})[0])


@few
@given(rates, steps)
def test_nesterov_without_momentum_is_sgd(lr, seeds):
    deltas = [normal(seed) for seed in seeds]
    assert torch.equal(run(nesterov(lr, 0.0), normal(0), deltas), run(sgd(lr), normal(0), deltas))


@few
@given(rates, steps)
def test_block_momentum_of_zero_is_sgd(lr, seeds):
    deltas = [normal(seed) for seed in seeds]
    for form in (True, False):
        torch.testing.assert_close(
            run(block_momentum(0.0, lr, form), normal(0), deltas), run(sgd(lr), normal(0), deltas)
        )


@few
@given(rates, momenta, steps)
def test_nesterov_is_torchs_sgd_on_the_outer_gradient(lr, momentum, seeds):
    parameter = torch.nn.Parameter(normal(0))
    optimizer = torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=momentum > 0)
    expected = []
    for seed in seeds:
        parameter.grad = -normal(seed)
        optimizer.step()
        expected.append(parameter.detach().clone())
    torch.testing.assert_close(run(nesterov(lr, momentum), normal(0), map(normal, seeds)), torch.stack(expected))


@few
@given(rates, momenta, steps)
def test_nesterov_block_momentum_is_nesterov(lr, momentum, seeds):
    deltas = [normal(seed) for seed in seeds]
    torch.testing.assert_close(
        run(block_momentum(momentum, lr, nesterov=True), normal(0), deltas),
        run(nesterov(lr, momentum), normal(0), deltas),
    )


@pytest.mark.parametrize("form", [True, False], ids=["nesterov", "classical"])
@few
@given(zeta=rates, eta=momenta, seeds=steps)
def test_block_momentum_follows_the_papers_equations(form, zeta, eta, seeds):
    outer = block_momentum(eta, zeta, form)
    w = w_g = anchor = normal(0)
    delta_t = torch.zeros_like(w)
    state = outer.initial_state(w)
    for seed in seeds:
        mean = normal(seed)
        anchor, state = outer.step(anchor, mean - anchor, state)
        delta_t = eta * delta_t + zeta * (mean - w_g)
        w = w + delta_t
        w_g = w + eta * delta_t if form else w
        torch.testing.assert_close(anchor, w_g)
        torch.testing.assert_close(outer.model(anchor, state), w)


def test_block_momentum_makes_up_for_averaging_over_workers():
    workers = 8
    outer = block_momentum(block_momentum.momentum_for(workers))
    anchors = run(outer, torch.zeros(1), [torch.ones(1)] * 200)
    torch.testing.assert_close(anchors[-1] - anchors[-2], torch.tensor([float(workers)]))


@few
@given(st.floats(0.01, 1.0), steps)
def test_what_an_elastic_worker_gives_the_centre_gets(rate, seeds):
    worker, center = normal(seeds[0]), normal(0)
    moved, _ = elastic(rate).step(center, worker - center, {})
    torch.testing.assert_close(elastic(rate).pull(worker, center) + moved, worker + center)


@few
@given(st.integers(1, 8), st.floats(0.01, 1.0), steps)
def test_all_elastic_workers_at_once_pull_with_the_sum_of_their_forces(workers, beta, seeds):
    rate = beta / workers * 0.999
    center = normal(0)
    places = [normal(seeds[0] + k) for k in range(workers)]
    expected = center + rate * sum(place - center for place in places)
    mean = torch.stack(places).mean(0)
    torch.testing.assert_close(elastic(rate).step_of_all(center, mean - center, workers), expected)


def test_elastic_workers_on_a_quadratic_follow_their_linear_system_to_the_optimum():
    # f(x) = h/2 (x - x*)^2. With z = (x_1 - x*, .., x_K - x*, center - x*), one step of gradient and force is linear.
    workers, h, lr, rate, optimum = 4, 1.5, 0.1, 0.2, 3.0
    system = torch.eye(workers + 1, dtype=torch.float64)
    for k in range(workers):
        system[k, k] -= lr * h + rate
        system[k, -1] += rate
        system[-1, k] += rate
        system[-1, -1] -= rate
    z = torch.tensor([5.0, -2.0, 0.5, 9.0, -7.0], dtype=torch.float64)
    places, center = z[:workers] + optimum, z[workers:] + optimum
    outer = elastic(rate)
    for _ in range(300):
        gradient = h * (places - optimum)
        pulled = outer.pull(places, center.expand(workers))
        center = outer.step_of_all(center, places.mean() - center, workers)
        places = pulled - lr * gradient
        z = system @ z
        torch.testing.assert_close(torch.cat((places, center)) - optimum, z, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(torch.cat((places, center)), torch.full((5,), optimum, dtype=torch.float64))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: sgd(0), "lr of sgd is 0"),
        (lambda: sgd(math.nan), "lr of sgd is nan"),
        (lambda: nesterov(0.7, 1.0), "momentum of nesterov is 1.0"),
        (lambda: block_momentum(-0.1), "momentum of block_momentum is -0.1"),
        (lambda: elastic(1.5), "rate of elastic is 1.5"),
        (lambda: elastic(0.5).step_of_all(torch.zeros(1), torch.ones(1), 4), "4 workers.*1/4"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_their_value(make, what):
    with pytest.raises(ValueError, match=what):
        make()
