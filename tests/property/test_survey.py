"""The pure parts of the survey: files, verification, merging, rankings, and continuing after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from survey_files import ENTRIES, a_survey, adapter, adapters_here, machine, survey_of

from syncline.errors import ConfigError
from syncline.lab.bench.peer_recipes import PeerFramework
from syncline.lab.machine import BenchMachine
from syncline.lab.survey import measuring
from syncline.lab.survey.catalog import CATALOG
from syncline.lab.survey.measuring import Setting, begin, run, tasks_left
from syncline.lab.survey.merge import merge
from syncline.lab.survey.probes.probe import Bench, Round
from syncline.lab.survey.ranking import MARGIN, better_than, standing
from syncline.lab.survey.survey_file import as_json, parse
from syncline.lab.survey.values import Absent, Check, Figure, Quoted
from syncline.lab.survey.verify import problems_of

NUMBERS = st.floats(0, 1e12, allow_nan=False)
WORDS = st.text(min_size=1).filter(str.strip)
FIGURES = st.lists(NUMBERS, min_size=1, max_size=3).map(Figure.of)
VALUES = st.one_of(
    FIGURES,
    st.builds(Check, holds=st.booleans(), seen=WORDS),
    st.builds(Quoted, words=WORDS, source=WORDS, date=WORDS),
    st.builds(Absent, why=WORDS),
)


@st.composite
def surveys(draw: st.DrawFn, cores: int | None = None):
    entries = draw(st.lists(st.sampled_from(["figure-2", "figure-4"]), unique=True, min_size=1))
    keys = draw(st.lists(st.sampled_from(["ddp", "jax", "syncline-train"]), unique=True, min_size=1))
    rows = {(e, k): [draw(VALUES) for _ in ENTRIES[e].columns] for e in entries for k in keys}
    return survey_of(rows, on=machine(draw(st.integers(1, 64)) if cores is None else cores))


@given(surveys())
def test_an_honest_file_is_read_as_it_was_written_and_has_no_problem(survey):
    assert parse(as_json(survey), "it") == survey
    assert problems_of(survey, CATALOG, adapters_here("ddp", "jax", "syncline-train")) == []


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in leaves(inner, (*path, key))]
    if isinstance(value, list):
        return [leaf for place, inner in enumerate(value) for leaf in leaves(inner, (*path, place))]
    return [path]


def changed(leaf: Any) -> Any:
    return not leaf if isinstance(leaf, bool) else leaf + 1 if isinstance(leaf, int | float) else f"{leaf}x"


@given(st.data())
def test_any_single_change_of_a_value_is_found(data):
    content = json.loads(as_json(a_survey()))
    *path, last = data.draw(st.sampled_from(leaves(content)))
    inner = content
    for step in path:
        inner = inner[step]
    inner[last] = changed(inner[last])
    try:
        survey = parse(json.dumps(content).encode(), "it")
    except ConfigError:
        return
    assert problems_of(survey, CATALOG, adapters_here()) != []


@given(st.lists(st.integers(1, 10_000), unique=True, min_size=2, max_size=4).flatmap(
    lambda cores: st.tuples(*(surveys(cores=n) for n in cores))
))  # fmt: skip
def test_merging_keeps_every_cell_in_whatever_order_and_twice_changes_nothing(parts):
    joined = merge(parts)
    assert {c for p in parts for c in p.cells} == set(joined.cells)
    assert len(joined.cells) == sum(len(p.cells) for p in parts)
    assert joined == merge(parts[::-1]) == merge([joined, parts[0]]) == merge([merge(parts[:-1]), parts[-1]])
    assert problems_of(joined, CATALOG, adapters_here("ddp", "jax", "syncline-train")) == []


def test_files_that_disagree_are_not_merged():
    one = a_survey()
    cell = one.cells[0]
    other = msgspec.structs.replace(one, cells=(msgspec.structs.replace(cell, value=Figure.of([77.0])).sealed(),))
    with pytest.raises(ConfigError) as error:
        merge([one, other.sealed()])
    assert error.value.code == "surveys-disagree"
    assert "table-1 / ddp / activations" in error.value.facts["name"]


@given(FIGURES, FIGURES, st.sampled_from(["more", "less"]))
def test_two_frameworks_are_never_both_better_than_each_other(one, other, better):
    assert not (better_than(one, other, better) and better_than(other, one, better))
    opposite = "less" if better == "more" else "more"
    assert not (better_than(one, other, better) and better_than(one, other, opposite))


@given(FIGURES, FIGURES, st.sampled_from(["more", "less"]))
def test_a_difference_is_shown_only_if_all_rounds_agree_and_it_is_large(one, other, better):
    if better_than(one, other, better):
        good, bad = (one, other) if better == "more" else (other, one)
        assert min(good.rounds) > max(bad.rounds)
        assert good.median >= MARGIN * bad.median * (1 - 1e-9)
        assert min(len(one.rounds), len(other.rounds)) >= 2


@given(st.dictionaries(st.sampled_from("abcde"), FIGURES, min_size=2), st.sampled_from(["more", "less"]))
def test_machines_that_disagree_show_no_difference(figures, better):
    names = sorted(figures)
    reversed_figures = dict(zip(names, [figures[n] for n in names[::-1]], strict=True))
    found = standing([figures, reversed_figures], better)
    assert found is not None
    for name in found.shown:
        for seen in (figures, reversed_figures):
            assert better_than(seen[found.best], seen[name], better)
    assert {found.best, *found.shown, *found.not_shown} == set(figures)


NOWHERE = Path("/nowhere")
KEYS = ("one", "two", "three")
PEERS = [PeerFramework(key=key, folder=NOWHERE / key, name=key, what="It.", start=()) for key in KEYS]


def facts(peer: PeerFramework):
    return adapter(peer.key)


class Probe:
    """Gives the same figures in every round, and is interrupted at one call."""

    def __init__(self, interrupted_at: int = -1) -> None:
        self.calls: list[tuple[str, str]] = []
        self._interrupted_at = interrupted_at

    def __call__(self, bench: Bench) -> Round:
        if len(self.calls) == self._interrupted_at:
            raise KeyboardInterrupt
        self.calls.append((bench.entry.id, bench.peer.key))
        return Round(values={c.key: float(len(bench.peer.key)) for c in bench.entry.columns}, version="1")


def setting(probe: Probe) -> Setting:
    entries = [ENTRIES["figure-2"], ENTRIES["figure-4"]]
    probes = dict.fromkeys(("memory", "speed"), probe)
    return Setting(
        entries=entries, frameworks=PEERS, probes=probes, environments=NOWHERE, scratch=NOWHERE, is_quick=False
    )


@given(st.integers(0, 30))
def test_an_interrupted_survey_continues_with_exactly_what_is_left(interrupted_at):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "facts_of", facts)
        here = BenchMachine.here()
        whole = Probe()
        expected = run(begin(None, setting(whole), here), setting(whole), lambda *_: None)
        first, second = Probe(interrupted_at), Probe()
        kept = begin(None, setting(first), here)

        def keep(survey, task, found):
            nonlocal kept
            kept = survey

        try:
            run(kept, setting(first), keep)
        except KeyboardInterrupt:
            again = begin(parse(as_json(kept), "it"), setting(second), here)
            kept = run(again, setting(second), lambda *_: None)
        assert first.calls + second.calls == whole.calls
        assert kept.cells == expected.cells
        assert list(tasks_left(kept, setting(second))) == []


def test_frameworks_take_turns():
    probe = Probe()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "facts_of", facts)
        run(begin(None, setting(probe), BenchMachine.here()), setting(probe), lambda *_: None)
    assert probe.calls[:6] == [("figure-2", key) for key in KEYS] * 2
