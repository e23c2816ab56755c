"""`syncline plan --check`: the runs, the table, and a file that portions of the grid are added to.

Here: what the command does. Not here: the runs (`cells.py`) and the errors (`table.py`).
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import typer

from syncline.errors import ConfigError
from syncline.lab.machine import BenchMachine
from syncline.lab.output import check_output_file, make_reporter
from syncline.lab.plan_check.cells import QUICK, Grid, check
from syncline.lab.plan_check.table import Checked, as_data, detail_of, errors_of, lines_of, merged

_FORMAT = 1


def grid_of(
    *, quick: bool, model: str | None, workers: int | None, network: str | None, strategies: list[str] | None
) -> Grid:
    """The whole grid, or the part of it that was asked for."""
    grid, whole = QUICK if quick else Grid(), Grid()
    if model is not None:
        if model not in whole.models:
            raise ConfigError.for_setting("TASK", model, f"one of {', '.join(whole.models)} with --check")
        grid = replace(grid, models=(model,))
    if workers is not None or network is not None:
        asked = (p for p in whole.places if workers in (None, p.workers) and network in (None, p.rate or "none"))
        places = tuple(asked)
        if not places:
            known = "; ".join(f"--workers {p.workers} --network {p.rate or 'none'}" for p in whole.places)
            raise ConfigError(
                f"--check has no place with {workers or 'any number of'} workers and the network {network or 'any'}. "
                f"It has: {known}.",
                code="no-place", workers=workers, network=network,
            )  # fmt: skip
        grid = replace(grid, places=places)
    return replace(grid, strategies=tuple(strategies)) if strategies else grid


def check_plans(grid: Grid, *, out: Path | None, as_json: bool) -> None:
    """Run the grid, report, and add the results to a Markdown file and the JSON file beside it."""
    if out is not None:
        check_output_file(out, default_name="plan-check.md")
    earlier = read_results(out.with_suffix(".json")) if out is not None else []
    machine = BenchMachine.here()
    reporter = make_reporter(as_json=as_json)
    found: list[Checked] = []
    try:
        for one in check(grid, lambda text: reporter.report("note", text)):
            found.append(one)
    except KeyboardInterrupt:
        reporter.report("interrupted", "Interrupted: the results so far.")
    if not found:
        raise ConfigError("No run could be measured: see the lines above.", code="nothing-measured")
    if out is not None:
        every = merged(earlier, found)
        facts = {"format": _FORMAT, "made": time.time(), "machine": asdict(machine)}
        out.with_suffix(".json").write_text(json.dumps({**facts, "runs": as_data(every)}, indent=1))
        out.write_text("\n".join([*lines_of(every), "", *detail_of(every), ""]))
    if as_json:
        typer.echo(json.dumps({"event": "result", "errors": asdict(errors_of(found)), "runs": as_data(found)}))
    else:
        typer.echo("\n".join([*detail_of(found), "", *lines_of(found)]))


def read_results(path: Path) -> list[Checked]:
    """Earlier portions."""
    try:
        return msgspec.convert(json.loads(path.read_text())["runs"], list[Checked])
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} has no results of --check that portions can be added to: {error}. Choose another file with --out.",
            code="damaged-results", path=str(path),
        ) from error  # fmt: skip
