"""`syncline data list|info|get|convert`: named datasets and data in files. Not here: reading them (`data/`)."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from syncline.cli.output import DownloadProgress
from syncline.config.spec import Spec
from syncline.data import named
from syncline.errors import UnknownName

if TYPE_CHECKING:
    from syncline.data.files.convert import Readable

app = typer.Typer(
    help="List, inspect, download and convert datasets.",
    epilog="Example: syncline data info my/folder",
    no_args_is_help=True,
)

_What = Annotated[
    str, typer.Argument(metavar="DATA", help="Name, path or URL, with options: 'table.csv(label=\"y\")'.")
]
_DataDir = Annotated[Path | None, typer.Option(help="Folder to search for datasets first.")]
_SHOWN_CLASSES, _SHOWN_ROWS, _SHOWN_VALUES = 12, 3, 6


@app.command("list")
def list_data() -> None:
    """List named datasets, file formats and transforms.

    syncline data list
    """
    from syncline.data.files.store import SUFFIXES
    from syncline.data.transforms import transform_names

    typer.echo("By name (download with: syncline data get NAME):")
    for name in named.names():
        module = importlib.import_module(type(named.named(name)).__module__)
        typer.echo(f"  {name:<14} {(module.__doc__ or '').splitlines()[0]}")
    typer.echo("In files, by path or URL:")
    for name, suffixes in SUFFIXES.items():
        typer.echo(f"  {name:<14} {', '.join(suffixes)}")
    typer.echo(f"For --augment: {', '.join(transform_names())}")


@app.command()
def info(data: _What, data_dir: _DataDir = None) -> None:
    """Inspect a dataset: samples, shapes, classes, location, size, first rows.

    syncline data info mnist
    syncline data info 's3://bucket/folder(label="species")'
    """
    found = _found(data, data_dir)
    about, manifest = found.info, found.manifest
    typer.echo(f"{data}")
    typer.echo(f"  where     {found.where}{f' ({manifest.format})' if manifest else ''}, {_size(found) / 1e6:,.1f} MB")
    typer.echo(f"  samples   {about.train_samples:,} for training, {about.test_samples:,} for testing")
    kept = "bytes" if about.scale else "tokens" if about.vocabulary else "numbers"
    typer.echo(f"  inputs    {' x '.join(map(str, about.input_shape))} {kept}")
    if about.classes is None:
        typer.echo("  targets   numbers (regression)" if manifest is None or manifest.label else "  targets   none")
    else:
        shown = ", ".join(repr(n) if n.isspace() else n for n in (about.class_names or ())[:_SHOWN_CLASSES])
        more = ", ..." if about.classes > _SHOWN_CLASSES and shown else ""
        typer.echo(f"  classes   {about.classes}{f': {shown}{more}' if shown else ''}")
    if manifest is not None:
        groups = sum(len(f.group_rows) for f in (*manifest.train, *manifest.test))
        order = f"mixes {manifest.options.window} groups at a time" if manifest.shuffles_groups else "mixes all samples"
        typer.echo(f"  files     {len(manifest.train) + len(manifest.test)}, with {groups} groups; shuffling {order}")
    for number, row in enumerate(_first_rows(found)):
        typer.echo(f"  row {number}     {row}")


@app.command()
def get(name: Annotated[str, typer.Argument(metavar="NAME", help="Dataset name.")]) -> None:
    """Download a dataset, unless it is present.

    syncline data get cifar10
    """
    spec = Spec.parse(name)
    data_set = named.named(spec.name, **spec.options)
    path = data_set.locate(None, DownloadProgress(sys.stderr))
    about = data_set.info(path)
    typer.echo(
        f"{spec.name} is at {path}: {about.train_samples:,} samples for training, {about.test_samples:,} for testing"
    )


@app.command()
def convert(
    data: _What,
    target: Annotated[Path, typer.Argument(metavar="FOLDER", help="New folder to write to.")],
    to: Annotated[str, typer.Option("--to", help="Format: parquet, arrow, csv, lmdb or images.")] = "parquet",
    data_dir: _DataDir = None,
) -> None:
    """Convert a dataset to another format, ready for training.

    syncline data convert mnist my/mnist --to lmdb
    syncline data convert 'table.csv(test_share=0.1)' my/table
    """
    from syncline.data.files.convert import convert as write
    from syncline.data.files.writers import WRITERS

    if to not in WRITERS:
        raise UnknownName.among("format", to, WRITERS)
    is_terminal = sys.stderr.isatty()

    def report(split: str, done: int, count: int) -> None:
        if is_terminal:
            sys.stderr.write(f"\r\033[K{split}: {done:,} of {count:,}" + ("\n" if done == count else ""))
        elif done == count:
            sys.stderr.write(f"{split}: {count:,} samples\n")
        sys.stderr.flush()

    write(_found(data, data_dir), target, to, report)
    typer.echo(f"Wrote {target}. Train on it with: --data {target}")


def _found(data: str, data_dir: Path | None) -> Readable:
    from syncline.data.files.convert import readable
    from syncline.data.files.store import is_location

    spec = Spec(data) if os.path.exists(data) else Spec.parse(data)
    if spec.name not in named.names() and not is_location(spec.name):
        raise UnknownName.among("dataset", spec.name, named.names(), more="Give your own data as a path or URL.")
    return readable(spec, data_dir, DownloadProgress(sys.stderr))


def _size(found: Readable) -> int:
    if found.manifest is not None:
        return found.manifest.size
    path = Path(found.where)
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.iterdir() if p.is_file())


def _first_rows(found: Readable) -> list[str]:
    import numpy as np

    count = min(_SHOWN_ROWS, found.info.train_samples)
    inputs, *targets = found.raw("train", np.arange(count))
    rows = []
    for row in range(count):
        values = inputs[row].reshape(-1)
        shown = " ".join(f"{v:g}" for v in values[:_SHOWN_VALUES].tolist())
        more = f" ... ({len(values)})" if len(values) > _SHOWN_VALUES else ""
        target = targets[0][row].reshape(-1)[:_SHOWN_VALUES].tolist() if targets else []
        rows.append(f"{shown}{more}{' -> ' + ' '.join(f'{t:g}' for t in target) if targets else ''}")
    return rows
