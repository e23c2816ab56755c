"""Every layout gives the result of one process, model by model, after 20 steps.

The gate runs a few pairs; `SYNCLINE_TEST_LAYOUTS=all`, as in `make nightly`, runs all of them. Batches of 11 samples
divide by nothing, and dropout is on. resnet18 is chaotic in float32: one process that starts 1e-7 apart, or two
replicated workers, end as far from one process as a layout does. So it is computed in float64.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from real_runs import final_state, relative_difference

import syncline
from syncline.models.declared.declaration import declared
from syncline.models.zoo.resnet import resnet18

STEPS, BATCH, TOKENS, TIME = 20, 11, 17, 9


class ModelCase(NamedTuple):
    """A model, and the shape of the images that it is trained on; without one, on tokens."""

    model: Any
    image: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32


def double_resnet() -> torch.nn.Module:
    """resnet18 in float64."""
    torch.manual_seed(0)
    return resnet18((3, 16, 16), 10, 8, "cifar").double()


CASES = {
    "mlp": ModelCase("mlp(hidden=[150, 130])", (1, 8, 8)),
    "lenet": ModelCase("lenet", (1, 28, 28)),
    "resnet18": ModelCase(double_resnet, (3, 16, 16), torch.float64),
    "lstm": ModelCase("lstm(hidden=24)"),
    "transformer": ModelCase("transformer(width=66, heads=3, layers=3, dropout=0.1)"),
    "declared": ModelCase(
        declared([
            "conv2d(16, 3, padding=1)", {"layer": "relu", "name": "first"}, "conv2d(16, 3, padding=1, bias=False)",
            "batch_norm2d", {"layer": "add", "from": ["first", "previous"]}, "relu", "max_pool2d(2)", "flatten",
            "dropout(0.2)", "linear(100)", "relu", "linear(10)",
        ]),
        (1, 8, 8),
    ),
    "gpt2": ModelCase("hf:gpt2(n_layer=3, n_embd=66, n_head=3, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.0)"),
}  # fmt: skip
LAYOUTS = {
    "sharded(2)": 2, "sharded(3)": 3, "pipeline(2)": 2, "pipeline(3)": 3, "tensor(2)": 2, "pipeline(2) ": 4,
    "sharded(2) ": 4, "pipeline(2) x sharded(2)": 4,
}  # fmt: skip
NOT_RUN = {("lstm", "tensor(2)")}  # refused before the first step: nothing in it is large enough to be divided
IN_GATE = [("declared", "pipeline(2) "), ("gpt2", "tensor(2)"), ("transformer", "pipeline(2) x sharded(2)")]
PAIRS = [(m, lay) for m in CASES for lay in LAYOUTS] if os.environ.get("SYNCLINE_TEST_LAYOUTS") == "all" else IN_GATE


def train(folder: Path, case: ModelCase, workers: int, layout: str, **changes: Any) -> syncline.Result:
    """Twenty steps of SGD with momentum."""
    count, generator = 83, torch.Generator().manual_seed(1)
    if case.image is None:
        tokens = torch.randint(0, TOKENS, (count, TIME + 1), generator=generator)
        data = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    else:
        images = torch.randn(count, *case.image, generator=generator).to(case.dtype)
        data = images, torch.randint(0, 10, (count,), generator=generator)
    settings: dict[str, Any] = {
        "model": case.model, "data": data, "loss": "cross_entropy", "batch": BATCH, "epochs": 9, "max_steps": STEPS,
        "optimizer": syncline.sgd(lr=0.05, momentum=0.9), "tune": "off", "threads": 1, "quiet": True, **changes,
    }  # fmt: skip
    return syncline.train(workers=workers, layout=layout.strip(), out=str(folder), **settings)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By model, the state after the steps of one process."""
    known: dict[str, dict[str, Any]] = {}

    def state_of(name: str) -> dict[str, Any]:
        if name not in known:
            known[name] = final_state(train(tmp_path_factory.mktemp(name), CASES[name], 1, "replicated").run_dir)
        return known[name]

    return state_of


@pytest.mark.parametrize(("name", "layout"), [pair for pair in PAIRS if pair not in NOT_RUN])
def test_twenty_steps_of_a_layout_give_the_parameters_of_one_process(name, layout, tmp_path, one_process, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    state = final_state(train(tmp_path, CASES[name], LAYOUTS[layout], layout).run_dir)
    difference = relative_difference(one_process(name)["model"], state["model"])
    assert difference < 1e-5
    assert state["position"]["step"] == STEPS
