"""The published systems by name."""

from __future__ import annotations

import re

import pytest

from syncline.cli.tables import strategy_table
from syncline.compute.outer import elastic
from syncline.config.spec import Spec
from syncline.strategies.explain import explain
from syncline.strategies.hierarchy import Hierarchy
from syncline.strategies.how import Exact, TopK
from syncline.strategies.presets import PRESETS
from syncline.strategies.reading import read_strategy
from syncline.strategies.strategy import Strategy
from syncline.strategies.what import Gradients, Models, Updates
from syncline.strategies.when import Async, Every, Layerwise, Stale
from syncline.strategies.whom import Memory, Neighbors, Rivals, Server

NAMES = [preset.name for preset in PRESETS.values()]


def test_all_sixteen_are_there():
    assert len(PRESETS) == 16
    assert {
        "allreduce", "server-sync", "server-async", "downpour", "ssp", "sparknet", "iterative-reduce", "hogwild", "h2o",
        "onebit", "bmuf", "easgd", "nexus", "gossip", "ltfb", "diloco",
    } == set(NAMES)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_reads_prints_cites_and_speaks(name):
    preset, strategy = PRESETS[name.replace("-", "_")], read_strategy(name)
    assert strategy == preset.make() == read_strategy(str(strategy)) == read_strategy(name.upper())
    assert preset.after
    assert re.search(r"\b(19|20)\d\d\b", preset.paper), "a citation has a year"
    assert all(line.strip() for line in explain(strategy, 4, [(120, 400), (120,)]))


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("server-sync(shards=2)", Strategy(whom=Server(2))),
        ("server-async", Strategy(when=Async(), whom=Server())),
        (
            "downpour(push=4, fetch=8, lr=0.1)",
            Strategy(when=Async(4, 8), whom=Server(1, Spec("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.01}))),
        ),
        ("ssp", Strategy(when=Stale(3), whom=Server())),
        ("hogwild", Strategy(when=Async(), whom=Memory())),
        ("h2o", Hierarchy(Strategy(when=Async(), whom=Memory()), Strategy(what=Updates(), when=Every(5)), 2)),
        ("easgd", Strategy(what=Updates(elastic(0.9 / 4)), when=Every(10), whom=Server())),
        ("nexus", Strategy(when=Layerwise(largest=2), whom=Server(), how=Exact())),
        ("nexus(fraction=0.1)", Strategy(when=Layerwise(largest=2), whom=Server(), how=TopK(0.1))),
        ("gossip", Strategy(what=Updates(), whom=Neighbors())),
        ("gossip(asynchronous=True)", Strategy(what=Updates(), when=Async(), whom=Neighbors())),
        ("ltfb(perturb=1.2)", Strategy(what=Models(perturb=1.2), when=Every(100), whom=Rivals())),
        ("allreduce", Strategy(what=Gradients())),
    ],
)
def test_presets_are_the_points_that_the_table_says(text, meant):
    assert read_strategy(text) == meant


@pytest.mark.parametrize("width", [20, 80, 95, 120, 300])
def test_the_table_lists_all_of_them_within_the_terminal(width):
    table = strategy_table(width)
    lines = table.splitlines()
    assert max(map(len, lines)) <= min(max(width, 80), 120)
    answers, papers = table.split("Systems and papers")
    for name in NAMES:
        assert re.search(rf"^{name}\b", answers, re.MULTILINE)
        assert re.search(rf"^{name}\b", papers, re.MULTILINE)
    assert re.search(r"inside a host +gradients +async +memory +exact", answers)
    assert re.search(r"across hosts +updates +every\(5\) +everyone +exact", answers)
