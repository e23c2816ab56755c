"""`syncline survey`, `survey verify` and `survey merge`: files, progress and Ctrl-C.

Here: what the commands do. Not here: what they take (`cli/survey.py`), measuring (`measuring.py`), adding an adapter
(`adding.py`).
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from syncline.errors import ConfigError, Interrupted, SynclineError, plural
from syncline.lab.bench.peer_recipes import environments_folder
from syncline.lab.bench.processes import signal_handler
from syncline.lab.machine import BenchMachine
from syncline.lab.output import Reporter, make_reporter
from syncline.lab.survey import survey_file
from syncline.lab.survey.catalog import CATALOG, entries_named
from syncline.lab.survey.frameworks import facts_of, frameworks, frameworks_named
from syncline.lab.survey.measuring import Setting, Task, begin, run, tasks_left
from syncline.lab.survey.merge import merge
from syncline.lab.survey.page import as_html
from syncline.lab.survey.probes import PROBES
from syncline.lab.survey.probes.probe import Probe, Round
from syncline.lab.survey.survey_file import SurveyFile
from syncline.lab.survey.text import as_markdown, words_of
from syncline.lab.survey.values import Absent, Check, Figure
from syncline.lab.survey.verify import problems_of
from syncline.telemetry.run_dir import RunDir


def survey(
    *,
    only: Iterable[str] = (),
    names: Iterable[str] = (),
    quick: bool = False,
    out: Path | None = None,
    as_json: bool = False,
    peers_dir: Path | None = None,
    probes: Mapping[str, Probe] = PROBES,
) -> SurveyFile:
    """Measure what is left of these entries and frameworks (default: all), and write the page.

    Every round is written at once. Raises `Interrupted` after Ctrl-C; the same command then continues.
    """
    environments = environments_folder(peers_dir)
    entries, rows = entries_named(only), frameworks_named(names, environments)
    folder = out if out is not None else Path("runs", "survey-quick" if quick else "survey")
    path = folder / survey_file.NAME
    _make(folder)
    reporter = make_reporter(as_json=as_json)
    with tempfile.TemporaryDirectory(prefix="syncline-survey-") as scratch:
        setting = Setting(
            entries=entries, frameworks=rows, probes=probes, environments=environments, scratch=Path(scratch),
            is_quick=quick,
        )  # fmt: skip
        found = begin(survey_file.read(path) if path.exists() else None, setting, BenchMachine.here())
        progress = _Progress(reporter, path, sum(1 for _ in tasks_left(found, setting)))
        with signal_handler(signal.SIGTERM, signal.default_int_handler):
            try:
                found = run(found, setting, progress.on_round)
            except KeyboardInterrupt:
                if path.exists():
                    write_all(survey_file.read(path), folder)
                raise Interrupted(f"Stopped. {path} has what was measured; the same command continues.") from None
    write_all(found, folder)
    reporter.report("written", f"Results are in {folder}: survey.html, survey.md and survey.json.", folder=str(folder))
    return found


def write_all(found: SurveyFile, folder: Path) -> None:
    """The page, the Markdown, and the data."""
    survey_file.write(found, folder / survey_file.NAME)
    RunDir.write(folder / "survey.html", as_html(found).encode())
    RunDir.write(folder / "survey.md", as_markdown(found).encode())


def verify(path: Path, *, peers_dir: Path | None = None, as_json: bool = False) -> None:
    """Report every problem of the file; `SynclineError` if there is one."""
    found = survey_file.read(path)
    adapters = {key: facts_of(peer).digest for key, peer in frameworks(environments_folder(peers_dir)).items()}
    problems = problems_of(found, CATALOG, adapters)
    reporter = make_reporter(as_json=as_json)
    for problem in problems:
        reporter.report("problem", problem.words, code=problem.code, words=problem.words)
    if problems:
        raise SynclineError(
            f"{path} has {plural(len(problems), 'problem')}. Do not rely on it; measure it again.",
            code="survey-problems",
            problems=[problem._asdict() for problem in problems],
        )
    text = (
        f"{path}: no problem found in {plural(len(found.cells), 'cell')} of {plural(len(found.machines), 'machine')}."
    )
    reporter.report("verified", text, cells=len(found.cells))


def merge_files(paths: Sequence[Path], out: Path, *, as_json: bool = False) -> SurveyFile:
    """Join the files, and write the page of all of them. A damaged file is refused."""
    found = [survey_file.read(path) for path in paths]
    for path, one in zip(paths, found, strict=True):
        if not (one.is_intact and all(cell.is_intact for cell in one.cells)):
            raise ConfigError(
                f"{path} was changed after it was measured. 'syncline survey verify {path}' says where.",
                code="survey-problems",
            )
    joined = merge(found)
    _make(out)
    write_all(joined, out)
    make_reporter(as_json=as_json).report(
        "merged", f"Joined {plural(len(joined.machines), 'machine')} in {out / 'survey.html'}.", folder=str(out)
    )
    return joined


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"Cannot create the folder {folder}: {error.strerror}. Choose another with --out.", setting="out"
        ) from error


class _Progress:
    """Writes the file after each round, and reports it."""

    def __init__(self, reporter: Reporter, path: Path, total: int) -> None:
        self._reporter, self._path, self._total = reporter, path, total
        self._done = 0
        if total == 0:
            reporter.report("message", "Everything is measured already. To measure again, choose another --out.")

    def on_round(self, found: SurveyFile, task: Task, values: Round) -> None:
        self._done += 1
        survey_file.write(found, self._path)
        said = {key: value if isinstance(value, float) else words_of(value) for key, value in values.values.items()}
        self._reporter.report(
            "measured",
            f"{self._done} of {self._total}: {task.entry.id}, {task.framework}, round {task.round}: {_short(values)}",
            entry=task.entry.id, framework=task.framework, round=task.round, values=said,
        )  # fmt: skip


def _short(found: Round) -> str:
    """The values of a round on one line; a reason that all columns share once."""
    words = [
        f"{key} {words_of(Figure.of([value]) if isinstance(value, float) else value)}"
        for key, value in found.values.items()
        if not isinstance(value, Absent)
    ]
    reasons = {value.why for value in found.values.values() if isinstance(value, Absent)}
    if not words:
        return "; ".join(sorted(reason.splitlines()[0] for reason in reasons))
    assert all(isinstance(value, float | Check | Absent) for value in found.values.values())
    return ", ".join(words)
