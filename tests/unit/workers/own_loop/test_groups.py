"""Parameter groups that a script adds in the middle of the training, and one that runs from the top has not yet."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from syncline.errors import ConfigError
from syncline.workers.own_loop.groups import ParameterGroups


class Parts:
    """A model of five layers, of which the optimizer has the first, as a script's prepared parts."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))
        self.optimizers = [torch.optim.Adam(self.model[0].parameters(), lr=0.5)]
        self.groups = ParameterGroups(self)  # type: ignore[arg-type]

    def parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizers[0].param_groups for p in group["params"]]

    def add(self, layer: int) -> None:
        group = {"params": self.model[layer].parameters(), "lr": 0.1 * layer}
        self.groups.add(0, group, self.optimizers[0].add_param_group)

    def step(self) -> None:
        for number, p in enumerate(self.parameters()):
            p.grad = torch.full_like(p, 0.1 * (number + 1))
        self.optimizers[0].step()


def as_text(state: dict[str, Any]) -> str:
    return json.dumps(state, default=lambda tensor: tensor.tolist())


@settings(max_examples=60, deadline=None)
@given(data=st.data(), late=st.integers(0, 4))
def test_a_script_that_runs_from_the_top_ends_with_the_groups_and_the_state_of_the_others(data, late):
    at_start = data.draw(st.integers(0, late), label="groups when the round began")
    own = data.draw(st.integers(0, late), label="groups that the script has added before it joins")
    comes_to_all = data.draw(st.booleans(), label="whether the script comes to the lines that add them")
    others, newcomer = Parts(), Parts()
    for layer in range(1, late + 1):
        if layer - 1 == at_start:
            script = others.groups.state()
        others.add(layer)
        others.step()
    script = script if at_start < late else others.groups.state()
    for layer in range(1, own + 1):
        newcomer.optimizers[0].add_param_group({"params": newcomer.model[layer].parameters()})
    saved = others.optimizers[0].state_dict()
    newcomer.optimizers[0].load_state_dict(newcomer.groups.fit(saved, script))
    first = own if comes_to_all else max(own, at_start)
    for layer in range(first + 1, late + 1):
        newcomer.add(layer)
    assert as_text(newcomer.optimizers[0].state_dict()) == as_text(saved)
    assert newcomer.groups.state() == others.groups.state()


def test_a_survivor_that_missed_an_update_gets_the_state_of_the_groups_that_it_has():
    ahead, behind = Parts(), Parts()
    ahead.step()
    ahead.add(1)
    behind.optimizers[0].load_state_dict(behind.groups.fit(ahead.optimizers[0].state_dict(), None))
    behind.add(1)
    assert as_text(behind.optimizers[0].state_dict()) == as_text(ahead.optimizers[0].state_dict())


def test_frozen_parameters_are_frozen_in_a_script_that_runs_from_the_top():
    others, newcomer = Parts(), Parts()
    newcomer.model.requires_grad_(False)
    others.model[0].bias.requires_grad_(False)
    newcomer.groups.load_frozen(others.groups.state())
    assert [p.requires_grad for p in newcomer.parameters()] == [True, False]


def test_parameters_of_a_layer_that_was_made_later_are_refused():
    parts = Parts()
    parts.groups.state()
    with pytest.raises(ConfigError) as caught:
        parts.groups.add(0, {"params": nn.Linear(2, 2).parameters()}, parts.optimizers[0].add_param_group)
    assert (caught.value.code, caught.value.facts["parameters"]) == ("unknown-parameters", 2)
