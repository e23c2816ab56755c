"""The README's charts are drawn from the committed measurements, and from the report that `syncline bench` writes."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import make_charts  # noqa: E402  # a script, not a package

COMMITTED = json.loads(make_charts.MEASUREMENTS.read_text())


@pytest.mark.parametrize("name", ["speed.svg", "recovery.svg"])
def test_the_committed_chart_is_drawn_from_the_committed_measurements(name):
    assert (make_charts.FOLDER / name).read_text() == make_charts.draw(COMMITTED)[name]


@pytest.mark.parametrize("name", ["speed.svg", "recovery.svg"])
def test_a_chart_shows_its_figures_the_command_and_the_machine(name):
    drawn = ElementTree.fromstring(make_charts.draw(COMMITTED)[name])
    texts = [text.text or "" for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    figures = COMMITTED[name.removesuffix(".svg")]
    assert {figure["label"] for figure in figures} <= set(texts)
    assert COMMITTED["commands"][name.removesuffix(".svg")] in texts
    assert any(COMMITTED["machine"]["processor"] in text for text in texts)


def test_figures_come_from_the_suites_of_a_bench_report():
    spread = {"median": 2.0, "low": 1.5, "high": 2.5, "least": 1, "most": 3, "count": 5}
    contenders = [{"name": n, "ratio": spread, "spread": spread} for n in ("plain DDP", "syncline")]
    speed = {"suites": [{"name": "training-lenet-defaults", "baseline": "plain DDP", "contenders": contenders}]}
    (figure,) = make_charts.speed_figures(speed)
    assert (figure["label"], figure["baseline"], figure["median"], figure["rounds"]) == (
        "LeNet, defaults", "plain DDP", 2.0, 5,
    )  # fmt: skip
    contenders = [{"name": n, "spread": spread} for n in ("torchrun, DDP", "syncline")]
    found = make_charts.recovery_figures({"suites": [{"name": "recovery", "contenders": contenders}]})
    assert [f["label"] for f in found] == ["Syncline", "torchrun with DDP"]
