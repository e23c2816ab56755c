"""What is predicted while a model is evaluated, by however many workers."""

from __future__ import annotations

import pytest
import torch

from syncline.data.source import ArraySource
from syncline.workers.predictions import PredictionTally, picture_of


def outputs(count: int = 60, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, classes, generator=generator), torch.randint(classes, (count,), generator=generator)


def told_by(shares: int):
    output, target = outputs()
    images = torch.arange(60 * 16, dtype=torch.float32).reshape(60, 1, 4, 4)
    states = []
    for share in range(shares):
        tally = PredictionTally()
        for low in range(share * 60 // shares, (share + 1) * 60 // shares, 5):
            tally.add(output[low : low + 5], target[low : low + 5], low)
        states.append(tally.state())
    return PredictionTally.merged(states).summarize(ArraySource(images, target), epoch=1, step=2, class_names=None)


def test_every_sample_is_counted_once_by_class_and_answer():
    output, target = outputs()
    found = told_by(1)
    expected = torch.bincount(target * 5 + output.argmax(1), minlength=25).reshape(5, 5)
    assert {(p.target, p.predicted): p.count for p in found.pairs} == {
        (t, a): int(expected[t, a]) for t in range(5) for a in range(5) if expected[t, a]
    }


def test_the_examples_are_the_wrong_answers_given_with_most_confidence():
    output, target = outputs()
    sureness, answers = output.softmax(1).max(1)
    wrong = sorted((-float(sureness[i]), i) for i in range(60) if answers[i] != target[i])
    found = told_by(1)
    assert [e.index for e in found.examples] == [i for _, i in wrong[:24]]
    assert found.examples[0].confidence == pytest.approx(-wrong[0][0], abs=1e-4)
    assert all(e.picture is not None and (e.picture.width, e.picture.channels) == (4, 1) for e in found.examples)


@pytest.mark.parametrize("shares", [2, 3, 4])
def test_the_number_of_workers_changes_nothing(shares):
    assert told_by(shares) == told_by(1)


def test_what_is_no_classification_is_not_told_of():
    tally = PredictionTally()
    tally.add(torch.randn(4, 3, 7), torch.randint(3, (4, 7)), 0)
    tally.add(torch.randn(4, 3), torch.randn(4, 3), 0)
    assert (
        PredictionTally.merged([tally.state()]).summarize(
            ArraySource(torch.zeros(4)), epoch=0, step=0, class_names=None
        )
        is None
    )


def test_pictures_are_grey_or_colored_small_and_use_all_levels():
    gray = picture_of(torch.linspace(-3, 5, 64).reshape(8, 8))
    assert (gray.width, gray.height, gray.channels) == (8, 8, 1)
    assert (gray.pixels[0], gray.pixels[-1]) == (0, 255)
    colored = picture_of(torch.rand(3, 300, 150))
    assert (colored.width, colored.height, colored.channels) == (32, 64, 3)
    assert len(colored.pixels) == 32 * 64 * 3
    assert set(picture_of(torch.full((1, 4, 4), 7.0)).pixels) == {0}


@pytest.mark.parametrize("shape", [(5,), (4, 8, 8), (1, 1, 8), (2, 3, 4, 5)])
def test_what_is_no_picture_is_none(shape):
    assert picture_of(torch.rand(*shape)) is None
