"""`syncline survey`: what the commands take. Not here: what they do (`lab/survey/`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from syncline.cli.output import exit_if_interrupted

app = typer.Typer(
    help="Compare frameworks by what the published surveys asked, measured on this machine.",
    invoke_without_command=True,
)

_Peers = Annotated[
    Path | None,
    typer.Option(
        "--peers-dir", help="Folder with the frameworks' environments. Default: $SYNCLINE_PEERS, else "
        "~/.cache/syncline/peers.",
    ),
]  # fmt: skip
_Json = Annotated[bool, typer.Option("--json", help="Print progress as JSON lines.")]


@app.callback()
def survey(
    context: typer.Context,
    only: Annotated[str | None, typer.Option(help="Entries, such as table-1,figure-4. Default: all.")] = None,
    frameworks: Annotated[
        str | None, typer.Option(help="Frameworks, such as syncline,ddp,tensorflow. Default: all with an adapter.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter rounds.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for survey.html, survey.md and survey.json. Default: runs/survey[-quick]."),
    ] = None,
    json: _Json = False,
    peers_dir: _Peers = None,
) -> None:
    """Compare frameworks by what the published surveys asked, measured on this machine.

    Every round is written at once. Ctrl-C keeps what is measured, and the same
    command continues. A framework that is not installed has a row that says so;
    install it with 'syncline bench peers --install NAME', and run the command again.

    syncline survey --quick
    syncline survey --only table-1,figure-4 --frameworks syncline,ddp,tensorflow
    """
    if context.invoked_subcommand is not None:
        return
    from syncline.lab.survey.command import survey as run

    with exit_if_interrupted():
        run(
            only=_listed(only), names=_listed(frameworks), quick=quick, out=out, as_json=json, peers_dir=peers_dir
        )  # fmt: skip


@app.command("list")
def list_entries() -> None:
    """List the entries, with the question of each."""
    from syncline.lab.survey.catalog import CATALOG

    for entry in CATALOG:
        typer.echo(f"{entry.id:10}  {entry.question}")


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(metavar="SURVEY.JSON", help="The file to check.")],
    json: _Json = False,
    peers_dir: _Peers = None,
) -> None:
    """Find what was changed in a survey after it was measured.

    Compares checksums, computes medians again, looks for cells that are missing, there
    twice or foreign, and compares adapters and questions with those of this checkout.
    Exits with 1 if there is a problem.

    syncline survey verify runs/survey/survey.json
    """
    from syncline.lab.survey.command import verify as run

    run(file, peers_dir=peers_dir, as_json=json)


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(metavar="SURVEY.JSON...", help="Files of several machines.")],
    out: Annotated[Path, typer.Option(help="Folder for the result.")] = Path("runs", "survey-merged"),
    json: _Json = False,
) -> None:
    """Join the surveys of several machines on one page.

    syncline survey merge a.json b.json --out merged
    """
    from syncline.lab.survey.command import merge_files

    merge_files(files, out, as_json=json)


@app.command()
def add(
    folder: Annotated[Path, typer.Argument(help="A folder with peer.toml and adapter.py.")],
    peers_dir: _Peers = None,
) -> None:
    """Add a framework: check its adapter by two short trainings, and keep it.

    syncline survey add my_framework/
    syncline survey --frameworks my_framework,syncline,ddp --quick
    """
    from syncline.lab.bench.peer_recipes import environments_folder
    from syncline.lab.survey.adding import add as run

    place = run(folder, environments_folder(peers_dir), say=lambda text: typer.echo(text, err=True))
    typer.echo(f"Added: {place}. Next: syncline survey --frameworks {place.name},syncline --quick", err=True)


def _listed(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]
