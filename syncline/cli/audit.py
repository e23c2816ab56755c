"""`syncline audit`: the ledger of samples of a run. Not here: reading it (`data/audit.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from syncline.cli.run_options import RunPath
from syncline.errors import ConfigError, DataError

if TYPE_CHECKING:
    from syncline.telemetry.run_dir import RunDir


def audit(run_dir: RunPath) -> None:
    """Verify that every sample of a run was used exactly once per epoch.

    Reads the run's ledger, so that it also holds after failures. Prints the
    samples committed, lost and repeated in each epoch; exits with 1 if any was
    lost or repeated.

    syncline audit runs/lenet-mnist-20260101-120000
    """
    from syncline.data.audit import audit_file
    from syncline.telemetry.run_dir import RunDir

    found_run = RunDir.existing(run_dir)
    found = audit_file(found_run.ledger)
    steps = _last_step(found_run)
    if not found.epochs:
        done = {"graph": "it computed on a graph", "fit": "it fitted blocks of parameters to all data"}
        if (kind := found_run.read_plan().get("kind")) in done:
            raise ConfigError(
                f"{run_dir} has no samples to account for: {done[kind]}.", code="no-samples", run_dir=str(run_dir),
            )  # fmt: skip
        if steps and _has_no_samples(found_run):
            raise ConfigError(
                f"{run_dir} has no samples to account for: its script took no batches from Syncline.",
                code="no-samples", run_dir=str(run_dir),
            )  # fmt: skip
        if steps:
            raise _incomplete(found_run, steps)
        if found_run.has_own_group():
            raise ConfigError(
                f"{run_dir} has no ledger: its script trains with torch.distributed itself, and Syncline does not see "
                "which samples it uses. For a ledger, divide the data with syncline.worker().prepare(...): see "
                "docs/guides/own-loop.md.",
                code="own-group", run_dir=str(run_dir),
            )  # fmt: skip
        raise ConfigError(
            f"{run_dir} has no ledger: it has not completed a step.", code="no-ledger", run_dir=str(run_dir)
        )
    typer.echo("\n".join(found.report_lines()))
    if not found.is_complete and found_run.summary.exists():
        raise _incomplete(found_run, steps)
    if not found.is_clean:
        raise typer.Exit(1)


def _last_step(run_dir: RunDir) -> int:
    """How far the run came, by its events and checkpoints; 0 if nothing says so."""
    from syncline.telemetry.events import Progress, Summary

    steps = [event.step for event in run_dir.read_events() if isinstance(event, Progress)]
    steps += [event.steps for event in run_dir.read_events() if isinstance(event, Summary)]
    names = [path.stem.removeprefix("step-") for path in run_dir.checkpoints.glob("step-*.json")]
    return max([*steps, *(int(name) for name in names if name.isascii() and name.isdigit())], default=0)


def _has_no_samples(run_dir: RunDir) -> bool:
    """Whether the run has counted its steps, but no samples."""
    from syncline.telemetry.events import Progress

    progress = [event for event in run_dir.read_events() if isinstance(event, Progress)]
    return bool(progress) and all(event.samples == 0 for event in progress)


def _incomplete(run_dir: RunDir, steps: int) -> DataError:
    """The error for a ledger that lacks what the rest of the run directory shows."""
    return DataError(
        f"{run_dir.ledger} is incomplete: the run has done {steps} steps or more, and its ledger ends before. It was "
        "truncated, deleted, or the disk was full. Which samples were used after its last line is not known.",
        code="incomplete-ledger",
        path=str(run_dir.ledger),
        steps=steps,
    )
