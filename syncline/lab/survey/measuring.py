"""Measures the survey: round by round, all frameworks in turn, and every result is written at once.

Here: what is left to measure, given the file so far, and adding results to it. A survey that was interrupted continues
where it stopped: what is complete in the file is not measured again, unless its adapter or its question has changed.
Not here: the probes (`probes/`), progress and pages (`command.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from syncline.errors import ConfigError
from syncline.lab.bench.peer_recipes import PeerFramework
from syncline.lab.machine import BenchMachine
from syncline.lab.output import error_text
from syncline.lab.survey.catalog import Entry
from syncline.lab.survey.frameworks import facts_of
from syncline.lab.survey.probes.probe import Bench, Probe, Round
from syncline.lab.survey.survey_file import Adapter, Cell, Machine, Session, SurveyFile, digest_of_entry
from syncline.lab.survey.values import Absent, Check, Figure, Quoted, Value

_ERROR_LENGTH = 400


class Task(NamedTuple):
    """One round of one framework."""

    entry: Entry
    framework: str
    round: int
    """From 1."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How and where the survey is measured."""

    entries: Sequence[Entry]
    frameworks: Sequence[PeerFramework]
    probes: Mapping[str, Probe]
    environments: Path
    scratch: Path
    is_quick: bool


def begin(previous: SurveyFile | None, setting: Setting, machine: BenchMachine) -> SurveyFile:
    """The file to go on with: what still holds of `previous`, with this machine, these adapters and entries."""
    facts = {k: v for k, v in machine.to_dict().items() if k in Machine.__struct_fields__}
    here = Machine(**facts)
    session = Session(
        date=time.strftime("%Y-%m-%d", time.gmtime()), is_quick=setting.is_quick, load_at_start=machine.load_at_start
    )
    adapters = {peer.key: facts_of(peer) for peer in setting.frameworks}
    entries = {entry.id: digest_of_entry(entry) for entry in setting.entries}
    if previous is None:
        return SurveyFile(
            machines={here.id: here}, sessions={here.id: session}, adapters=adapters, entries={}, cells=()
        )
    _check_same(previous, here, session)
    cells = tuple(c for c in previous.cells if _still_holds(c, previous, adapters, entries))
    kept = {cell.entry for cell in cells}
    return msgspec.structs.replace(
        previous,
        adapters={**previous.adapters, **adapters},
        entries={name: entries.get(name, digest) for name, digest in previous.entries.items() if name in kept},
        cells=cells,
    )


def tasks_left(survey: SurveyFile, setting: Setting) -> Iterator[Task]:
    """Entry by entry, round by round, each framework in turn."""
    (machine,) = survey.machines
    done = {
        (entry.id, peer.key): rounds_done(survey, machine, entry, peer.key)
        for entry in setting.entries
        for peer in setting.frameworks
    }
    for entry in setting.entries:
        for number in range(1, entry.wanted_rounds(is_quick=setting.is_quick) + 1):
            for peer in setting.frameworks:
                if done[entry.id, peer.key] < number:
                    yield Task(entry, peer.key, number)


def rounds_done(survey: SurveyFile, machine: str, entry: Entry, framework: str) -> int:
    """How many rounds the row has. Reasons and checks alone count as one; a row without any value as none."""
    values = [c.value for c in survey.cells if c.place[:3] == (machine, entry.id, framework)]
    figures = [len(value.rounds) for value in values if isinstance(value, Figure)]
    if figures:
        return min(figures)
    return int(any(isinstance(value, Check | Quoted) for value in values))


def measure_one(task: Task, setting: Setting) -> Round:
    """One round; an error becomes the reason of every column."""
    peer = next(p for p in setting.frameworks if p.key == task.framework)
    columns = [column.key for column in task.entry.columns]
    python = peer.interpreter(setting.environments)
    if python is None:
        why = f"{peer.name} is not installed: syncline bench peers --install {peer.key}"
        return Round(values=dict.fromkeys(columns, Absent(why)), version="")
    bench = Bench(
        entry=task.entry, peer=peer, python=python, environments=setting.environments, is_quick=setting.is_quick,
        scratch=setting.scratch,
    )  # fmt: skip
    try:
        found = setting.probes[task.entry.probe](bench)
    except Exception as error:  # one framework that fails must not end the others
        why = error_text(error)
        short = why if len(why) <= _ERROR_LENGTH else f"{why[: _ERROR_LENGTH // 2]} ... {why[-_ERROR_LENGTH // 2 :]}"
        return Round(values=dict.fromkeys(columns, Absent(f"it failed: {short}")), version="")
    assert set(found.values) == set(columns), f"probe {task.entry.probe} gave {sorted(found.values)}"
    return found


def with_round(survey: SurveyFile, task: Task, found: Round) -> SurveyFile:
    """The file with one more round of one row."""
    (machine,) = survey.machines
    adapter = survey.adapters[task.framework].digest
    cells = {cell.place: cell for cell in survey.cells}
    for column, value in found.values.items():
        place = (machine, task.entry.id, task.framework, column)
        before = cells.get(place)
        joined = join(before.value if before else None, value)
        version = found.version or (before.version if before else "")
        cells[place] = Cell(
            entry=task.entry.id, framework=task.framework, column=column, machine=machine, value=joined,
            version=version, adapter=adapter,
        ).sealed()  # fmt: skip
    entries = {**survey.entries, task.entry.id: digest_of_entry(task.entry)}
    return msgspec.structs.replace(survey, cells=tuple(cells.values()), entries=entries)


def join(before: Value | None, now: float | Check | Absent) -> Value:
    """A cell's value with one more round. A failed check stays failed, and a figure outlives a failed round."""
    match before, now:
        case Figure() as figure, float() as value:
            return figure.with_round(value)
        case _, float() as value:
            return Figure.of([value])
        case (Figure() as kept, Absent()) | (Check(holds=False) as kept, _):
            return kept
        case Check(seen=seen), Absent(why=why):
            return Check(holds=False, seen=f"{seen}; in another round: {why}")
        case _:
            assert not isinstance(now, float)
            return now


def run(survey: SurveyFile, setting: Setting, on_round: Callable[[SurveyFile, Task, Round], None]) -> SurveyFile:
    """Measure all that is left. A framework that gave no value in a round is left alone for the rest of its entry."""
    given_up: set[tuple[str, str]] = set()
    for task in list(tasks_left(survey, setting)):
        if (task.entry.id, task.framework) in given_up:
            continue
        found = measure_one(task, setting)
        if all(isinstance(value, Absent) for value in found.values.values()):
            given_up.add((task.entry.id, task.framework))
        survey = with_round(survey, task, found)
        on_round(survey, task, found)
    return survey


def _check_same(previous: SurveyFile, here: Machine, session: Session) -> None:
    if set(previous.machines) != {here.id}:
        raise ConfigError(
            "The survey in this folder was measured on another machine, by several, or with other versions of Python, "
            "torch or Syncline. Choose another folder with --out, and join the files with 'syncline survey merge'.",
            code="another-machine",
        )
    was_quick = previous.sessions[here.id].is_quick
    if was_quick != session.is_quick:
        raise ConfigError(
            f"The survey in this folder is {'quick' if was_quick else 'full'}, this one is not. "
            f"{'Add' if was_quick else 'Leave out'} --quick, or choose another folder with --out.",
            code="another-survey",
        )


def _still_holds(cell: Cell, previous: SurveyFile, adapters: Mapping[str, Adapter], entries: Mapping[str, str]) -> bool:
    """Whether its adapter and its question are still the same, and it has a value that is worth keeping."""
    adapter = adapters.get(cell.framework)
    if adapter is not None and adapter.digest != cell.adapter:
        return False
    return cell.entry not in entries or entries[cell.entry] == previous.entries.get(cell.entry)
