"""Declared models, and the errors in a declaration."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import syncline
from syncline.config.toml import read_run_file
from syncline.errors import ConfigError, ConfigFileError
from syncline.models.declared.declaration import Declared
from syncline.models.declared.read import task_settings

HEAD = 'data = "digits"\n'


def read(text: str, folder: Path) -> Declared:
    file = folder / "net.toml"
    file.write_text(text)
    model = task_settings(read_run_file(file))["model"]
    assert isinstance(model, Declared)
    return model


def mistake(text: str, folder: Path, shape: tuple[int, ...] = (1, 8, 8), classes: int | None = 10) -> str:
    with pytest.raises(ConfigFileError) as told:
        read(text, folder).build(shape, classes)
    return str(told.value).removeprefix(f"{folder}/")


def test_tables_lines_and_python_say_the_same_model(tmp_path):
    tables = read(
        HEAD + "[[model.layers]]\nlayer = 'Conv2d'\nout_channels = 4\nkernel_size = 3\n"
        "[[model.layers]]\nlayer = 'flatten'\n[[model.layers]]\nlayer = 'linear(\"classes\")'\n",
        tmp_path,
    )
    lines = read(HEAD + "[model]\nlayers = ['conv2d(4, 3)', 'Flatten', 'linear(\"classes\")']\n", tmp_path)
    in_python = syncline.declared([{"layer": "conv_2d", "out_channels": 4, "kernel_size": 3}, "flatten", "Linear(10)"])
    shapes = [[tuple(p.shape) for p in m.build((1, 8, 8), 10).parameters()] for m in (tables, lines, in_python)]
    assert shapes[0] == shapes[1] == shapes[2] == [(4, 1, 3, 3), (4,), (10, 144), (10,)]


def test_a_chain_is_an_nn_sequential_with_the_same_weights_and_keys():
    torch.manual_seed(3)
    ours = syncline.declared(["conv2d(4, 3)", "relu", "flatten", "linear(10)"]).build((1, 8, 8))
    torch.manual_seed(3)
    theirs = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    assert type(ours) is nn.Sequential
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name])


def test_branches_join_what_they_name():
    model = syncline.declared([
        {"layer": "linear(4)", "name": "a"},
        {"layer": "linear(3)", "name": "b", "from": "input"},
        {"layer": "concat", "from": ["a", "b", "input"]},
    ]).build((5,))  # fmt: skip
    x = torch.randn(2, 5)
    assert torch.equal(model(x), torch.cat([model.a(x), model.b(x), x], dim=1))


def test_recurrent_layers_and_attention_are_batch_first_and_give_their_values():
    model = syncline.declared(
        ["embedding(8)", "sine_positions", "multihead_attention(2)", "lstm(6)", "last", "linear(3)"]
    )
    net = model.build((7,), vocabulary=11)
    assert net(torch.randint(0, 11, (4, 7))).shape == (4, 3)


def test_the_text_of_a_model_and_its_copy_are_the_same_wherever_it_was_written(tmp_path):
    text = HEAD + "[model]\nlayers = ['linear(3)',\n 'relu']\n"
    one, other = read(text, tmp_path), read("\n\n" + text, tmp_path)
    assert one == other == pickle.loads(pickle.dumps(one)) == syncline.declared(["linear(3)", "relu"])
    assert str(one) == str(other)
    assert str(one) != str(syncline.declared(["linear(4)", "relu"]))


def test_an_unknown_layer_is_reported_with_file_line_and_the_nearest_name(tmp_path):
    text = HEAD + "\n[[model.layers]]\nlayer = 'relu'\n\n[[model.layers]]\nname = 'x'\nlayer = 'Conv2dd'\n"
    assert mistake(text, tmp_path).startswith("net.toml:8: There is no layer 'Conv2dd'. Did you mean 'Conv2d'")


def test_an_unknown_layer_in_an_array_is_reported_with_its_line(tmp_path):
    text = HEAD + "[model]\nlayers = [\n  'relu', # [ , ]\n  { layer = 'relu', name = 'a' },\n  'flaten',\n]\n"
    assert mistake(text, tmp_path).startswith("net.toml:6: There is no layer 'flaten'. Did you mean 'Flatten'")


def test_a_shape_that_does_not_fit_names_the_layer_and_the_shape(tmp_path):
    text = HEAD + "[model]\nlayers = [\n  'flatten',\n  'conv2d(3, 3)',\n]\n"
    said = mistake(text, tmp_path)
    assert said.startswith("net.toml:5: Layer 2 'conv2d' got shape (64,):")


def test_branches_that_do_not_fit_name_both_shapes(tmp_path):
    text = HEAD + "[model]\nlayers = [\n  'flatten',\n  'linear(3)',\n  {layer='add', from=['input', 'previous']},\n]\n"
    assert "net.toml:6: Layer 3 'add' got shape (1, 8, 8) and (3,):" in mistake(text, tmp_path)


@pytest.mark.parametrize(
    ("layer", "line", "said"),
    [
        ("layer = 'Linear'\nout_feature = 3", 4, "'out_feature'. Did you mean 'out_features'"),
        ("layer = 'Conv2d'\nout_channels = 3", 2, "Conv2d needs kernel_size"),
        ("layer = 'relu'\nfrom = 'first'", 4, "no earlier layer named 'first'"),
        ("layer = 'relu'\nname = 'previous'", 4, "name is 'previous'"),
        ("layer = 'relu'\nname = 'forward'", 4, "name is 'forward'"),
        ("layer = 'relu('", 3, "Cannot read 'relu('"),
        ("layer = 'linear(3)'\nout_features = 3", 2, "Linear gets out_features twice"),
        ("layer = 'linear(3, bias=False)'\nbias = true", 4, "bias is given twice"),
        ("layer = 'linear(3, True, 4, 5, 6)'", 2, "takes at most"),
        ("layer = 'linear(3)'\ninit = 'kaiming_norml'", 4, "'kaiming_norml'. Did you mean"),
        ("layer = 'linear(3)'\nregularizer = 'l3(1)'", 4, "regularizer 'l3'"),
        ("layer = 'linear(3)'\nconstraint = 'maxnorm(-1)'", 4, "c is -1"),
        ("layer = 'flatten(0)'", 2, "dimension 0"),
        ("name = 'x'", 2, "Layer 1 has no type"),
    ],
)
def test_mistakes_in_a_layer_are_reported_at_their_line(tmp_path, layer, line, said):
    told = mistake(HEAD + "[[model.layers]]\n" + layer + "\n", tmp_path)
    assert told.startswith(f"net.toml:{line}: "), told
    assert said in told


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("[model]\nlayers = []", "layers is empty"),
        ("[model]\ninitt = 'normal'\nlayers = ['relu']", "'initt'. Did you mean 'init'"),
        ("[model]\ninput = [3, 8, 8]\nlayers = ['relu']", "input is [3, 8, 8]"),
        ("[model]\nlayers = ['embedding(3)']", "num_embeddings"),
    ],
)
def test_mistakes_in_the_model_are_reported(tmp_path, table, said):
    assert said in mistake(HEAD + table + "\n", tmp_path)


def test_classes_that_the_data_does_not_have_are_reported():
    with pytest.raises(ConfigError, match="number of classes"):
        syncline.declared(["linear('classes')"]).build((3,))
