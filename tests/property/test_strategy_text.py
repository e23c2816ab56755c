"""Strategies as text: what is printed is read back, and nonsense gets an answer."""

from __future__ import annotations

import subprocess
import sys

import pytest
from generators import all_strategies
from hypothesis import given

from syncline.compute.outer import nesterov
from syncline.errors import ConfigError
from syncline.strategies.how import BF16, TopK
from syncline.strategies.presets import PRESETS
from syncline.strategies.reading import read_strategy
from syncline.strategies.strategy import Strategy
from syncline.strategies.what import Updates
from syncline.strategies.when import Every


@given(all_strategies)
def test_what_is_printed_is_read_back(strategy):
    assert read_strategy(str(strategy)) == strategy


@given(all_strategies)
def test_what_is_read_back_prints_the_same(strategy):
    assert str(read_strategy(str(strategy))) == str(strategy)


@pytest.mark.parametrize("name", [p.name for p in PRESETS.values()])
def test_every_preset_is_read_by_its_name_and_prints_as_its_answers(name):
    strategy = read_strategy(name)
    assert read_strategy(str(strategy)) == strategy
    assert PRESETS[name.replace("-", "_")].paper


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("sparknet(20)", Strategy(what=Updates(), when=Every(20))),
        ("allreduce + topk(0.01)", Strategy(how=TopK(0.01))),
        ("diloco(steps=7) + exact", Strategy(what=Updates(outer=nesterov(0.7, 0.7)), when=Every(7))),
        ("updates | every(10) | bf16", Strategy(what=Updates(), when=Every(10), how=BF16())),
        (
            "Updates(outer=nesterov(0.5, 0.9)) | Every(3)",
            Strategy(what=Updates(outer=nesterov(0.5, 0.9)), when=Every(3)),
        ),
        ("iterative-reduce", Strategy(what=Updates(optimizer_state=True), when=Every(5))),
    ],
)
def test_strategies_are_read_as_people_write_them(text, meant):
    assert read_strategy(text) == meant


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sparknett", "There is no strategy 'sparknett'. Did you mean 'sparknet'?"),
        ("sparknet(tua=3)", "'tua'. Did you mean 'tau'?"),
        ("sparknet(tau=0)", "the number of steps between exchanges must be 1 or more"),
        ("sparknet(3, 4)", "The preset sparknet cannot be used so"),
        ("gradients | every(4)", "Use 'updates | every(4)'"),
        ("updates(optimizer_state=True) | int8", "Use 'updates(optimizer_state=True) | every(1)'"),
        ("allreduce + topk(2)", "the fraction must be more than 0 and at most 1"),
        ("allreduce + every(2)", "After + comes an encoding"),
        ("exact | int8", "The question 'how' is answered twice"),
        ("allreduce +", "Cannot read the strategy"),
        ("updates(outer=nesterof(lr=1))", "There is no outer optimizer 'nesterof'. Did you mean 'nesterov'?"),
        ("diloco(momentum=2)", "momentum"),
        ("__import__('os').system('true')", "Cannot read"),
        ("", "Cannot read the strategy"),
    ],
)
def test_nonsense_is_answered_with_what_would_be_right(text, words):
    with pytest.raises(ConfigError) as caught:
        read_strategy(text)
    assert words in str(caught.value)


def test_a_strategy_is_read_without_torch():
    code = (
        "import sys; from syncline.strategies.reading import read_strategy; read_strategy('diloco + bf16')\n"
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
