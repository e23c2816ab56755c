"""The shard of a parameter server: what becomes of gradients, whatever comes in whichever order."""

from __future__ import annotations

import io
import threading

import generators  # noqa: F401  # repeatable examples
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_processes import control_segment
from torch import nn

from syncline.comms.parameter_server.chunks import chunks_in
from syncline.comms.parameter_server.gradient import Gradient
from syncline.comms.parameter_server.optimizer import (
    dump_optimizer,
    optimizer_entries,
    param_group_indices,
    reshard_state,
)
from syncline.comms.parameter_server.shard import Shard
from syncline.comms.shared_memory import SharedMemory
from syncline.compute.partition import cut_rows
from syncline.errors import ConfigError

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}
optimizers = st.sampled_from(sorted(OPTIMIZERS))
shapes = st.lists(st.lists(st.integers(1, 6), max_size=3).map(tuple), min_size=1, max_size=5)
shard_counts = st.integers(1, 5)
few_seeds = st.integers(0, 1000)
few = settings(max_examples=40)


def tensors(of, seed):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in of]


def noise(numel, seed):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def flat(parameters):
    return torch.cat([p.detach().reshape(-1) for p in parameters])


def split_groups(parameters):
    """Two groups with different settings, so that some shards have none of one of them."""
    return [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.03}] if len(parameters) > 1 else parameters


class Sharded:
    """All the shards of a model, without servers."""

    def __init__(self, parameters, optimizer, parts, *, sparse=None, state=None, **how):
        of = [tuple(p.shape) for p in parameters]
        self.ranges = cut_rows(of, parts)
        everything = flat(parameters)
        self.shards = []
        for part in self.ranges:
            chunks = chunks_in(of, part, sparse)
            shard = Shard(
                everything[slice(*part)].clone(),
                chunks,
                optimizer=dump_optimizer(optimizer),
                groups=param_group_indices(optimizer, parameters),
                **how,
            )
            entries = optimizer_entries(optimizer, parameters) if state is None else state["chunks"]
            version = 0 if state is None else state["version"]
            shard.load({"version": version, "chunks": reshard_state(entries, chunks)})
            self.shards.append(shard)

    def flat(self):
        return torch.cat([s.flat for s in self.shards])

    def apply(self, rank, sequence, gradient, *, weight=1.0, clock=1, read_version=0, **how):
        return [
            s.apply(
                rank,
                sequence,
                Gradient(gradient[slice(*part)].clone()),
                weight=weight,
                clock=clock,
                read_version=read_version,
                **how,
            )
            for s, part in zip(self.shards, self.ranges, strict=True)
        ]

    def collect(self, rank, sequence, gradient, *, weight, clock, **how):
        return [
            s.collect(rank, sequence, Gradient(gradient[slice(*part)].clone()), weight=weight, clock=clock, **how)
            for s, part in zip(self.shards, self.ranges, strict=True)
        ]


def set_gradients(parameters, gradient):
    start = 0
    for p in parameters:
        p.grad = gradient[start : start + p.numel()].view(p.shape).clone()
        start += p.numel()


@few
@given(shapes, optimizers, shard_counts, st.integers(1, 4), few_seeds, st.randoms())
def test_collecting_equals_the_optimizer_on_the_weighted_sum_bit_for_bit(of, name, parts, size, seed, random):
    parameters, expected = tensors(of, seed), tensors(of, seed)
    optimizer = OPTIMIZERS[name](split_groups(expected))
    sharded = Sharded(parameters, OPTIMIZERS[name](split_groups(parameters)), parts, rule="collect", size=size)
    numel = len(sharded.flat())
    weights = [(rank + 1) / (size + 0.3) for rank in range(size)]
    for clock in range(1, 4):
        gradients = [noise(numel, seed + 10 * clock + rank) for rank in range(size)]
        order = list(range(size))
        random.shuffle(order)  # whoever comes first, the sum is in rank order
        for nth, rank in enumerate(order):
            done = sharded.collect(rank, clock, gradients[rank], weight=weights[rank], clock=clock, piggybacked=[1.0])
            assert all((d is None) == (nth < size - 1) for d in done)
        total = gradients[0] * weights[0]
        for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
            total.add_(gradient, alpha=weight)
        set_gradients(expected, total)
        optimizer.step()
        assert torch.equal(sharded.flat(), flat(expected))


@few
@given(shapes, optimizers, shard_counts, few_seeds, st.lists(st.floats(0.1, 2.0), min_size=1, max_size=5))
def test_gradients_applied_in_turn_equal_one_optimizer(of, name, parts, seed, weights):
    parameters, expected = tensors(of, seed), tensors(of, seed)
    optimizer = OPTIMIZERS[name](expected)
    sharded = Sharded(parameters, OPTIMIZERS[name](parameters), parts, rule="apply", size=2)
    for step, weight in enumerate(weights):
        gradient = noise(len(sharded.flat()), seed + step)
        sharded.apply(step % 2, step + 1, gradient, weight=weight)
        set_gradients(expected, gradient * weight)
        optimizer.step()
    assert torch.equal(sharded.flat(), flat(expected))
    assert all(s.version == len(weights) for s in sharded.shards)


@few
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=20),
    few_seeds,
)
def test_a_repeated_push_is_applied_once_and_answered_the_same(requests, seed):
    parameters = tensors([(3, 2)], seed)
    sharded = Sharded(parameters, OPTIMIZERS["sgd"](parameters), 1, rule="apply", size=3)
    answers: dict[tuple[int, int], list[int]] = {}
    sent = dict.fromkeys(range(3), 0)
    for rank, times in requests:
        sent[rank] += 1
        for _ in range(times):
            answer = sharded.apply(rank, sent[rank], noise(6, seed + sent[rank]))
            assert answers.setdefault((rank, sent[rank]), answer) == answer
    assert sharded.shards[0].version == len(requests) == sum(sharded.shards[0].staleness.values())


@few
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40))
def test_staleness_is_the_number_of_updates_since_the_worker_read(actions):
    parameters = tensors([(2,)], 0)
    shard = Sharded(parameters, OPTIMIZERS["sgd"](parameters), 1, rule="apply", size=4).shards[0]
    read = dict.fromkeys(range(4), 0)
    since = dict.fromkeys(range(4), 0)
    for sequence, (rank, reads) in enumerate(actions, 1):
        if reads:
            read[rank], since[rank] = shard.version, 0
            continue
        age = shard.apply(rank, sequence, Gradient(torch.ones(2)), weight=1.0, clock=1, read_version=read[rank])
        assert age == since[rank]
        since = {r: n + 1 for r, n in since.items()}


@few
@given(st.integers(0, 4), st.integers(1, 5), st.lists(st.integers(0, 4), max_size=80))
def test_the_gate_never_lets_anybody_more_than_the_bound_ahead(bound, size, turns):
    parameters = tensors([(1,)], 0)
    shard = Sharded(parameters, OPTIMIZERS["sgd"](parameters), 1, rule="apply", size=size).shards[0]
    clocks = [0] * size
    for turn in turns:
        rank = turn % size
        is_open = shard.progress.may_proceed(clocks[rank], bound)
        assert is_open == (clocks[rank] - min(clocks) <= bound)
        if is_open:
            clocks[rank] += 1
            shard.progress.advance(rank, clocks[rank])
        assert max(clocks) - min(clocks) <= bound + 1
        assert shard.progress.slowest == min(clocks)


@few
@given(st.floats(0.05, 0.45), st.integers(1, 4), few_seeds)
def test_elastic_workers_on_a_quadratic_find_its_minimum_together_with_the_center(rate, size, seed):
    optimum = noise(7, seed)
    center = [nn.Parameter(torch.zeros(7))]
    shard = Sharded(center, OPTIMIZERS["sgd"](center), 1, rule="elastic", rate=rate, size=size).shards[0]
    workers = [noise(7, seed + 1 + rank) for rank in range(size)]
    for step in range(200):
        rank = step % size
        workers[rank] -= 0.3 * (workers[rank] - optimum)
        before_center, before_worker = shard.flat.clone(), workers[rank].clone()
        move = workers[rank].clone()
        shard.exchange(rank, step, move)
        workers[rank] -= move
        torch.testing.assert_close(move, rate * (before_worker - before_center))
        # What one gives the other gets.
        torch.testing.assert_close(workers[rank] + shard.flat, before_worker + before_center, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(shard.flat, optimum, atol=1e-2, rtol=1e-2)
    assert shard.version == 200


@few
@given(st.integers(1, 8), st.integers(1, 4), shard_counts, st.sets(st.integers(0, 7)), optimizers, few_seeds)
def test_touched_rows_count_as_the_gradient_with_zeros_elsewhere(rows, cols, parts, touched, name, seed):
    touched = sorted(t for t in touched if t < rows)
    parameters, dense = tensors([(rows, cols), (3,)], seed), tensors([(rows, cols), (3,)], seed)
    make = OPTIMIZERS[name]
    by_rows = Sharded(parameters, make(parameters), parts, rule="apply", size=1)
    whole = Sharded(dense, make(dense), parts, rule="apply", size=1)
    for step in range(3):
        gradient = torch.zeros(rows * cols + 3)
        values = noise(rows * cols + 3, seed + step)
        gradient[rows * cols :] = values[rows * cols :]
        for row in touched:
            gradient[row * cols : (row + 1) * cols] = values[row * cols : (row + 1) * cols]
        whole.apply(0, step + 1, gradient)
        for shard, part in zip(by_rows.shards, by_rows.ranges, strict=True):
            mine, named, sent = gradient[slice(*part)], {}, []
            for index, chunk in enumerate(shard.chunks):
                own = mine[slice(*chunk.span)]
                if chunk.parameter == 0:
                    local = [t - chunk.first_row for t in touched if 0 <= t - chunk.first_row < chunk.rows]
                    named[index] = torch.tensor(local, dtype=torch.int64)
                    own = own.view(chunk.rows, -1)[named[index]].view(-1)
                sent.append(own)
            values = torch.cat(sent) if sent else torch.empty(0)
            shard.apply(0, step + 1, Gradient(values, named), weight=1.0, clock=1, read_version=0)
    assert torch.equal(by_rows.flat(), whole.flat())


@few
@given(shapes, optimizers, shard_counts, shard_counts, few_seeds)
def test_a_saved_state_goes_on_bit_for_bit_with_any_number_of_shards(of, name, parts, later_parts, seed):
    straight_parameters, parameters = tensors(of, seed), tensors(of, seed)
    straight = Sharded(straight_parameters, OPTIMIZERS[name](straight_parameters), 1, rule="apply", size=1)
    first = Sharded(parameters, OPTIMIZERS[name](parameters), parts, rule="apply", size=1)
    numel = len(first.flat())
    for step in range(3):
        straight.apply(0, step + 1, noise(numel, step))
        first.apply(0, step + 1, noise(numel, step))
    file = io.BytesIO()
    torch.save([s.state() for s in first.shards], file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    state = {"version": saved[0]["version"], "chunks": [e for s in saved for e in s["chunks"]]}
    resumed = tensors(of, seed)
    start = 0
    for p in resumed:
        p.data.copy_(first.flat()[start : start + p.numel()].view(p.shape))
        start += p.numel()
    second = Sharded(resumed, OPTIMIZERS[name](resumed), later_parts, rule="apply", size=1, state=state)
    for step in range(3, 6):
        straight.apply(0, step + 1, noise(numel, step))
        second.apply(0, step + 1, noise(numel, step), read_version=3)
    assert torch.equal(second.flat(), straight.flat())
    assert all(s.version == 6 for s in second.shards)


def test_a_loss_that_is_not_finite_leaves_everything_as_it_was():
    parameters = tensors([(4, 3)], 0)
    sharded = Sharded(parameters, OPTIMIZERS["adam"](parameters), 2, rule="collect", size=1)
    sharded.collect(0, 1, noise(12, 0), weight=1.0, clock=1, piggybacked=[1.0])
    before, states = sharded.flat(), [str(s.state()) for s in sharded.shards]
    done = sharded.collect(0, 2, noise(12, 1), weight=1.0, clock=2, piggybacked=[float("inf"), 3.0])
    assert all(not d.is_applied and d.piggybacked.tolist() == [float("inf"), 3.0] for d in done)
    assert torch.equal(sharded.flat(), before)
    assert [str(s.state()).replace("{0: 2}", "{0: 1}") for s in sharded.shards] == states


def test_each_worker_pushes_with_the_settings_of_its_own_schedule():
    parameters = [nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    shard = Sharded(parameters, optimizer, 1, rule="apply", size=2).shards[0]

    def push(rank, sequence, changed=None):
        one = Gradient(torch.ones(1))
        before = shard.flat.item()
        shard.apply(rank, sequence, one, weight=1.0, clock=1, read_version=0, hyperparameters=changed)
        return before - shard.flat.item()

    assert push(0, 1) == 1.0  # as rank 0's optimizer had it
    assert push(1, 1, [{"lr": 0.5}]) == 0.5
    assert push(0, 2, [{"lr": 0.25}]) == 0.25
    assert push(1, 2) == 0.5


def test_a_request_by_another_rule_is_refused():
    parameters = tensors([(2,)], 0)
    shard = Sharded(parameters, OPTIMIZERS["sgd"](parameters), 1, rule="apply", size=1).shards[0]
    with pytest.raises(ConfigError) as caught:
        shard.exchange(0, 1, torch.zeros(2))
    assert caught.value.facts == {"rule": "apply", "requested": "elastic"}


def test_gradients_of_different_steps_are_not_collected_together():
    parameters = tensors([(2,)], 0)
    shard = Sharded(parameters, OPTIMIZERS["sgd"](parameters), 1, rule="collect", size=3).shards[0]
    shard.collect(0, 1, Gradient(torch.ones(2)), weight=1.0, clock=1)
    with pytest.raises(ValueError, match=r"rank 2 .*step 2\b.*step 1\b"):
        shard.collect(2, 1, Gradient(torch.ones(2)), weight=1.0, clock=2)


def test_an_optimizer_of_the_users_own_travels_with_its_attributes_and_without_patches():
    class Signed(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})
            self.power = 2.0

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.sub_(p.grad.sign() * group["lr"] * self.power)

    parameters = [nn.Parameter(torch.zeros(3))]
    optimizer = Signed(parameters, lr=0.5)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # patches step
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook of the worker ran at the server"))
    shard = Sharded(parameters, optimizer, 1, rule="apply", size=1).shards[0]
    shard.apply(0, 1, Gradient(torch.tensor([3.0, -0.1, 2.0])), weight=1.0, clock=1, read_version=0)
    assert shard.flat.tolist() == [-1.0, 1.0, -1.0]


def test_a_collected_sum_has_the_bits_of_the_all_reduce():
    size, numel = 3, 200_003
    gradients = [noise(numel, rank) for rank in range(size)]
    weights = [(rank + 1) / 7.7 for rank in range(size)]
    reduced = {}

    def reduce(rank):
        collective = SharedMemory(control, rank=rank, size=size, timeout_s=20.0)
        shared = collective.allocate(numel, torch.float32, torch.device("cpu"))
        shared.copy_(gradients[rank])
        collective.all_reduce_(shared, weights[rank])
        reduced[rank] = shared.clone()

    with control_segment(size) as control:
        threads = [threading.Thread(target=reduce, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
    parameters = [nn.Parameter(torch.zeros(numel))]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    for parts in (1, 3):
        sharded = Sharded(parameters, optimizer, parts, rule="collect", size=size)
        for rank in range(size):
            sharded.collect(rank, 1, gradients[rank], weight=weights[rank], clock=1)
        assert torch.equal(-sharded.flat(), reduced[0])
