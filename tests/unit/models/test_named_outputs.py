"""Outputs of a model by name: its own, probabilities, and layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from syncline.errors import ConfigError, UnknownName
from syncline.models.named_outputs import NamedOutputs, check_names


class Returning(nn.Module):
    """Returns whatever `make` makes of a linear layer's output."""

    def __init__(self, make) -> None:
        super().__init__()
        self.fc1, self.unused, self._make = nn.Linear(4, 3), nn.Linear(4, 3), make

    def forward(self, x: torch.Tensor):
        return self._make(self.fc1(x))


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def test_a_classifier_has_logits_and_their_softmax() -> None:
    model = Returning(lambda y: y)
    found = NamedOutputs(model, "classes")(X)
    assert torch.equal(found["logits"], model(X))
    assert torch.equal(found["probabilities"], model(X).softmax(1))


def test_a_binary_logit_has_its_sigmoid() -> None:
    found = NamedOutputs(Returning(lambda y: y[:, 0]), "binary logits")(X)
    assert torch.equal(found["probabilities"], found["logits"].sigmoid())


def test_a_layer_is_an_output_in_the_order_asked_for() -> None:
    model = Returning(lambda y: y.relu())
    found = NamedOutputs(model, "classes", ["logits", "fc1"])(X)
    assert list(found) == ["logits", "fc1"]
    assert torch.equal(found["fc1"], model.fc1(X))
    assert not model.fc1._forward_hooks


def test_a_dict_keeps_its_names_and_a_tuple_gets_some() -> None:
    assert list(NamedOutputs(Returning(lambda y: {"a": y, "note": "text"}), "numbers")(X)) == ["a"]
    assert list(NamedOutputs(Returning(lambda y: (y, y + 1)), "numbers")(X)) == ["output", "output1"]


def test_a_recurrent_layer_gives_its_sequence() -> None:
    model = nn.Sequential(nn.LSTM(4, 6, batch_first=True))
    inputs = torch.randn(2, 3, 4)
    sequence = NamedOutputs(model, "numbers", ["0"])(inputs)["0"]
    assert sequence.shape == (2, 3, 6)


def test_an_unknown_name_lists_the_layers() -> None:
    with pytest.raises(UnknownName) as unknown:
        NamedOutputs(Returning(lambda y: y), "classes", ["fc2"])(X)
    assert unknown.value.facts["nearest"] == ["fc1"]
    with pytest.raises(UnknownName):
        check_names(Returning(lambda y: y), "numbers", ["logits"])


def test_a_layer_that_is_not_called_and_an_output_without_tensors_are_refused() -> None:
    with pytest.raises(ConfigError) as not_called:
        NamedOutputs(Returning(lambda y: y), "classes", ["unused"])(X)
    assert (not_called.value.code, not_called.value.facts["layer"]) == ("layer-not-called", "unused")
    with pytest.raises(ConfigError) as no_tensors:
        NamedOutputs(Returning(lambda y: 3), "numbers")(X)
    assert no_tensors.value.code == "output-type"
