"""The proof of an export, with functions in the place of exported models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import syncline
from syncline.errors import ExportError
from syncline.serving.exporting.proof import prove
from syncline.serving.samples import RawSamples
from syncline.serving.trained import TrainedModel, of_task

COUNT = 300


def trained(*, loss: str = "cross_entropy") -> TrainedModel:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(4, 3 if loss == "cross_entropy" else 1)
    inputs = torch.randn(COUNT, 4, generator=generator)
    outputs = model(inputs).detach()
    data = (inputs, outputs.argmax(1) if loss == "cross_entropy" else outputs)
    task = syncline.Task(model=model, data=data, test=data, loss=loss).with_defaults()
    return of_task(task, model.state_dict(), version="1", facts={})


def same(model: TrainedModel, change=lambda y: y):
    def run(values):
        with torch.inference_mode():
            found = change(model.module(torch.from_numpy(values[0])).numpy())
        return {"logits": found, "output": found}

    return run


def test_an_equal_model_is_proved_on_all_test_data_with_both_scores() -> None:
    model = trained()
    proof = prove(model, ["logits"], same(model))
    assert (proof.data, proof.samples, proof.available) == ("test", COUNT, COUNT)
    assert (proof.measure, proof.torch_score, proof.exported_score, proof.agreement) == ("accuracy", 1.0, 1.0, 1.0)
    assert proof.differences == {"logits": 0.0}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda y: y + 0.01, id="shifted"),
        pytest.param(lambda y: y[:, ::-1], id="classes in another order"),
        pytest.param(lambda y: y * np.float32(np.nan), id="NaN"),
        pytest.param(lambda y: y[:, :2], id="a class less"),
    ],
)
def test_a_model_that_differs_is_refused_with_the_output_and_the_difference(change) -> None:
    model = trained()
    with pytest.raises(ExportError) as refused:
        prove(model, ["logits"], same(model, change))
    assert (refused.value.code, refused.value.facts["output"]) == ("not-equal", "logits")
    assert not refused.value.facts["difference"] <= refused.value.facts["tolerance"]


def test_a_difference_in_a_single_one_of_many_samples_is_found() -> None:
    model = trained()
    hit = model.test.raw([COUNT - 1])[0]

    def wrong_once(values):
        found = same(model)(values)["logits"].copy()
        found[(values[0] == hit).all(1)] += 1
        return {"logits": found}

    with pytest.raises(ExportError):
        prove(model, ["logits"], wrong_once)


def test_without_a_tolerance_only_scores_count() -> None:
    model = trained()
    proof = prove(model, ["logits"], same(model, lambda y: -y), tolerance=None)
    assert proof.exported_score < proof.torch_score == 1.0
    assert proof.drop_points == pytest.approx(100 * (1.0 - proof.exported_score))


def test_numbers_are_scored_by_their_coefficient_of_determination() -> None:
    model = trained(loss="mse_loss")
    proof = prove(model, ["output"], same(model, lambda y: y * 0 + y.mean()), tolerance=None)
    assert proof.measure == "R2"
    assert proof.torch_score == pytest.approx(1.0)
    assert proof.exported_score < 0.3


def test_samples_are_taken_from_all_of_the_data_when_there_are_too_many() -> None:
    model = trained()
    seen = []

    def run(values):
        seen.append(values[0])
        return same(model)(values)

    proof = prove(model, ["logits"], run, most=10)
    found = np.concatenate(seen)
    assert (proof.samples, len(found), len(seen[0])) == (10, 10, 1)
    assert isinstance(model.test, RawSamples)
    assert (found[-1] == model.test.raw([COUNT - 1])[0]).all()
