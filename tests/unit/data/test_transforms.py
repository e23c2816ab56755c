"""Transforms and augmentation: what each does, and that chance belongs to the sample and not to the worker."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from syncline.data.assignment import Assignment
from syncline.data.augmented import AugmentedSource
from syncline.data.order import Position, SampleOrder
from syncline.data.prefetch import fetch
from syncline.data.source import ArraySource
from syncline.data.transforms import Transform, parse, transform_names
from syncline.errors import ConfigError, DataError
from syncline.task import Task

COUNT = 25
PICTURES = torch.rand(COUNT, 3, 8, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(COUNT)
EVERYTHING = "crop(padding=2), flip, vertical_flip, cutout(size=3), noise(std=0.1), normalize(mean=0.4, std=0.2)"


def jitter(x: torch.Tensor) -> torch.Tensor:
    """As a user's own callable draws: from all three generators."""
    return x * random.random() + torch.rand(()) + float(np.random.rand())


def applied(text: str, inputs: torch.Tensor, number: float = 0.0) -> torch.Tensor:
    """One transform, with the same draw for every sample."""
    (transform,) = parse(text)
    assert isinstance(transform, Transform)
    return transform(inputs, lambda which: np.full(len(inputs), number))


def seen(workers: int, *, requeued: tuple = (), epochs: int = 2, batch: int = 7) -> dict[tuple[int, int], torch.Tensor]:
    """Every augmented sample by epoch and index, as some workers see them."""
    source = AugmentedSource(ArraySource(PICTURES, LABELS), (*parse(EVERYTHING), jitter), seed=5, is_training=True)
    order = SampleOrder(seed=1, count=COUNT, batch=batch)
    assignment = Assignment(Position(), workers, COUNT, batch, epochs, requeued)
    found = {}
    for rank in range(workers):
        for fetched in fetch(source, order.shares_of(assignment, rank), loaders=0, seed=1):
            inputs, labels = fetched.data
            places = [epoch for epoch, low, high in fetched.share.ranges for _ in range(low, high)]
            found |= {(e, int(y)): x for e, x, y in zip(places, inputs, labels, strict=False)}
    return found


def test_one_worker_and_three_see_the_same_bits():
    alone, three = seen(1), seen(3)
    assert alone.keys() == three.keys() == {(e, i) for e in range(2) for i in range(COUNT)}
    assert all(torch.equal(alone[key], three[key]) for key in alone)
    assert all(torch.equal(alone[key], other) for key, other in seen(2, batch=4).items())


def test_a_sample_that_is_requeued_looks_as_it_would_have():
    alone = seen(1)
    late = seen(2, requeued=((0, 3, 9),), epochs=1)
    assert all(torch.equal(alone[key], late[key]) for key in late)


def test_the_same_sample_looks_different_in_another_epoch_and_with_another_seed():
    alone = seen(1)
    assert sum(torch.equal(alone[0, i], alone[1, i]) for i in range(COUNT)) == 0
    one, other = (
        AugmentedSource(ArraySource(PICTURES), parse("crop"), seed=s, is_training=True).fetch(range(COUNT))
        for s in (1, 2)
    )
    assert not torch.equal(one[0], other[0])


def test_own_callables_leave_the_generators_of_the_process_alone():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(())
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    AugmentedSource(ArraySource(PICTURES), [jitter], seed=0, is_training=True).fetch([0, 1])
    assert (random.random(), np.random.rand(), torch.rand(())) == expected


def test_test_data_gets_only_what_is_not_random():
    transforms = (*parse("crop, resize(size=4), flip, gray"), jitter)
    test = AugmentedSource(ArraySource(PICTURES, LABELS), transforms, seed=0, is_training=False)
    inputs, labels = test.fetch(range(COUNT))
    expected = applied("gray", applied("resize(size=4)", PICTURES))
    assert torch.equal(inputs, expected)
    assert torch.equal(labels, LABELS)


def test_crop_moves_the_image_and_fills_with_zeros():
    assert torch.equal(applied("crop(padding=2)", PICTURES, 0.5), PICTURES)
    moved = applied("crop(padding=2)", PICTURES, 0.0)
    assert torch.equal(moved[..., 2:, 2:], PICTURES[..., :-2, :-2])
    assert moved[..., :2, :].abs().sum() == moved[..., :, :2].abs().sum() == 0


def test_flips_turn_the_right_axis_or_nothing():
    assert torch.equal(applied("flip", PICTURES, 0.4), PICTURES.flip(3))
    assert torch.equal(applied("flip", PICTURES, 0.6), PICTURES)
    assert torch.equal(applied("vertical_flip", PICTURES, 0.4), PICTURES.flip(2))


def test_cutout_leaves_a_square_of_zeros():
    cut = applied("cutout(size=3)", PICTURES + 1, 0.5)
    assert ((cut == 0).sum(dim=(2, 3)) == 9).all()
    assert (applied("cutout(size=3)", PICTURES + 1, 0.0) == 0).sum() == COUNT * 3 * 4, "a part lies outside"


def test_normalize_grey_and_resize_compute_what_they_say():
    per_channel = applied("normalize(mean=(0.1, 0.2, 0.3), std=(1, 2, 4))", PICTURES)
    torch.testing.assert_close(per_channel[:, 2], (PICTURES[:, 2] - 0.3) / 4)
    gray = applied("gray", PICTURES)
    torch.testing.assert_close(gray[:, 0], 0.299 * PICTURES[:, 0] + 0.587 * PICTURES[:, 1] + 0.114 * PICTURES[:, 2])
    assert applied("resize(size=(4, 3))", PICTURES).shape == (COUNT, 3, 4, 3)
    torch.testing.assert_close(applied("resize(size=5)", torch.ones(1, 1, 9, 9)), torch.ones(1, 1, 5, 5))


def test_noise_has_the_deviation_asked_for():
    noisy = AugmentedSource(ArraySource(torch.zeros(9, 1000)), parse("noise(std=0.5)"), seed=0, is_training=True)
    (inputs,) = noisy.fetch(range(9))
    assert float(inputs.std()) == pytest.approx(0.5, rel=0.05)
    assert not torch.equal(inputs[0], inputs[1])


def test_draws_are_uniform_and_differ_between_purposes():
    from syncline.data.augmented import uniform

    indices = np.arange(20_000)
    first, second = (uniform(3, np.zeros_like(indices), indices, purpose) for purpose in (0, 1))
    assert np.histogram(first, 10, (0, 1))[0].min() > 1800
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03
    assert (first >= 0).all()
    assert (first < 1).all()


def test_a_task_tells_the_model_what_shape_comes_out():
    task = Task(model="mlp", data="digits", augment=["resize(size=4)", {"name": "flip", "p": 0.1}])
    assert task.with_defaults().located(None, None).data.info.input_shape == (1, 4, 4)
    with pytest.raises(DataError, match=r"gray.*3 channels.*\(1, 8, 8\)"):
        Task(model="mlp", data="digits", augment="gray").located(None, None)
    with pytest.raises(DataError, match=r"crop.*\(4,\)"):
        Task(model="mlp", data="iris", augment="crop").located(None, None)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("crob", r"'crob'.*'crop'"),
        ("crop(pading=4)", r"crop.*'pading'.*'padding'"),
        ("resize", r"resize needs size"),
    ],
)
def test_a_mistake_in_a_name_is_reported_before_anything_starts(text: str, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        Task(model="mlp", data="digits", augment=text)


def test_every_transform_has_a_sentence_and_parses_by_name():
    for name in transform_names():
        (transform,) = parse([{"name": name, **({"size": 4} if name == "resize" else {})}])
        assert transform.__doc__
