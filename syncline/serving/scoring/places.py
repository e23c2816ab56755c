"""Where scores are written: a folder, or a URL that fsspec can write to, such as s3://bucket/scores.

Here: writing a file so that it is there completely or not at all, and one job at a time in a folder. Not here: what
the files are (`job.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from syncline.config.owned_files import replace_file
from syncline.errors import ConfigError, DataError

_LOCK = "_lock"
_TEMPORARY = ".tmp"


class Place(Protocol):
    """A folder for files that are written once."""

    shown: str
    is_on_this_machine: bool
    """Whether another machine may see another folder by this name."""

    def names(self) -> set[str]:
        """The files that are there completely."""

    def has(self, name: str) -> bool: ...

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, data: bytes) -> None:
        """Write a whole file. If that fails, nothing is there."""

    def remove_unfinished(self) -> None:
        """Remove what processes left that were killed while they wrote."""

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """One job at a time, where the place has locks."""


def place_for(location: str | Path) -> Place:
    """The place of a path or URL.

    >>> place_for("file:///tmp/scores").shown
    '/tmp/scores'
    """
    text = os.fspath(location)
    if "://" in text and not text.startswith("file://"):
        return _RemotePlace(text)
    return _LocalPlace(Path(text.removeprefix("file://")).absolute())


class _LocalPlace:
    is_on_this_machine = True

    def __init__(self, path: Path) -> None:
        self._path, self.shown = path, str(path)

    def names(self) -> set[str]:
        return {one.name for one in self._path.iterdir() if one.name != _LOCK and not _is_unfinished(one.name)}

    def has(self, name: str) -> bool:
        return (self._path / name).exists()

    def read(self, name: str) -> bytes:
        return (self._path / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        if not name.startswith("part-"):
            replace_file(self._path / name, data)
            return
        # Machines that share the folder may have processes of the same number.
        temporary = self._path / f".{name}.{uuid.uuid4().hex}{_TEMPORARY}"
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path / name)
        finally:
            temporary.unlink(missing_ok=True)

    def remove_unfinished(self) -> None:
        for left in self._path.glob(f".part-*{_TEMPORARY}"):
            left.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """The lock ends with the process, however that ends."""
        self._path.mkdir(parents=True, exist_ok=True)
        with (self._path / _LOCK).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"Another process is scoring into {self._path}. Wait for it, or choose another folder with --out.",
                    code="scoring-in-use", path=str(self._path),
                ) from None  # fmt: skip
            yield


class _RemotePlace:
    """Objects in a store, which exist when they are complete.

    There is no lock. Two jobs of the same data and model write the same rows to the same names, and another job is
    refused, so a row is there once in any case.
    """

    is_on_this_machine = False

    def __init__(self, url: str) -> None:
        import fsspec

        self.shown = url.rstrip("/")
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.shown)
        except (ImportError, ValueError) as error:
            raise DataError(
                f"{url} cannot be written to: {error}. For S3: pip install 'syncline[s3]'", code="remote-out", out=url
            ) from error

    def names(self) -> set[str]:
        with self._failures():
            self._files.invalidate_cache()
            found = self._files.find(self._root) if self._files.exists(self._root) else []
        return {path.removeprefix(self._root).lstrip("/") for path in found}

    def has(self, name: str) -> bool:
        with self._failures():
            self._files.invalidate_cache()
            return bool(self._files.exists(f"{self._root}/{name}"))

    def read(self, name: str) -> bytes:
        with self._failures():
            data: bytes = self._files.cat_file(f"{self._root}/{name}")
            return data

    def write(self, name: str, data: bytes) -> None:
        with self._failures():
            self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(f"{self._root}/{name}", data)

    def remove_unfinished(self) -> None:
        """A store shows no object before it is complete."""

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def _failures(self) -> Iterator[Any]:
        try:
            yield
        except Exception as error:  # a store's package may raise anything
            said = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise DataError(
                f"{self.shown} cannot be used for --out: {said}. Check the URL and the credentials (for S3: AWS_* in "
                "the environment).",
                code="remote-out", out=self.shown,
            ) from error  # fmt: skip


def _is_unfinished(name: str) -> bool:
    return name.startswith(".") and name.endswith(_TEMPORARY)
