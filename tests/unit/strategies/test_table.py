"""The table of methods: every method declares everything, and one more is one file and one line."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from pathlib import Path

import pytest

from syncline.errors import ConfigError
from syncline.strategies import table
from syncline.strategies.explain import expected_bytes_per_step, explain
from syncline.strategies.reading import read_strategy
from syncline.testing.strategy_contract import check_strategy

TOY = '''
    """Gradients, every step, added up by rank 0 alone, which broadcasts the sum: a star."""

    from __future__ import annotations

    from dataclasses import dataclass

    from syncline.strategies.exchange import LocalExchange, Replica
    from syncline.strategies.how import Exact
    from syncline.strategies.lazy import torch
    from syncline.strategies.method import AnswersMethod
    from syncline.strategies.what import Gradients
    from syncline.strategies.when import Every
    from syncline.strategies.whom import Neighbors


    @dataclass(frozen=True)
    class Star(AnswersMethod):
        """gradients | every(1) | neighbors | exact, which no built-in method serves."""

        what: Gradients
        when: Every
        whom: Neighbors
        how: Exact

        title = "A star"
        is_lock_step = True
        recovery = "equal"

        def bytes_per_step(self, model, workers, optimizer_slots=0):
            return float(model.exact_bytes)

        def explain(self, model, workers):
            return [f"Rank 0 sums the gradients of {workers} workers."]

        def exchange(self, replica: Replica) -> StarExchange:
            return StarExchange(replica, self)


    class StarExchange(LocalExchange):
        def before_update(self, weight):
            for flat in self.replica.gradients.flats:
                parts = self.replica.collective.all_gather((flat * weight).numpy().tobytes())
                flat.copy_(sum(torch.frombuffer(bytearray(part), dtype=flat.dtype) for part in parts))
            return True
'''


@pytest.fixture
def star(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file, and one line of the table."""
    path = tmp_path / "star.py"
    path.write_text(textwrap.dedent(TOY))
    spec = importlib.util.spec_from_file_location("star", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "star", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(table, "METHODS", (*table.METHODS, module.Star))


def test_a_new_method_is_one_file_and_one_line(star):
    strategy = read_strategy("gradients | every(1) | neighbors")
    assert explain(strategy, 3, 10)[0] == "Rank 0 sums the gradients of 3 workers."
    assert expected_bytes_per_step(strategy, 10, workers=3) == 40
    assert strategy.method.is_lock_step
    check_strategy(strategy)


def test_a_new_method_is_suggested_where_it_is_nearest(star):
    with pytest.raises(ConfigError) as caught:
        read_strategy("gradients | every(1) | neighbors | int8")
    assert caught.value.facts["instead"] == "gradients | every(1) | neighbors"


def test_without_it_the_same_answers_are_refused():
    with pytest.raises(ConfigError) as caught:
        read_strategy("gradients | every(1) | neighbors")
    assert caught.value.code == "invalid-combination"


@pytest.mark.parametrize("method", table.METHODS, ids=lambda method: method.__name__)
def test_every_method_declares_why_it_refuses_an_answer(method):
    refusing = [q for q, kinds in method.serves().items() if len(kinds) < (6 if q == "how" else 3)]
    assert set(refusing) <= {*method.because}
    assert method.title != table.AnswersMethod.title


def test_the_table_lists_every_file_of_methods():
    folder = Path(table.__file__).with_name("methods")
    composed = {"__init__", "hierarchical", "switching"}  # methods made of methods, which have no answers of their own
    listed = {method.__module__.rpartition(".")[2] for method in table.METHODS}
    assert listed == {path.stem for path in folder.glob("*.py")} - composed


def test_the_table_in_the_docs_is_what_the_methods_declare():
    folder = Path(__file__).parents[3] / "docs"
    spec = importlib.util.spec_from_file_location("make_methods_table", folder / "make_methods_table.py")
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    text = (folder / "strategies.md").read_text()
    assert maker.page(text) == text, "run: python docs/make_methods_table.py"
    assert text.count("\n| `") >= len(table.METHODS)
