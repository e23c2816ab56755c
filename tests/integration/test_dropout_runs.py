"""Promise 1 with dropout on: the same result for any number of workers, micro-batches and layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from real_runs import SignalAt, final_state, relative_difference, same_bits, samples
from torch import nn

import syncline
from syncline.models import zoo


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
    )


def train(folder: Path, model: Any, **changes: Any) -> dict[str, torch.Tensor]:
    settings = {
        "data": samples(), "batch": 10, "max_steps": 20, "optimizer": syncline.sgd(lr=0.05, momentum=0.9),
        "tune": "off", "threads": 1, "quiet": True, **changes,
    }  # fmt: skip
    state: dict[str, torch.Tensor] = final_state(syncline.train(model=model, out=str(folder), **settings).run_dir)[
        "model"
    ]
    return state


def test_a_perceptron_with_dropout_is_trained_the_same_however_its_samples_are_divided(tmp_path):
    alone = train(tmp_path / "alone", net(), workers=1)
    without = train(tmp_path / "without", nn.Sequential(*(m for m in net() if type(m) is not nn.Dropout)), workers=1)
    assert relative_difference({"0.weight": alone["0.weight"]}, without) > 1e-3, "dropout must be on"
    ways: list[dict[str, Any]] = [
        {"workers": 3}, {"workers": 1, "accumulate": 3}, {"workers": 2, "accumulate": 2, "layout": "sharded"},
    ]  # fmt: skip
    for number, way in enumerate(ways):
        assert relative_difference(alone, train(tmp_path / str(number), net(), **way)) < 1e-5, way


def test_a_transformer_with_dropout_too(tmp_path):
    torch.manual_seed(0)
    words = torch.randint(0, 11, (40, 7), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    model = zoo.build("transformer", (6,), 11, vocabulary=11, width=8, layers=2, heads=2, dropout=0.3)
    run = {"data": (words[:, :-1], words[:, 1:]), "max_steps": 8}
    alone = train(tmp_path / "alone", model, workers=1, **run)
    assert relative_difference(alone, train(tmp_path / "two", model, workers=2, accumulate=2, **run)) < 1e-5


@pytest.mark.parametrize("layout", ["replicated", "sharded"])
def test_with_replacements_the_bits_are_the_same_after_kills(tmp_path, layout):
    whole = train(tmp_path / "whole", net(), workers=3, layout=layout)
    model = SignalAt(net(), [(4, 1), (9, 0)], tmp_path / "killed")
    killed = train(
        tmp_path / "killed-run", model, workers=3, layout=layout, on_worker_failure="replace-only", max_failures=9
    )
    assert len(list(tmp_path.glob("killed-*-*"))) == 2
    assert same_bits(whole, {name.removeprefix("net."): value for name, value in killed.items()})
