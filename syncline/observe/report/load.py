"""From run directories to records: finding runs, reading them at any stage, and naming them distinctly.

Not here: the fold over events (`record.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from syncline.errors import UnknownName, nearest
from syncline.observe.report.record import RunRecord, record_of
from syncline.planning.expected import read_expected
from syncline.telemetry.centroids import read_centroids
from syncline.telemetry.predictions import read_predictions
from syncline.telemetry.run_dir import RunDir


def find_run(path: Path) -> RunDir:
    """The run directory at `path`; `ConfigError` with the nearest names if that is none."""
    if os.path.isfile(path / "plan.json"):  # unlike Path.is_file, False where we may not look
        return RunDir.existing(path)
    parent = path.parent
    known = sorted(p.parent.name for p in parent.glob("*/plan.json"))
    if path.exists() or not nearest(path.name, known):
        return RunDir.existing(path)  # raises the precise error
    raise UnknownName.among(f"run in {parent} named", path.name, known)


def load(paths: Sequence[Path], is_live: Callable[[Path], bool]) -> list[RunRecord]:
    """The records of these runs, in this order; `is_live` checks whether a run is still training."""
    found = [find_run(path) for path in paths]
    records = []
    for run_dir, name in zip(found, short_names([run_dir.path for run_dir in found]), strict=True):
        record = record_of(name, run_dir.read_events())
        record.plan = record.plan or run_dir.read_plan()
        record.is_live = is_live(run_dir.path)
        record.expected = read_expected(run_dir.expected)
        record.predictions = read_predictions(run_dir.predictions)
        record.centroids = read_centroids(run_dir.centroids)
        records.append(record)
    return records


def short_names(paths: Sequence[Path]) -> list[str]:
    """The folders' names, with as much of their paths as makes them distinct."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    for length in range(1, max(len(p) for p in parts) + 1):
        names = [str(Path(*p[-length:])) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({number})" for number, path in enumerate(paths, start=1)]  # the same one twice
