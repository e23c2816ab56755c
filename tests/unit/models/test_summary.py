"""What `syncline show` says of a network."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import syncline
from syncline.models.summary.skip_connections import skip_connections
from syncline.models.summary.summarize import ModelSummary, summarize
from syncline.models.summary.svg import as_svg
from syncline.models.summary.terminal import as_text

BRANCHED = syncline.declared([
    "conv2d(4, 3, padding=1)", {"layer": "relu", "name": "first"}, "conv2d(4, 3, padding=1)",
    {"layer": "add", "from": ["first", "previous"]}, "flatten", "linear(10)",
])  # fmt: skip


def summary(shape: tuple[int, ...] = (2, 6, 6)) -> ModelSummary:
    return summarize(BRANCHED.build(shape).to("meta"), torch.zeros(1, *shape, device="meta"), title="small")


def test_layers_have_the_shapes_parameters_and_memory_of_the_real_thing():
    found = summary()
    assert [part.kind for part in found.parts] == ["", "Conv2d", "ReLU", "Conv2d", "Add", "Flatten", "Linear"]
    assert [part.shape for part in found.parts] == [(2, 6, 6), *[(4, 6, 6)] * 4, (144,), (10,)]
    assert found.parameters == sum(p.numel() for p in BRANCHED.build((2, 6, 6)).parameters())
    assert sum(part.parameters for part in found.parts) == found.parameters
    assert found.parts[1].activation_bytes == 4 * 6 * 6 * 4
    assert found.parts[4].sources == (2, 3)


def test_flops_are_two_for_each_weight_and_place_it_is_used_in():
    found = summary()
    assert found.parts[1].flops == 2 * (2 * 4 * 3 * 3) * 6 * 6
    assert found.parts[6].flops == 2 * 144 * 10
    assert found.flops == sum(part.flops for part in found.parts)


def test_a_recurrent_layer_is_counted_for_every_step():
    model = syncline.declared(["lstm(6)"]).build((5, 3)).to("meta")
    found = summarize(model, torch.zeros(1, 5, 3, device="meta"), title="lstm")
    assert found.flops == 2 * 5 * (4 * 6 * 3 + 4 * 6 * 6)


def test_any_module_is_shown_by_the_layers_inside():
    inner = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    found = summarize(inner.to("meta"), torch.zeros(1, 3, device="meta"), title="x")
    assert [part.name for part in found.parts] == ["input", "0", "1.0", "1.1"]


def test_the_text_draws_the_branch_and_names_it():
    lines = as_text(summary()).splitlines()
    assert [line[:4].rstrip() for line in lines[3:10]] == ["●", "●", "●─╮", "● │", "●─╯", "●", "●"]
    assert "from first, previous" in lines[7]
    assert "6 layers, 1,674 parameters" in lines[-1]


def test_the_image_is_well_formed_and_has_a_box_for_every_layer_and_an_arc_for_the_branch():
    text = as_svg(summary())
    root = ElementTree.fromstring(text)
    name = "{http://www.w3.org/2000/svg}"
    classes = [element.get("class", "") for element in root.iter()]
    assert sum(c.startswith("box") for c in classes) == 7
    assert classes.count("skip") == 1
    assert root.find(f"{name}title") is not None
    assert "prefers-color-scheme: dark" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), "it needs nothing from elsewhere"


@given(st.data())
def test_no_two_connections_lie_on_one_another(data):
    count = data.draw(st.integers(2, 12))
    sources = [()] + [
        tuple(data.draw(st.lists(st.integers(0, k - 1), min_size=1, max_size=3))) for k in range(1, count)
    ]
    found = skip_connections(sources)
    assert {(b.start, b.end) for b in found} == {(s, k) for k, taken in enumerate(sources) for s in taken if s != k - 1}
    for one in found:
        for other in found:
            if one is not other and one.lane == other.lane:
                assert one.end < other.start or other.end < one.start


@pytest.mark.parametrize("model", ["lenet", "lstm", "resnet18"])
def test_models_of_the_zoo_are_shown_too(model):
    from syncline.models.zoo import registry

    net = registry.build(model, (1, 8, 8), 10)
    found = summarize(net.to("meta"), torch.zeros(1, 1, 8, 8, device="meta"), title=model)
    assert found.parameters == sum(part.parameters for part in found.parts)
    assert found.parts[-1].shape == (10,)
