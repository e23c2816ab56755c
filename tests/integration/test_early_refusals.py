"""A layout that a run cannot have is refused before any process starts, and `auto` chooses one that it can have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from real_runs import samples
from torch import nn

import syncline
from syncline import driver
from syncline.errors import ConfigError
from syncline.layouts.layout import read_layout
from syncline.telemetry.events import InfoMessage
from syncline.telemetry.run_dir import RunDir


class Looping(nn.Module):
    """What it computes depends on values, so it cannot be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> Any:
        while float(x.abs().max()) > 1.0:
            x = x / 2
        return self.last(self.layer(x))


def net(width: int = 16, depth: int = 3) -> nn.Module:
    torch.manual_seed(0)
    blocks = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(12, width), *blocks, nn.Linear(width, 3))


def train(folder: Path, model: nn.Module, **settings: Any) -> syncline.Result:
    given: dict[str, Any] = {
        "data": samples(), "batch": 12, "max_steps": 3, "quiet": True, "out": str(folder), "tune": "off",
        "optimizer": syncline.optimizer("adamw", lr=0.01), **settings,
    }  # fmt: skip
    return syncline.train(model=model, **given)


@pytest.mark.parametrize(
    ("model", "settings", "facts"),
    [
        (net(), {"workers": 9, "layout": "pipeline(9)"}, {"reason": "too-many-stages", "nearest": "pipeline(3)"}),
        (net(), {"workers": 2, "layout": "pipeline(2, cut=nothing)"}, {"kind": "unit"}),
        (net(), {"workers": 2, "layout": "tensor(2)"}, {"reason": "nothing-to-divide", "nearest": "sharded"}),
        (net(), {"workers": 2, "layout": "sharded", "strategy": "hogwild"}, {"reason": "strategy"}),
        (net(), {"workers": 2, "layout": "pipeline(2)", "strategy": "ltfb"}, {"reason": "strategy"}),
        (net(), {"workers": 3, "layout": "pipeline(2)"}, {"reason": "workers"}),
        (Looping(), {"workers": 2, "layout": "pipeline(2)"}, {"nearest": "sharded"}),
        (net(), {"workers": 2, "layout": "auto", "memory_limit": "10MB"}, {"reason": "memory", "nearest": None}),
        (net(), {"workers": 2, "layout": "auto", "engine": "ray"}, {"reason": "engine"}),
    ],
)
def test_what_cannot_be_is_refused_before_any_process_starts(tmp_path, monkeypatch, model, settings, facts):
    def started(*given: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(driver, "engine_for", started)
    random_state = torch.get_rng_state()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ConfigError) as refused:
        train(tmp_path, model, **settings)
    assert facts.items() <= refused.value.facts.items()
    assert not list(tmp_path.iterdir())
    assert torch.equal(torch.get_rng_state(), random_state), "the user's random numbers are as they were"
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_script_has_no_automatic_layout(tmp_path):
    with pytest.raises(ConfigError) as refused:
        driver.run_script(
            driver.Script(str(tmp_path / "no.py"), ()),
            syncline.RunConfig(layout="auto"),
            view=None,  # type: ignore[arg-type]
        )
    assert (refused.value.facts["reason"], refused.value.facts["nearest"]) == ("own-loop", "sharded")


def test_a_model_too_large_for_the_limit_when_replicated_trains_with_the_layout_that_auto_chooses(tmp_path):
    model = net(1500, 4)
    result = train(tmp_path, model, workers=2, layout="auto", memory_limit="340MB")
    run = RunDir(result.run_dir)
    layout = read_layout(run.read_plan()["layout"])
    assert not layout.is_replicated
    notes = [e.message for e in run.read_events() if isinstance(e, InfoMessage)]
    assert any(f"--layout auto chose {layout}" in note and "340 MB" in note for note in notes)
    assert result.steps == 3
