"""A model written in a run file trains to the same bits as the same layers written in Python."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from real_runs import final_state
from torch import nn

import syncline
from syncline.cli.tasks import find_task
from syncline.driver import run_task
from syncline.observe.terminal.quiet import Quiet

RUN_FILE = """
data = "digits"
workers = 2
batch = 50
epochs = 2
max_steps = 20
seed = 5
evaluate_every = 0

[optimizer]
name = "SGD"
lr = 0.05
momentum = 0.9

[model]
input = [1, 8, 8]

[[model.layers]]
layer = "Conv2d"
out_channels = 6
kernel_size = 3
padding = 1

[[model.layers]]
layer = "batch_norm2d"

[[model.layers]]
layer = "relu"
name = "first"

[[model.layers]]
layer = "conv2d(6, 3, padding=1)"

[[model.layers]]
layer = "add"
from = ["first", "previous"]

[[model.layers]]
layer = "relu"

[[model.layers]]
layer = "dropout(0.25)"

[[model.layers]]
layer = "flatten"

[[model.layers]]
layer = "linear"
out_features = "classes"
"""


class SameInPython(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.branch = nn.Conv2d(6, 6, 3, padding=1)
        self.dropout = nn.Dropout(0.25)
        self.linear = nn.Linear(6 * 8 * 8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.relu(self.norm(self.convolution(x)))
        return self.linear(self.dropout(torch.relu(first + self.branch(first))).flatten(1))


def train_file(text: str, folder: Path, **settings: object) -> syncline.Result:
    file = folder / "my_run.toml"
    file.write_text(text)
    found = find_task(str(file), {}, {"out": str(folder / "runs"), **settings})
    return run_task(found.task, found.config, Quiet(io.StringIO(), io.StringIO()))


def test_a_model_in_toml_and_the_same_in_python_have_the_same_bits_after_20_steps_of_2_workers(tmp_path):
    declared = train_file(RUN_FILE, tmp_path)
    in_python = syncline.train(
        model=SameInPython, data="digits", optimizer=syncline.sgd(lr=0.05, momentum=0.9), batch=50, epochs=2,
        max_steps=20, seed=5, evaluate_every=0, workers=2, out=str(tmp_path / "python"), quiet=True,
    )  # fmt: skip
    assert declared.steps == in_python.steps == 20
    ours = [t for n, t in final_state(declared.run_dir)["model"].items()]
    theirs = [t for n, t in final_state(in_python.run_dir)["model"].items()]
    assert len(ours) == len(theirs) == 11
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)


PENALISED = """
data = "digits"
batch = 60
epochs = 1
evaluate_every = 0
optimizer = "sgd(lr=0.05)"

[model]
layers = [
    "flatten",
    { layer = "linear(16)", regularizer = ["l1(0.002)", "l2(0.01)"] },
    "tanh",
    { layer = "linear('classes')", constraint = "max_norm(0.5)" },
]
"""


def test_regularizers_give_the_same_result_for_any_number_of_workers_and_pieces(tmp_path):
    states = []
    for name, settings in (("a", {"workers": 1}), ("b", {"workers": 3}), ("c", {"workers": 2, "accumulate": 3})):
        (tmp_path / name).mkdir()
        states.append(final_state(train_file(PENALISED, tmp_path / name, **settings).run_dir)["model"])
    for other in states[1:]:
        for name, tensor in states[0].items():
            assert torch.allclose(tensor, other[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("strategy", ["server-async", "sparknet(4)"])
def test_penalties_and_constraints_act_under_every_kind_of_strategy(tmp_path, strategy):
    sizes = {}
    for strength in (0.0, 0.1):
        folder = tmp_path / str(strength)
        folder.mkdir()
        text = PENALISED.replace("l2(0.01)", f"l2({strength})")
        trained = train_file(text, folder, workers=2, strategy=strategy).model
        sizes[strength] = float(trained[1].weight.detach().norm())
        assert trained[3].weight.norm(dim=1).max() <= 0.5 + 1e-6
    assert sizes[0.1] < 0.8 * sizes[0.0]


def test_a_run_of_a_declared_model_is_resumed_with_the_same_bits(tmp_path):
    whole = train_file(RUN_FILE, tmp_path)
    (tmp_path / "parts").mkdir()
    half = train_file(RUN_FILE.replace("max_steps = 20", "max_steps = 9"), tmp_path / "parts")
    resumed = syncline.resume(half.run_dir, max_steps=20, quiet=True)
    assert resumed.steps == 20
    for name, tensor in final_state(whole.run_dir)["model"].items():
        assert torch.equal(tensor, final_state(resumed.run_dir)["model"][name]), name


def test_a_mistake_in_a_layer_is_reported_with_file_and_line_and_nothing_else(tmp_path):
    line = RUN_FILE.splitlines().index('layer = "Conv2d"') + 1
    told = rf"^\S*my_run\.toml:{line}: There is no layer 'Conv2dd'\. Did you mean 'Conv2d'"
    with pytest.raises(syncline.SynclineError, match=told):
        train_file(RUN_FILE.replace('"Conv2d"', '"Conv2dd"'), tmp_path)
