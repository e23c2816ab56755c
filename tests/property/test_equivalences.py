"""Strategies that should come to the same do, and each follows its equations. All with the code of real runs."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from syncline.comms.mixing import TOPOLOGIES, mixing_matrix, spectral_gap
from syncline.comms.staleness import is_fresh, staleness_limit
from syncline.data.order import Position, SampleOrder
from syncline.strategies.exchange import Replica
from syncline.strategies.flat import FlatParameters
from syncline.strategies.gradients import GradientBuffer
from syncline.strategies.methods.asynchronous_servers import AsynchronousServerExchange
from syncline.strategies.presets import PRESETS
from syncline.strategies.reading import read_strategy
from syncline.testing.threads import run_on_threads
from syncline.testing.trials import Problem, linear_problem, train_on_threads
from syncline.workers.update import PIGGYBACKED_COUNT

few = settings(max_examples=6)
STEPS = 7
WAIT_S = 30.0
ALLREDUCE = "gradients | every(1) | everyone"


@pytest.fixture(scope="module", autouse=True)
def _one_thread_per_worker() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@st.composite
def problems(draw: st.DrawFn, momenta: tuple[float, ...] = (0.0, 0.9)) -> Problem:
    """Epochs of any length, batches that cannot be shared out evenly, fewer samples than workers at times."""
    return linear_problem(
        samples=draw(st.integers(3, 30)),
        batch=draw(st.integers(1, 12)),
        lr=0.02,
        momentum=draw(st.sampled_from(momenta)),
        seed=draw(st.integers(0, 1000)),
    )


worker_counts = st.integers(1, 5)
seeds = st.integers(0, 1000)


def trained(strategy: str, workers: int, problem: Problem, *, steps: int = STEPS, seed: int = 0) -> torch.Tensor:
    trial = train_on_threads(strategy, workers, steps=steps, problem=problem, seed=seed)
    assert trial.is_equal_everywhere
    return trial.shared[0]


def assert_equal_but_for_rounding(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------- what comes to an all-reduce


@few
@given(problem=problems(momenta=(0.0,)), workers=worker_counts, seed=seeds)
def test_averaging_after_every_step_of_plain_sgd_is_an_allreduce(problem, workers, seed):
    assert_equal_but_for_rounding(
        trained("sparknet(tau=1)", workers, problem, seed=seed), trained("allreduce", workers, problem, seed=seed)
    )


@few
@given(problem=problems(), workers=worker_counts, shards=st.integers(1, 3))
def test_servers_that_wait_for_everybody_are_an_allreduce(problem, workers, shards):
    assert_equal_but_for_rounding(
        trained(f"server-sync(shards={shards})", workers, problem), trained("allreduce", workers, problem)
    )


@few
@given(problem=problems(), workers=worker_counts, shards=st.integers(1, 3))
def test_they_are_with_adam_too(problem, workers, shards):
    problem = dataclasses.replace(problem, make_optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
    server_sync = trained(f"server-sync(shards={shards})", workers, problem)
    # Adam divides by the gradient's own size, so that it makes the most of what rounding makes of a tiny gradient.
    torch.testing.assert_close(server_sync, trained("allreduce", workers, problem), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("codec", ["int8", "onebit", "topk(0.2)"])
@settings(max_examples=4)
@given(problem=problems(), workers=st.integers(2, 5))
def test_they_are_with_encoded_gradients_too(codec, problem, workers):
    """Also where a worker has no samples in a step, so that what it could not send before must wait."""
    assert_equal_but_for_rounding(
        trained(f"server-sync + {codec}", workers, problem), trained(f"allreduce + {codec}", workers, problem)
    )


@few
@given(problem=problems(), workers=worker_counts, shards=st.integers(1, 2))
def test_staleness_of_zero_is_all_together_bit_for_bit(problem, workers, shards):
    stale = trained(f"ssp(bound=0, shards={shards})", workers, problem)
    assert torch.equal(stale, trained(f"server-sync(shards={shards})", workers, problem))


@few
@given(problem=problems(), workers=worker_counts, until=st.integers(1, STEPS))
def test_a_switch_from_a_strategy_to_itself_changes_nothing(problem, workers, until):
    switched = trained(f"allreduce until step {until}, then allreduce", workers, problem)
    assert torch.equal(switched, trained("allreduce", workers, problem))


groupings = st.sampled_from([(4, 2), (6, 2), (6, 3)])


@few
@given(problem=problems(), grouping=groupings)
def test_an_allreduce_in_two_levels_is_an_allreduce(problem, grouping):
    workers, group = grouping
    hierarchy = f"hierarchy(inside_host={ALLREDUCE}, across_hosts={ALLREDUCE}, group={group})"
    assert_equal_but_for_rounding(trained(hierarchy, workers, problem), trained("allreduce", workers, problem))


# ------------------------------------------------------------------------------------------- what comes to averaging


@few
@given(problem=problems(), workers=worker_counts, steps=st.integers(1, 4))
def test_an_outer_step_with_rate_one_is_averaging(problem, workers, steps):
    outer = trained(f"updates(outer=sgd(lr=1.0)) | every({steps})", workers, problem)
    averaged = trained(f"updates | every({steps})", workers, problem)
    if workers > 1:
        assert torch.equal(outer, averaged)
    else:  # who averages with nobody leaves its parameters alone, to the bit
        assert_equal_but_for_rounding(outer, averaged)


@few
@given(problem=problems(), grouping=groupings, steps=st.integers(1, 4))
def test_averaging_in_two_levels_is_averaging(problem, grouping, steps):
    workers, group = grouping
    average = f"updates | every({steps})"
    hierarchy = f"hierarchy(inside_host={average}, across_hosts={average}, group={group})"
    assert_equal_but_for_rounding(trained(hierarchy, workers, problem), trained(average, workers, problem))


@few
@given(problem=problems(momenta=(0.0,)), grouping=groupings)
def test_groups_that_sum_gradients_and_average_after_every_step_are_an_allreduce(problem, grouping):
    workers, group = grouping
    hierarchy = f"hierarchy(inside_host={ALLREDUCE}, across_hosts=updates | every(1), group={group})"
    assert_equal_but_for_rounding(trained(hierarchy, workers, problem), trained("allreduce", workers, problem))


# -------------------------------------------------------------------------------------------------- a worker alone

NO_PLAIN_SGD = {
    "bmuf": "the outer optimizer adds momentum to what the one worker did",
    "diloco": "so does its, and moves by 0.7 of the way",
    "easgd": "the worker is tied to a center that lags behind it",
    "downpour": "the server steps with Adagrad",
    "nexus": "the largest layer is exchanged every other step only",
    "server_async": "fetches overlap with computing, so a worker may not see its own last push",
    "ssp": "so do its, within the bound",
    "ltfb": "there is nobody to compete with, which the planner refuses",
}


def plain_sgd(problem: Problem, seed: int) -> torch.Tensor:
    model = problem.make_model()
    optimizer = problem.make_optimizer(model.parameters())
    order = SampleOrder(seed=seed, count=len(problem.inputs), batch=problem.batch)
    for share in order.shares(Position(), rank=0, size=1):
        if share.position.step == STEPS:
            break
        optimizer.zero_grad()
        index = torch.from_numpy(share.indices)
        problem.loss(model(problem.inputs[index]), problem.targets[index]).backward()
        optimizer.step()
    return FlatParameters(list(model.parameters())).read()


@pytest.mark.parametrize("name", sorted(set(PRESETS) - set(NO_PLAIN_SGD)))
@settings(max_examples=3)
@given(problem=problems(), seed=seeds)
def test_one_worker_under_a_strategy_that_reduces_to_sgd_is_sgd_bit_for_bit(name, problem, seed):
    assert torch.equal(trained(name, 1, problem, seed=seed), plain_sgd(problem, seed))


# ----------------------------------------------------------------------------------------------------------- gossip


def gossiped(topology: str, starts: torch.Tensor, rounds: int, seed: int) -> torch.Tensor:
    """Everybody's numbers (rank, number) after each round of mixing, without any training: (round, rank, number)."""

    def work(collective):
        model = nn.Linear(starts.shape[1], 1, bias=False, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        gradients = GradientBuffer(model.parameters(), collective, PIGGYBACKED_COUNT, is_flat=True)
        replica = Replica(model, optimizer, gradients, collective, seed=seed)
        exchange = read_strategy(f"gossip('{topology}')").method.exchange(replica)
        exchange.begin()
        flat = FlatParameters(gradients.parameters)
        flat.write(starts[collective.rank])
        seen = [flat.read()]
        for _ in range(rounds):
            exchange.before_forward()
            exchange.before_update(1.0 / collective.size)
            exchange.update()
            assert exchange.after_update(1.0 / collective.size)
            seen.append(flat.read())
        return torch.stack(seen)

    return torch.stack(run_on_threads(len(starts), work), dim=1)


@pytest.mark.parametrize("topology", sorted(TOPOLOGIES))
@few
@given(workers=st.integers(2, 6), seed=seeds)
def test_gossip_keeps_the_mean_and_comes_to_agree_at_least_at_the_rate_of_the_spectral_gap(topology, workers, seed):
    starts = torch.randn(workers, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    seen = gossiped(topology, starts, rounds=9, seed=seed)
    mean = starts.mean(0)
    for round, (before, after) in enumerate(itertools.pairwise(seen)):
        torch.testing.assert_close(after.mean(0), mean, rtol=0, atol=1e-12)
        gap = spectral_gap(mixing_matrix(TOPOLOGIES[topology](range(workers), round, seed)))
        assert (after - mean).norm() <= (1 - gap) * (before - mean).norm() + 1e-12
    assert (seen[-1] - mean).norm() < (seen[0] - mean).norm()


def test_four_workers_on_the_exponential_graph_have_the_exact_mean_after_two_rounds():
    starts = torch.tensor([[0.0, 8.0], [4.0, 8.0], [8.0, 8.0], [16.0, 64.0]], dtype=torch.float64)
    seen = gossiped("exponential", starts, rounds=2, seed=0)
    assert torch.equal(seen[2], torch.tensor([[7.0, 22.0]] * 4, dtype=torch.float64))
    assert not torch.equal(seen[1], seen[2])


# -------------------------------------------------------------------------------------------------------------- EASGD


def quadratic(optimum: torch.Tensor, lr: float) -> Problem:
    """(1/d) |w - optimum|^2, whatever the samples: its gradient is 2/d (w - optimum)."""
    samples = 1000  # one epoch is longer than any test here

    def make_model() -> nn.Module:
        model = nn.Linear(1, len(optimum), bias=False)
        nn.init.constant_(model.weight, 2.0)
        return model

    return Problem(
        make_model,
        lambda p: torch.optim.SGD(p, lr=lr),
        torch.ones(samples, 1),
        optimum.expand(samples, -1),
        batch=8,
    )


class InOrder:
    """Lets workers exchange in a given order: order[i] are the ranks in the i-th exchange, first come first.

    A worker may do its step with the i-th exchange when whoever is before it has gone on to its next step.
    """

    def __init__(self, orders: list[list[int]], every: int) -> None:
        self._orders, self._every = orders, every
        self._begun = dict.fromkeys(orders[0], -1)
        self._changed = threading.Condition()

    def before_step(self, rank: int, step: int) -> None:
        with self._changed:
            self._begun[rank] = step
            self._changed.notify_all()
            if (step + 1) % self._every:
                return
            order = self._orders[step // self._every]
            before = order[: order.index(rank)]
            is_my_turn = self._changed.wait_for(
                lambda: min(self._begun.values()) >= step and all(self._begun[r] > step for r in before), WAIT_S
            )
            assert is_my_turn, f"worker {rank} waited for {before} in step {step}"


@few
@given(
    workers=st.integers(1, 3),
    tau=st.integers(2, 4),
    rate=st.sampled_from([0.1, 0.225, 0.5]),
    shards=st.integers(1, 2),
    data=st.data(),
)
def test_easgd_follows_its_equations_on_a_quadratic(workers, tau, rate, shards, data):
    rounds, lr = 3, 0.3
    optimum = np.array([1.0, -2.0, 0.5])
    orders = [data.draw(st.permutations(range(workers))) for _ in range(rounds)]
    steps = rounds * tau + 1  # the last step has no exchange, so that nobody's turn is after it
    trial = train_on_threads(
        f"easgd(tau={tau}, rate={rate}, shards={shards})",
        workers,
        steps=steps,
        problem=quadratic(torch.tensor(optimum, dtype=torch.float32), lr),
        before_step=InOrder(orders, tau).before_step,
    )

    center = np.full(3, 2.0)
    x = np.full((workers, 3), 2.0)
    for step in range(1, steps + 1):
        x -= lr * 2 / 3 * (x - optimum)
        if step % tau == 0:
            for k in orders[step // tau - 1]:
                pull = rate * (x[k] - center)
                x[k], center = x[k] - pull, center + pull
    np.testing.assert_allclose(torch.stack(trial.own).numpy(), x, atol=1e-5)
    np.testing.assert_allclose(trial.shared[0].numpy(), center, atol=1e-5)


def test_the_centre_of_easgd_comes_to_the_optimum_of_a_quadratic():
    problem = quadratic(torch.tensor([1.0, -2.0, 0.5]), lr=0.3)
    trial = train_on_threads("easgd(tau=2)", 2, steps=100, problem=problem)
    torch.testing.assert_close(trial.shared[0], torch.tensor([1.0, -2.0, 0.5]), rtol=0, atol=1e-4)


# -------------------------------------------------------------------------------------------- stale-synchronous


class OneSlow:
    """Slows one worker down as much as the bound lets it: it waits in each of its steps until the others must.

    Each is the slow one for some steps, in turn. How far ahead of the slowest each was when it began a step is noted.
    """

    def __init__(self, workers: int, bound: int, steps: int) -> None:
        self._workers, self._bound, self._steps = workers, bound, steps
        self._changed = threading.Condition()
        self._begun = [-1] * workers
        self._nearly_done = [0] * workers
        self._of_thread = threading.local()
        self.leads: list[int] = []

    def before_step(self, rank: int, step: int) -> None:
        turn, turn_steps = step // 20, 20
        with self._changed:
            self._of_thread.place = rank, step
            self._begun[rank] = step
            self.leads.append(step - min(self._nearly_done))
            self._changed.notify_all()
            if step and turn % self._workers == rank:  # the servers begin with everybody in the first one
                # Not beyond its turn, for whoever is slow then waits for this one.
                goal = min(step + self._bound, (turn + 1) * turn_steps, self._steps - 1)
                others = [r for r in range(self._workers) if r != rank]
                assert self._changed.wait_for(lambda: all(self._begun[r] >= goal for r in others), WAIT_S)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if output.requires_grad:  # not an evaluation
            rank, step = self._of_thread.place
            # A moment before the servers know: a lead may be noted too small by the one step that is being finished.
            self._nearly_done[rank] = step + 1
        return nn.functional.mse_loss(output, target)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "bound", "steps"), [(2, 1, 1700), (3, 3, 1200), (4, 2, 800)])
def test_the_staleness_bound_holds_in_ten_thousand_updates_with_a_slow_worker(monkeypatch, workers, bound, steps):
    assert 2 * 1700 + 3 * 1200 + 4 * 800 >= 10_000
    slow = OneSlow(workers, bound, steps)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(steps * workers, 2, generator=generator)
    problem = Problem(
        lambda: nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.001), inputs, inputs[:, :1], workers, slow.loss
    )
    lateness: list[int] = []
    fetch = AsynchronousServerExchange.before_forward

    def checked_fetch(exchange):
        fetch(exchange)
        clock, cache_clock = exchange._clock, exchange.servers.cache_clock
        lateness.append(clock - cache_clock)
        assert is_fresh(cache_clock, clock, bound), f"step {clock} on parameters as of clock {cache_clock}"

    monkeypatch.setattr(AsynchronousServerExchange, "before_forward", checked_fetch)
    trial = train_on_threads(f"ssp(bound={bound})", workers, steps=steps, problem=problem, before_step=slow.before_step)
    staleness = [value for log in trial.logs for value in log.staleness]
    assert sum(sum(log.staleness.values()) for log in trial.logs) >= workers * steps
    assert max(staleness) <= staleness_limit(workers, bound)
    assert max(slow.leads) == bound  # as far as it may, and no further
    assert max(lateness) <= bound
