"""Worker groups train with every method, block by block, and all methods do the same work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from rank_processes import start_fork_server, stop_fork_server

from syncline.errors import SynclineError
from syncline.lab.bench.worker_groups import (
    BY_HAND,
    BY_HAND_TUNED,
    PLAIN_DDP,
    SAME_KERNELS,
    SAME_SETTINGS,
    TUNED_DDP,
    TimedBlock,
    TrainingMethod,
    TrainingWorkload,
    samples_per_second,
    worker_group,
)  # fmt: skip

WORK = TrainingWorkload(model="lenet", shape=(1, 12, 12), batch=4, samples=32)
OFF = TrainingMethod(kind="syncline", settings={"tune": "off"})


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> Iterator[None]:
    start_fork_server()
    yield
    stop_fork_server()


def losses(method: TrainingMethod, size: int, workload: TrainingWorkload = WORK) -> list[float]:
    """After the second, the fifth and the ninth step: there are four, or eight, in an epoch."""
    with worker_group(workload, method, size) as train:
        blocks = [train(1, 1), train(0, 3), train(2, 2)]
    assert all(block.seconds > 0 and block.peak_bytes > 0 for block in blocks)
    assert [block.samples for block in blocks] == [size * 4, size * 12, size * 8]
    return [block.loss for block in blocks]


@pytest.mark.slow
def test_all_single_worker_methods_reach_the_same_losses() -> None:
    expected = losses(BY_HAND, 1)
    assert len(set(expected)) == 3, "it continues where it was"
    for method in (BY_HAND_TUNED, SAME_SETTINGS, OFF):
        assert losses(method, 1) == pytest.approx(expected, rel=1e-4), method


@pytest.mark.slow
def test_all_multi_worker_methods_reach_the_same_losses_except_without_communication() -> None:
    expected = losses(PLAIN_DDP, 2)
    assert losses(TUNED_DDP, 2) == pytest.approx(expected, rel=1e-4)
    assert losses(SAME_SETTINGS, 2) == pytest.approx(expected, rel=1e-4)
    assert losses(BY_HAND, 2)[1:] != pytest.approx(expected[1:], rel=1e-4)


@pytest.mark.slow
def test_batch_norm_is_local_on_both_sides_with_the_same_settings() -> None:
    workload = TrainingWorkload(model="resnet18", shape=(3, 8, 8), batch=4, samples=32, options={"width": 16})
    expected = losses(TUNED_DDP, 2, workload)
    # With torch's own convolutions: steps with four samples for a batch norm make much of differences in the last bits.
    assert losses(SAME_KERNELS, 2, workload) == pytest.approx(expected, rel=1e-3)
    assert losses(OFF, 2, workload)[1:] != pytest.approx(expected[1:], rel=1e-3)


def test_a_model_that_reconstructs_its_input_needs_no_targets() -> None:
    workload = TrainingWorkload(model="autoencoder", shape=(6,), batch=4, samples=32, options={"hidden": (4, 2)})
    assert losses(OFF, 1, workload) == pytest.approx(losses(BY_HAND, 1, workload), rel=1e-4)


def test_a_failure_in_a_process_is_raised_in_the_bench() -> None:
    with (
        worker_group(replace(WORK, options={"depth": 3}), BY_HAND, 2) as train,
        pytest.raises(SynclineError, match=r"depth"),
    ):
        train(0, 1)


def test_the_throughput_is_that_of_all_processes_together() -> None:
    assert samples_per_second(lambda warm_up, steps: TimedBlock(2.0, 100 * steps, 0.0, 0), 0, 3)() == 150.0
