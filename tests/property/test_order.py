"""The order of samples: every sample once an epoch, the same steps for any number of workers, resumable anywhere."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from generators import orders, seeds, sizes, starts
from hypothesis import given
from hypothesis import strategies as st

from syncline.data.order import Position, SampleOrder, Share, hold_out, permutation, step_seed


def shares_of_all(order: SampleOrder, start: Position, size: int, epochs: int) -> list[list[Share]]:
    """For every step, the shares of all ranks."""
    each = [order.shares(start, rank=rank, size=size, epochs=epochs) for rank in range(size)]
    return [list(step) for step in zip(*each, strict=True)]


def steps(order: SampleOrder, start: Position, size: int, epochs: int) -> list[tuple[Position, list[int]]]:
    """For every step, where it is and all its samples."""
    return [
        (step[0].position, [int(i) for share in step for i in share.indices])
        for step in shares_of_all(order, start, size, epochs)
    ]


@given(orders(), sizes, st.integers(0, 5))
def test_all_shares_of_an_epoch_put_together_are_its_permutation(order, size, epoch):
    samples = [i for _, batch in steps(order, Position(epoch), size, epoch + 1) for i in batch]
    expected = permutation(order.seed, epoch, order.count) if order.shuffle else np.arange(order.count)
    assert samples == expected.tolist()
    assert sorted(samples) == list(range(order.count))


@given(orders(), st.data())
def test_from_any_position_the_rest_of_the_epoch_comes_and_nothing_else(order, data):
    start = data.draw(starts(order))
    samples = [i for _, batch in steps(order, start, data.draw(sizes), start.epoch + 1) for i in batch]
    whole = [i for _, batch in steps(order, Position(start.epoch), 1, start.epoch + 1) for i in batch]
    assert samples == whole[start.cursor :]


@given(orders(), sizes, sizes, st.data())
def test_the_contents_of_every_step_do_not_depend_on_the_number_of_workers(order, one_size, other_size, data):
    start = data.draw(starts(order))
    epochs = start.epoch + 2
    assert steps(order, start, one_size, epochs) == steps(order, start, other_size, epochs)


@given(orders(), sizes, st.data())
def test_a_run_that_stops_anywhere_and_resumes_with_other_workers_takes_the_same_steps(order, size, data):
    start = data.draw(starts(order))
    epochs = start.epoch + 2
    whole = steps(order, start, 1, epochs)
    stop = data.draw(st.integers(0, len(whole) - 1))
    resumed_at = whole[stop][0]
    assert whole[:stop] + steps(order, resumed_at, size, epochs) == whole


@given(orders(), sizes, st.data())
def test_the_weights_of_a_step_sum_to_one(order, size, data):
    start = data.draw(starts(order))
    for step in shares_of_all(order, start, size, start.epoch + 2):
        assert sum(share.weight for share in step) == pytest.approx(1.0, abs=1e-12)
        assert {share.batch for share in step} == {sum(len(share.indices) for share in step)}
        assert len({share.position for share in step}) == 1


@given(orders(), st.data())
def test_positions_count_every_step_and_end_each_epoch_at_its_last_sample(order, data):
    start = data.draw(starts(order))
    position = start
    for at, batch in steps(order, start, 1, start.epoch + 3):
        assert at == position
        assert 1 <= len(batch) <= order.batch
        position = position.after(len(batch), order.count)
    assert position == Position(start.epoch + 3, 0, position.step)


@given(orders())
def test_an_epoch_has_the_number_of_steps_that_was_announced(order):
    assert len(steps(order, Position(), 1, 1)) == order.steps_per_epoch


@given(orders(), st.data())
def test_a_run_without_end_begins_like_one_with_an_end(order, data):
    start = data.draw(starts(order))
    ending = list(order.shares(start, rank=0, size=2, epochs=start.epoch + 1))
    endless = list(itertools.islice(order.shares(start, rank=0, size=2), len(ending) + 1))
    for one, other in zip(ending, endless, strict=False):
        assert one.position == other.position
        assert one.indices.tolist() == other.indices.tolist()
    assert endless[-1].position.epoch == start.epoch + 1


def test_a_finished_run_has_no_more_steps():
    order = SampleOrder(seed=0, count=10, batch=4)
    assert list(order.shares(Position(3, 0, 9), rank=0, size=1, epochs=3)) == []


@given(seeds, st.integers(0, 1000), st.integers(0, 500))
def test_a_permutation_holds_every_sample_once_and_is_always_the_same(seed, epoch, count):
    order = permutation(seed, epoch, count)
    assert sorted(order.tolist()) == list(range(count))
    assert order.tolist() == permutation(seed, epoch, count).tolist()


def test_seeds_and_epochs_give_different_orders():
    found = {tuple(permutation(seed, epoch, 50)) for seed in range(10) for epoch in range(10)}
    assert len(found) == 100


def test_the_order_of_a_seed_never_changes():
    # A run resumed with a later version of Syncline or NumPy must find these very numbers.
    assert permutation(0, 0, 12).tolist() == [7, 1, 0, 6, 3, 5, 10, 8, 11, 2, 9, 4]
    assert permutation(12345, 7, 12).tolist() == [1, 5, 3, 10, 4, 7, 2, 9, 8, 6, 11, 0]
    assert step_seed(0, 0, 0) == 1445694884619442965
    assert step_seed(0, 1, 0) == 4273803895383222415
    assert step_seed(5, 3, 2) == 7439706652418049287


@given(seeds, st.integers(0, 2**40), st.integers(0, 1023))
def test_a_step_seed_is_one_that_torch_takes(seed, step, rank):
    assert 0 <= step_seed(seed, step, rank) < 2**63


def test_every_worker_and_step_has_a_seed_of_its_own():
    assert len({step_seed(0, step, rank) for step in range(50) for rank in range(20)}) == 1000


@given(seeds, st.integers(1, 300), st.data())
def test_what_is_held_out_is_never_trained_on_and_nothing_is_lost(seed, count, data):
    number = data.draw(st.integers(0, count - 1))
    kept, held = hold_out(seed, count, number)
    assert sorted([*kept, *held]) == list(range(count))
    assert len(held) == number
    order = SampleOrder(seed=seed, count=len(kept), batch=7, kept=kept)
    used = [i for rank in range(3) for s in order.shares(Position(), rank=rank, size=3, epochs=1) for i in s.indices]
    assert sorted(used) == sorted(kept)


def test_what_is_held_out_never_changes_for_a_seed():
    assert hold_out(0, 12, 4)[1].tolist() == [0, 3, 8, 11]
