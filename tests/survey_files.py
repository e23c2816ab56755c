"""Surveys for tests: of entries from the catalog, without measuring anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from syncline.lab.survey.catalog import CATALOG, Entry
from syncline.lab.survey.survey_file import Adapter, Cell, Machine, Session, SurveyFile, digest_of_entry
from syncline.lab.survey.values import Absent, Check, Figure, Value

ENTRIES = {entry.id: entry for entry in CATALOG}


def machine(cores: int = 2) -> Machine:
    return Machine(
        processor="A Processor", cores=cores, memory_bytes=16_000_000_000, system="Linux", python="3.11", torch="2.13",
        syncline="0.1",
    )  # fmt: skip


def adapter(key: str) -> Adapter:
    return Adapter(name=f"The {key}", what=f"What {key} is.", digest=f"digest of {key}")


def survey_of(
    values: Mapping[tuple[str, str], Sequence[Value]], *, on: Machine | None = None, is_quick: bool = False
) -> SurveyFile:
    """`values` by entry and framework, in the order of the entry's columns."""
    here = on or machine()
    cells = [
        Cell(
            entry=entry, framework=framework, column=column.key, machine=here.id, value=value, version="1.0",
            adapter=adapter(framework).digest,
        ).sealed()
        for (entry, framework), row in values.items()
        for column, value in zip(ENTRIES[entry].columns, row, strict=True)
    ]  # fmt: skip
    return SurveyFile(
        machines={here.id: here},
        sessions={here.id: Session(date="2026-11-19", is_quick=is_quick, load_at_start=0.5)},
        adapters={framework: adapter(framework) for _, framework in values},
        entries={entry: digest_of_entry(ENTRIES[entry]) for entry, _ in values},
        cells=tuple(cells),
    ).sealed()


def a_survey(*, on: Machine | None = None) -> SurveyFile:
    """Two frameworks, all kinds of values."""
    return survey_of(
        {
            ("table-1", "ddp"): [Figure.of([float(n)]) for n in range(6)] + [Absent("it has none")],
            ("figure-4", "ddp"): [Figure.of([100.0, 110.0, 105.0])] * 3,
            ("figure-4", "syncline-train"): [Figure.of([200.0, 220.0, 210.0])] * 2 + [Absent("it was\ntoo large")],
            ("kill-test", "ddp"): [Check(holds=False, seen="exited with 1"), Figure.of([1.5])],
            ("kill-test", "syncline-train"): [Check(holds=True, seen="exited with 0"), Figure.of([9.5])],
        },
        on=on,
    )


def adapters_here(*keys: str) -> dict[str, str]:
    return {key: adapter(key).digest for key in keys or ("ddp", "syncline-train")}


def columns_of(entry: Entry) -> list[str]:
    return [column.key for column in entry.columns]
