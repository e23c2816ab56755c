"""What `syncline bench saving` counts as a step that saves."""

from __future__ import annotations

import pytest
import torch

from syncline.lab.bench.saving import step_times
from syncline.lab.bench.scripts.saving_plain import LENGTH, VOCABULARY, BenchTransformer, samples
from syncline.telemetry.events import CheckpointSaved, Event, Progress


def step(number: int, seconds: float, worker_id: int = 0) -> Event:
    return Progress(worker_id=worker_id, epoch=0, step=number, samples=4, seconds=seconds, cursor=4 * number)


def test_the_time_of_a_checkpoint_is_in_the_step_after_it():
    events = [step(1, 9.0), step(2, 9.0), step(3, 9.0), step(4, 1.0), step(5, 1.2), step(5, 7.0, worker_id=1)]
    events += [CheckpointSaved(step=5, path="step-00000005.pt", bytes=1, seconds=3.0)]
    events += [step(6, 2.0), step(7, 1.1), step(9, 30.0)]  # two steps in one report say nothing about either
    assert step_times(events) == pytest.approx((1100.0, 2000.0))


def test_the_model_has_86_million_parameters_and_predicts_a_token_at_each_place():
    model = BenchTransformer(1)
    block = sum(p.numel() for p in model.blocks.parameters())
    rest = sum(p.numel() for p in model.parameters()) - block
    assert 86e6 < 12 * block + rest < 87e6
    inputs, targets = samples(2)
    assert model(inputs).shape == (2, VOCABULARY, LENGTH)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
