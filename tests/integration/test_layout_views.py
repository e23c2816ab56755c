"""What workers hold of a model is reported, agrees with what was predicted, and is seen in the report."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from real_runs import samples
from torch import nn

import syncline
from syncline.layouts.forecast import forecast
from syncline.layouts.layout import read_layout
from syncline.observe.report.record import record_of
from syncline.observe.report.report_page import as_html
from syncline.telemetry.events import WAITING, Progress, WorkerReady
from syncline.telemetry.run_dir import RunDir
from syncline.workers.layout_facts import model_facts


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(12, 12), nn.ReLU())), nn.Linear(12, 3))


@pytest.mark.parametrize("text", ["sharded", "pipeline(2, cut=4)"])
def test_what_workers_hold_is_what_was_predicted_and_is_seen(tmp_path: Path, text: str) -> None:
    optimizer = syncline.optimizer("adamw", lr=0.01)
    result = syncline.train(
        model=net(), data=samples(), batch=12, workers=2, layout=text, optimizer=optimizer, epochs=3, tune="off",
        out=str(tmp_path), quiet=True,
    )  # fmt: skip
    events = list(RunDir(result.run_dir).read_events())
    parts = {e.worker_id: e.part for e in events if isinstance(e, WorkerReady)}

    layout, model = read_layout(text), net()
    facts = model_facts(
        model, torch.optim.AdamW(model.parameters()), (torch.randn(4, 12),), lambda out: out.sum(), [layout], workers=2
    )
    needs = forecast(layout, facts, workers=2, batch=12).needs
    whole = 4 * facts.parameter_bytes
    assert sum(part.state for part in parts.values()) == whole  # AdamW: four numbers for each parameter, each once
    for part in parts.values():
        predicted = needs[min(part.stage, len(needs) - 1)]
        assert part.whole == whole
        assert part.parameters == pytest.approx(predicted.parameters, rel=0.1)
        assert part.state <= predicted.state
        if text == "sharded":
            assert predicted.state <= whole / 2 + facts.largest_layer + 0.1 * whole + 2 * 2**20
    progress = [e for e in events if isinstance(e, Progress)]
    assert all(any(e.bytes_inside > 0 for e in progress if e.worker_id == worker_id) for worker_id in parts)
    assert all(e.bytes_inside == e.bytes_sent for e in progress), "there is one replica"
    if layout.pipeline is not None:
        assert any(e.phases.get(WAITING, 0.0) > 0 for e in progress)
        assert [parts[n].layers for n in (0, 1)] == ["0 to 3", "4 to 8"]

    page = as_html([record_of("run", events)])
    assert '<section id="layout">' in page
    kind = "stage" if layout.pipeline is not None else "shard"
    assert all(f"replica 0, {kind} {getattr(part, kind)}" in page for part in parts.values())


def test_a_run_without_a_layout_has_no_such_section() -> None:
    assert 'id="layout"' not in as_html([record_of("run", [])])
