"""`syncline survey verify`: what is wrong with a survey file.

Here: `problems_of`, pure: checksums, medians computed again from their rounds, cells that are missing, twice or
foreign, and whether entries and adapters are those of this checkout. Not here: reading the file (`survey_file.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from syncline.lab.survey.catalog import Entry
from syncline.lab.survey.survey_file import Cell, SurveyFile, digest_of_entry
from syncline.lab.survey.values import Absent, Check, Figure, Quoted


class Problem(NamedTuple):
    """One finding: a stable code, and a sentence."""

    code: str
    words: str


def problems_of(survey: SurveyFile, catalog: Sequence[Entry], adapters: Mapping[str, str]) -> list[Problem]:
    """All findings. `adapters` has the digest of each adapter of this checkout; one that is not there is a finding."""
    known = {entry.id: entry for entry in catalog}
    found = [] if survey.is_intact else [Problem("file-checksum", "The checksum of the file does not fit its content.")]
    found += _of_machines(survey)
    found += _of_adapters(survey, adapters)
    found += _of_entries(survey, known)
    found += _of_places(survey, known)
    for cell in survey.cells:
        found += _of_cell(cell, survey, known.get(cell.entry))
    return found


def _of_machines(survey: SurveyFile) -> Iterator[Problem]:
    for name, machine in survey.machines.items():
        if machine.id != name:
            yield Problem("machine", f"The description of machine {name} was changed: its id would be {machine.id}.")
        if name not in survey.sessions:
            yield Problem("machine", f"Machine {name} does not say when it measured.")


def _of_adapters(survey: SurveyFile, here: Mapping[str, str]) -> Iterator[Problem]:
    for key, adapter in survey.adapters.items():
        if key not in here:
            yield Problem("adapter", f"There is no adapter {key} here. Add it with: syncline survey add FOLDER")
        elif here[key] != adapter.digest:
            yield Problem("adapter", f"The adapter {key} was changed since it measured.")


def _of_entries(survey: SurveyFile, known: Mapping[str, Entry]) -> Iterator[Problem]:
    for name, digest in survey.entries.items():
        if name not in known:
            yield Problem("entry", f"The catalog has no entry {name}.")
        elif digest != digest_of_entry(known[name]):
            yield Problem("entry", f"The entry {name} was asked differently: its text in the catalog has changed.")


def _of_places(survey: SurveyFile, known: Mapping[str, Entry]) -> Iterator[Problem]:
    """Every row that has begun has all its columns, once."""
    counts = Counter(cell.place for cell in survey.cells)
    for place, count in counts.items():
        if count > 1:
            yield Problem("twice", f"{_where(place)} is there {count} times.")
    for machine, entry, framework in dict.fromkeys(place[:3] for place in counts):
        for column in known[entry].columns if entry in known else ():
            place = (machine, entry, framework, column.key)
            if place not in counts:
                yield Problem("missing", f"{_where(place)} is missing.")
    for entry in survey.entries:
        if not any(cell.entry == entry for cell in survey.cells):
            yield Problem("missing", f"The file says that {entry} was asked, but has none of its cells.")


def _of_cell(cell: Cell, survey: SurveyFile, entry: Entry | None) -> Iterator[Problem]:
    where = _where(cell.place)
    if not cell.is_intact:
        yield Problem("cell-checksum", f"{where} was changed: its checksum does not fit.")
    if cell.machine not in survey.machines:
        yield Problem("machine", f"{where} was measured on machine {cell.machine}, which the file does not describe.")
    adapter = survey.adapters.get(cell.framework)
    if adapter is None or adapter.digest != cell.adapter:
        yield Problem("adapter", f"{where} was measured by another adapter than the file describes.")
    if cell.entry not in survey.entries or (entry is not None and entry.column(cell.column) is None):
        yield Problem("entry", f"{where} is not in the catalog.")
    session = survey.sessions.get(cell.machine)
    wanted = entry.wanted_rounds(is_quick=session.is_quick) if entry is not None and session is not None else None
    yield from _of_value(cell, where, wanted)


def _of_value(cell: Cell, where: str, wanted: int | None) -> Iterator[Problem]:
    match cell.value:
        case Figure() as figure:
            yield from _of_figure(figure, where, wanted)
            if not cell.version:
                yield Problem("version", f"{where} has a figure, but no version of the framework.")
        case Check(seen=seen) if not seen.strip():
            yield Problem("evidence", f"{where} does not say what was seen.")
        case Quoted(source=source, date=date) if not (source.strip() and date.strip()):
            yield Problem("evidence", f"{where} is quoted without its source or date.")
        case Absent(why=why) if not why.strip():
            yield Problem("evidence", f"{where} is empty without a reason.")


def _of_figure(figure: Figure, where: str, wanted: int | None) -> Iterator[Problem]:
    numbers = [*figure.rounds, figure.median, figure.low, figure.high]
    if not figure.rounds or not all(math.isfinite(n) and n >= 0 for n in numbers):
        yield Problem("impossible", f"{where} has no rounds, or numbers that cannot be measured: {numbers}.")
        return
    if figure != Figure.of(figure.rounds):
        again = Figure.of(figure.rounds)
        yield Problem(
            "summary",
            f"{where}: the rounds give a median of {again.median:g} ({again.low:g} to {again.high:g}), but the file "
            f"says {figure.median:g} ({figure.low:g} to {figure.high:g}).",
        )
    if wanted is not None and len(figure.rounds) > wanted:
        yield Problem("rounds", f"{where} has {len(figure.rounds)} rounds, but {wanted} were to be measured.")


def _where(place: tuple[str, str, str, str]) -> str:
    machine, entry, framework, column = place
    return f"{entry}, {framework}, {column} (machine {machine})"
