"""Crews train in every way, block by block, and all ways do the same work. How fast is for the bench to say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from rank_processes import start_fork_server, stop_fork_server

from syncline.bench.crews import (
    BY_HAND,
    BY_HAND_TUNED,
    PLAIN_DDP,
    SAME_KERNELS,
    SAME_SETTINGS,
    TUNED_DDP,
    Block,
    Way,
    Work,
    crew,
    samples_a_second,
)  # fmt: skip
from syncline.errors import SynclineError

WORK = Work(model="lenet", shape=(1, 12, 12), batch=4, samples=32)
OFF = Way(kind="syncline", settings={"tune": "off"})


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> Iterator[None]:
    start_fork_server()
    yield
    stop_fork_server()


def losses(way: Way, size: int, work: Work = WORK) -> list[float]:
    """After the second, the fifth and the ninth step: there are four, or eight, in an epoch."""
    with crew(work, way, size) as train:
        blocks = [train(1, 1), train(0, 3), train(2, 2)]
    assert all(block.seconds > 0 and block.peak_bytes > 0 for block in blocks)
    assert [block.samples for block in blocks] == [size * 4, size * 12, size * 8]
    return [block.loss for block in blocks]


def test_all_ways_of_training_alone_come_to_the_same_losses() -> None:
    expected = losses(BY_HAND, 1)
    assert len(set(expected)) == 3, "it goes on where it was"
    for way in (BY_HAND_TUNED, SAME_SETTINGS, OFF):
        assert losses(way, 1) == pytest.approx(expected, rel=1e-4), way


def test_all_ways_of_training_together_come_to_the_same_losses_but_without_exchange() -> None:
    expected = losses(PLAIN_DDP, 2)
    assert losses(TUNED_DDP, 2) == pytest.approx(expected, rel=1e-4)
    assert losses(SAME_SETTINGS, 2) == pytest.approx(expected, rel=1e-4)
    assert losses(BY_HAND, 2)[1:] != pytest.approx(expected[1:], rel=1e-4)


def test_batch_norm_is_local_on_both_sides_when_the_settings_are_the_same() -> None:
    work = Work(model="resnet18", shape=(3, 8, 8), batch=4, samples=32, options={"width": 16})
    expected = losses(TUNED_DDP, 2, work)
    # With torch's own convolutions: steps with four samples for a batch norm make much of differences in the last bits.
    assert losses(SAME_KERNELS, 2, work) == pytest.approx(expected, rel=1e-3)
    assert losses(OFF, 2, work)[1:] != pytest.approx(expected[1:], rel=1e-3)


def test_a_model_that_gives_back_its_input_needs_no_targets() -> None:
    work = Work(model="autoencoder", shape=(6,), batch=4, samples=32, options={"hidden": (4, 2)})
    assert losses(OFF, 1, work) == pytest.approx(losses(BY_HAND, 1, work), rel=1e-4)


def test_what_goes_wrong_in_a_process_is_told_to_whoever_measures() -> None:
    with (
        crew(replace(WORK, options={"depth": 3}), BY_HAND, 2) as train,
        pytest.raises(SynclineError, match="The model 'lenet' has no options, but 'depth' was given"),
    ):
        train(0, 1)


def test_the_speed_is_that_of_all_processes_together() -> None:
    assert samples_a_second(lambda warm_up, steps: Block(2.0, 100 * steps, 0.0, 0), 0, 3)() == 150.0
