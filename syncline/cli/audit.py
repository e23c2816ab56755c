"""`syncline audit`: the ledger of samples of a run. Not here: reading it (`data/audit.py`)."""

from __future__ import annotations

import typer

from syncline.cli.run_options import RunPath
from syncline.errors import ConfigError


def audit(run_dir: RunPath) -> None:
    """Verify that every sample of a run was used exactly once per epoch.

    Reads the run's ledger, so that it also holds after failures. Prints the
    samples committed, lost and repeated in each epoch; exits with 1 if any was
    lost or repeated.

    syncline audit runs/lenet-mnist-20260101-120000
    """
    from syncline.data.audit import audit_file
    from syncline.telemetry.run_dir import RunDir

    found = audit_file(RunDir.existing(run_dir).ledger)
    if not found.epochs:
        raise ConfigError(f"{run_dir} has no ledger: it has not completed a step, or it ran a script's own loop.")
    typer.echo("\n".join(found.report_lines()))
    if not found.is_clean:
        raise typer.Exit(1)
