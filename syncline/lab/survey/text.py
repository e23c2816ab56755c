"""What the survey says in words: a cell, a ranking, and the whole as Markdown. Pure.

Here: text for all forms. Not here: HTML (`page.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from syncline.lab.survey.catalog import CATALOG, Column, Entry
from syncline.lab.survey.ranking import Standing, standing
from syncline.lab.survey.survey_file import Cell, SurveyFile
from syncline.lab.survey.values import Absent, Check, Figure, Quoted, Value

NOT_MEASURED = Absent("it was not measured in this survey")


class Row(NamedTuple):
    """One framework on one machine."""

    framework: str
    machine: str
    version: str
    cells: dict[str, Value]


def entries_of(survey: SurveyFile) -> list[Entry]:
    """Those of the catalog that the file has, in the catalog's order."""
    return [entry for entry in CATALOG if entry.id in survey.entries]


def rows_of(survey: SurveyFile, entry: Entry) -> list[Row]:
    """In the order in which they were measured."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in survey.cells:
        if cell.entry == entry.id:
            groups.setdefault((cell.framework, cell.machine), []).append(cell)
    return [
        Row(framework, machine, next((c.version for c in cells if c.version), ""), {c.column: c.value for c in cells})
        for (framework, machine), cells in groups.items()
    ]


def name_of(survey: SurveyFile, row: Row) -> str:
    """The framework's name, with its machine if there are several."""
    adapter = survey.adapters.get(row.framework)
    name = adapter.name if adapter else row.framework
    return f"{name} on {row.machine}" if len(survey.machines) > 1 else name


def number(value: float) -> str:
    """With as many digits as a measurement justifies."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def words_of(value: Value) -> str:
    """A cell in short."""
    match value:
        case Figure(rounds=rounds, median=median, low=low, high=high):
            return number(median) if len(set(rounds)) == 1 else f"{number(median)} ({number(low)}–{number(high)})"
        case Check(holds=holds, seen=seen):
            return f"{'yes' if holds else 'no'}: {seen}"
        case Quoted(words=words, source=source, date=date):
            return f"{words} ({source}, {date})"
        case Absent(why=why):
            return f"not measurable here, because {why}"


def printed_in(entry: Entry) -> str:
    """Where the question comes from, and what was printed there."""
    printed = entry.printed.why if isinstance(entry.printed, Absent) else words_of(entry.printed)
    return f"Asked by: {entry.source}. Printed there: {printed}."


def standing_of(survey: SurveyFile, entry: Entry, column: Column) -> Standing | None:
    if column.better is None:
        return None
    by_machine: dict[str, dict[str, Figure]] = {}
    for row in rows_of(survey, entry):
        value = row.cells.get(column.key)
        if isinstance(value, Figure):
            by_machine.setdefault(row.machine, {})[row.framework] = value
    return standing(list(by_machine.values()), column.better)


def ranking_lines(survey: SurveyFile, entry: Entry) -> list[str]:
    """A sentence or two for each column that claims a ranking."""
    lines = []
    for column in entry.columns:
        found = standing_of(survey, entry, column)
        if found is not None:
            lines.append(f"{column.title}: {_sentence(survey, found)}")
    return lines


def _sentence(survey: SurveyFile, found: Standing) -> str:
    names = {key: adapter.name for key, adapter in survey.adapters.items()}
    best = names.get(found.best, found.best)
    if not found.shown:
        return "no difference shown."
    shown = _listed([names.get(key, key) for key in found.shown])
    words = f"{best} is ahead of {shown}."
    if found.not_shown:
        words += f" No difference shown to {_listed([names.get(key, key) for key in found.not_shown])}."
    return words


def machine_lines(survey: SurveyFile) -> list[str]:
    """One sentence or two per machine."""
    lines = []
    for name, machine in survey.machines.items():
        session = survey.sessions.get(name)
        when = f" Measured on {session.date}, {'a quick look' if session.is_quick else 'in full'}" if session else ""
        load = f", with a load of {session.load_at_start:.1f} before it began." if session else ""
        lines.append(
            f"Machine {name}: {machine.processor}, {machine.cores} cores, {machine.memory_bytes / 1e9:.0f} GB, "
            f"{machine.system}; Python {machine.python}, torch {machine.torch}, Syncline {machine.syncline}."
            f"{when}{load}"
        )
    return lines


def as_markdown(survey: SurveyFile) -> str:
    return "\n".join(_markdown(survey)) + "\n"


def _markdown(survey: SurveyFile) -> Iterator[str]:
    yield "# Survey of frameworks"
    for line in machine_lines(survey):
        yield from ("", line)
    for entry in entries_of(survey):
        yield from ("", f"## {entry.title} ({entry.id})", "", entry.question, "", entry.how, "")
        yield printed_in(entry)
        yield ""
        yield _table_line(["", "version", *(_title(column) for column in entry.columns)])
        yield _table_line(["---"] * (2 + len(entry.columns)))
        for row in rows_of(survey, entry):
            cells = [words_of(row.cells.get(column.key, NOT_MEASURED)) for column in entry.columns]
            yield _table_line([name_of(survey, row), row.version, *cells])
        for line in ranking_lines(survey, entry):
            yield from ("", line)


def _title(column: Column) -> str:
    return f"{column.title}, {column.unit}" if column.unit else column.title


def _table_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
