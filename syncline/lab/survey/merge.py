"""`syncline survey merge`: one file from those of several machines. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from syncline.errors import ConfigError
from syncline.lab.survey.survey_file import SurveyFile

_V = TypeVar("_V")


def merge(surveys: Sequence[SurveyFile]) -> SurveyFile:
    """All cells of all files. The order of the files does not matter.

    `ConfigError` if two of them have different facts under one name: another adapter, another text of an entry, two
    values of one cell.
    """
    cells = _joined("cell", [{" / ".join(c.place): c for c in s.cells} for s in surveys])
    return SurveyFile(
        machines=_joined("machine", [s.machines for s in surveys]),
        sessions=_joined("session of machine", [s.sessions for s in surveys]),
        adapters=_joined("adapter", [s.adapters for s in surveys]),
        entries=_joined("entry", [s.entries for s in surveys]),
        cells=tuple(cells.values()),
    ).sealed()


def _joined(kind: str, parts: Sequence[dict[str, _V]]) -> dict[str, _V]:
    found: dict[str, _V] = {}
    for part in parts:
        for name, value in part.items():
            if found.setdefault(name, value) != value:
                raise ConfigError(
                    f"The files disagree about the {kind} {name}. Measure all of them with the same version of "
                    "Syncline, and leave out one of two files of the same machine.",
                    code="surveys-disagree",
                    kind=kind,
                    name=name,
                )
    return dict(sorted(found.items()))
