"""Measuring memory: the peak is seen, and trial steps leave nothing behind and are the same on all workers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from syncline.comms.collective import Collective, Solo
from syncline.compute.memory import Peak, agree_on_use, extra_memory, measure_use
from syncline.compute.memory_use import MemoryUse
from syncline.errors import ConfigError
from syncline.testing.threads import run_on_threads

CPU = torch.device("cpu")
MB = 10**6


def test_memory_that_was_in_use_for_a_moment_is_seen_and_forgotten_after_a_reset() -> None:
    peak = Peak(CPU)
    peak.reset()
    before = peak.read()
    torch.ones(50 * MB)  # of four bytes each
    assert peak.read() - before > 150 * MB
    peak.reset()
    assert peak.read() - before < 100 * MB


class Trials:
    """Steps that take a known amount of memory, for all to see which were taken."""

    def __init__(self, bytes_per_sample: int = 8 * MB) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.taken: list[int] = []
        self.bytes_per_sample = bytes_per_sample

    def step(self, samples: int) -> None:
        self.taken.append(samples)
        self.model(torch.randn(max(samples, 2), 2)).sum()
        torch.ones(samples * self.bytes_per_sample, dtype=torch.uint8)

    def measure(self, collective: Collective, *, share: int, batch: int = 1000, limit: int = 10**12) -> MemoryUse:
        return measure_use(
            self.step,
            self.model,
            share=share,
            batch=batch,
            limit_bytes=limit,
            more=0,
            collective=collective,
            device=CPU,
        )


def test_what_a_sample_takes_is_found() -> None:
    assert Trials().measure(Solo(), share=32).per_sample == pytest.approx(8 * MB, rel=0.25)


@pytest.mark.parametrize(
    ("share", "batch", "taken"),
    [
        (32, 64, [2, 2, 4, 8, 16, 32]), (20, 64, [2, 2, 4, 8, 16, 20]), (1, 64, [2, 2, 4, 8]), (1, 1, [1, 1]),
        (3, 3, [2, 2, 3]),
    ],
)  # fmt: skip
def test_trials_grow_up_to_a_share(share: int, batch: int, taken: list[int]) -> None:
    trials = Trials(bytes_per_sample=1)
    trials.measure(Solo(), share=share, batch=batch)
    assert trials.taken == taken


def test_trials_stay_within_the_limit() -> None:
    trials = Trials(bytes_per_sample=10 * MB)
    limit = Peak(CPU).read() + 200 * MB
    trials.measure(Solo(), share=10_000, limit=limit)
    assert max(trials.taken) < 64


def test_trials_leave_neither_statistics_nor_random_numbers_behind() -> None:
    trials = Trials(bytes_per_sample=1)
    torch.manual_seed(5)
    expected_random = torch.rand(1)
    before = {name: value.clone() for name, value in trials.model.state_dict().items()}
    torch.manual_seed(5)
    trials.measure(Solo(), share=8)
    assert torch.equal(torch.rand(1), expected_random)
    assert all(torch.equal(value, before[name]) for name, value in trials.model.state_dict().items())


def test_all_workers_take_the_same_trials_though_one_has_enough_earlier() -> None:
    def work(collective: Collective) -> list[int]:
        trials = Trials(bytes_per_sample=1)
        trials.measure(collective, share=64, limit=1 if collective.rank else 10**12)
        return trials.taken

    assert run_on_threads(2, work) == [[2, 2, 4], [2, 2, 4]]


def test_newcomers_learn_from_those_who_were_there_before_and_the_largest_need_counts() -> None:
    known = [MemoryUse(5, 1.0), None, MemoryUse(3, 2.0)]

    def measure() -> MemoryUse:
        raise AssertionError("a member knows it already")

    results = run_on_threads(3, lambda c: agree_on_use(c, known[c.rank], measure))
    assert results == [MemoryUse(5, 2.0)] * 3


def test_in_the_first_view_all_measure_and_the_largest_need_counts() -> None:
    results = run_on_threads(2, lambda c: agree_on_use(c, None, lambda: MemoryUse(c.rank, 3.0 - c.rank)))
    assert results == [MemoryUse(1, 3.0)] * 2


def test_a_device_whose_memory_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"memory_limit.*mps"):
        measure_use(
            lambda _: None,
            nn.Linear(1, 1),
            share=1,
            batch=1,
            limit_bytes=1,
            more=0,
            collective=Solo(),
            device=torch.device("mps"),
        )


def test_what_training_needs_besides_counts_the_optimizers_state_and_a_checkpoint() -> None:
    model = nn.Linear(100, 100, bias=False)
    weights = 40_000
    sgd, momentum = torch.optim.SGD(model.parameters()), torch.optim.SGD(model.parameters(), momentum=0.9)
    adam = torch.optim.Adam(model.parameters())
    assert [extra_memory(model, o, Solo()) // weights for o in (sgd, momentum, adam)] == [1, 3, 5]
    model(torch.randn(1, 100)).sum().backward()
    adam.step()
    assert extra_memory(model, adam, Solo()) // weights == 3  # its state is there by now
