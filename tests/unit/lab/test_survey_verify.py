"""Ten kinds of tampering with a survey, each found; half of them by someone who computes all checksums again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from survey_files import a_survey, adapters_here

from syncline.lab.survey.catalog import CATALOG
from syncline.lab.survey.survey_file import Cell, Machine, SurveyFile
from syncline.lab.survey.values import Absent, Check, Figure
from syncline.lab.survey.verify import problems_of

replace = msgspec.structs.replace


def codes(survey: SurveyFile) -> set[str]:
    return {problem.code for problem in problems_of(survey, CATALOG, adapters_here())}


def with_cell(number: int, change: Callable[[Cell], Cell], *, seals: bool) -> SurveyFile:
    """One cell is changed; a careful tamperer `seals` the cell and the file again."""
    survey = a_survey()
    cells = list(survey.cells)
    cells[number] = change(cells[number]).sealed() if seals else change(cells[number])
    survey = replace(survey, cells=tuple(cells))
    return survey.sealed() if seals else survey


def with_value(value: Any, *, number: int = 7, seals: bool = True) -> SurveyFile:
    return with_cell(number, lambda cell: replace(cell, value=value), seals=seals)


def faster(figure: Figure) -> Figure:
    return Figure(figure.rounds, figure.median * 2, figure.low, figure.high)


def dropped_cell() -> SurveyFile:
    survey = a_survey()
    return replace(survey, cells=survey.cells[:8] + survey.cells[9:]).sealed()


def repeated_cell() -> SurveyFile:
    survey = a_survey()
    return replace(survey, cells=(*survey.cells, survey.cells[8])).sealed()


def better_machine() -> SurveyFile:
    survey = a_survey()
    name, machine = next(iter(survey.machines.items()))
    facts = {**msgspec.structs.asdict(machine), "cores": 64}
    return replace(survey, machines={name: Machine(**facts)}).sealed()


def other_adapter() -> SurveyFile:
    survey = a_survey()
    adapters = {k: replace(a, digest="another") if k == "ddp" else a for k, a in survey.adapters.items()}
    cells = tuple(replace(c, adapter="another").sealed() if c.framework == "ddp" else c for c in survey.cells)
    return replace(survey, adapters=adapters, cells=cells).sealed()


def other_question() -> SurveyFile:
    survey = a_survey()
    return replace(survey, entries={**survey.entries, "figure-4": "another"}).sealed()


def hidden_entry() -> SurveyFile:
    survey = a_survey()
    return replace(survey, cells=tuple(c for c in survey.cells if c.entry != "kill-test")).sealed()


SPOILED: dict[str, tuple[Callable[[], SurveyFile], str]] = {
    "an edited round": (lambda: with_value(Figure.of([900.0] * 3), seals=False), "cell-checksum"),
    "an edited median": (lambda: with_cell(7, lambda c: replace(c, value=faster(c.value)), seals=True), "summary"),
    "a wrong checksum of the file": (lambda: replace(a_survey(), checksum="0" * 64), "file-checksum"),
    "a removed cell": (dropped_cell, "missing"),
    "an entry that was asked and is not there": (hidden_entry, "missing"),
    "a cell twice": (repeated_cell, "twice"),
    "another machine": (better_machine, "machine"),
    "a changed adapter": (other_adapter, "adapter"),
    "a changed question": (other_question, "entry"),
    "a column that is not in the catalog": (
        lambda: with_cell(7, lambda c: replace(c, column="batch-1024"), seals=True),
        "entry",
    ),
    "an impossible number": (lambda: with_value(Figure((-1.0,), -1.0, -1.0, -1.0)), "impossible"),
    "more rounds than were to be measured": (lambda: with_value(Figure.of([1.0] * 9)), "rounds"),
    "a gap without a reason": (lambda: with_value(Absent(" ")), "evidence"),
    "a check without what was seen": (lambda: with_value(Check(holds=True, seen=""), number=13), "evidence"),
    "a figure of no version": (lambda: with_cell(7, lambda c: replace(c, version=""), seals=True), "version"),
    "a cell of a machine that is not described": (
        lambda: with_cell(7, lambda c: replace(c, machine="elsewhere"), seals=True),
        "machine",
    ),
}


def test_an_honest_file_is_accepted():
    assert codes(a_survey()) == set()


@pytest.mark.parametrize("kind", SPOILED)
def test_tampering_is_found(kind):
    spoil, code = SPOILED[kind]
    assert code in codes(spoil())


def test_an_adapter_that_is_not_here_is_reported():
    problems = problems_of(a_survey(), CATALOG, adapters_here("ddp"))
    assert [p.code for p in problems] == ["adapter"]
    assert "syncline survey add" in problems[0].words
