"""File access: local paths and URLs behind one interface.

Here: `Store`, a thin layer over fsspec that raises one error type, and `is_location`, which distinguishes a path from
a name. Not here: the contents of the files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cached_property
from typing import IO, Any

from syncline.errors import DataError

SUFFIXES = {
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".feather", ".ipc"),
    "csv": (".csv",),
    "lmdb": (".mdb", ".lmdb"),
    "images": (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm"),
}
"""The suffixes of each format."""

_TOO_MUCH = ("/", "/proc", "/sys")
"""Searching these takes from seconds to hours, and was not meant."""
_EXTRAS = {"s3": "s3", "s3a": "s3"}
_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs", "hf": "huggingface_hub", "http": "aiohttp"}


def is_location(text: str) -> bool:
    """Whether this is a path or URL, and not the name of a dataset."""
    if "/" in text or os.sep in text or text.startswith("."):
        return True
    tabular = [suffix for name, suffixes in SUFFIXES.items() if name != "images" for suffix in suffixes]
    return text.lower().endswith(tuple(tabular)) or os.path.exists(text)


def absolute(location: str) -> str:
    """The location as an absolute path or URL, since workers may have another working directory."""
    return location if "://" in location else os.path.abspath(os.path.expanduser(location))


class Store:
    """The files at and below one location."""

    def __init__(self, location: str, settings: Mapping[str, Any] | None = None) -> None:
        self.location = absolute(location)
        self._settings = dict(settings or {})

    @property
    def is_remote(self) -> bool:
        """Whether the location is on the network."""
        return "://" in self.location and not self.location.startswith("file://")

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        import fsspec

        try:
            return fsspec.core.url_to_fs(self.location, **self._settings)  # type: ignore[no-any-return]  # untyped
        except ImportError as error:
            scheme = self.location.partition("://")[0]
            package = f"'syncline[{_EXTRAS[scheme]}]'" if scheme in _EXTRAS else _PACKAGES.get(scheme, "")
            fix = f"Install it: pip install {package}" if package else str(error)
            raise DataError(f"Reading {self.location} needs a package that is not installed. {fix}") from error
        except ValueError as error:
            raise DataError(f"{self.location} cannot be read: {error}.") from error

    def files(self) -> list[str]:
        """All files, sorted; the file itself if the location is one. DataError if nothing is there."""
        file_system, root = self._opened
        try:
            if file_system.isfile(root):
                return [root]
            if not self.is_remote and os.path.realpath(root or "/") in _TOO_MUCH:
                raise DataError(
                    f"{self.location} is not searched for data: it is the whole file system, or the kernel's part of "
                    "it. Choose the folder that holds the data.",
                    code="no-data-folder",
                    location=self.location,
                )
            found = sorted(file_system.find(root))
        except Exception as error:  # a remote store's package may raise anything
            raise self.failed(self.location, error) from error
        if not found and not file_system.exists(root):
            raise DataError(f"There is nothing at {self.location}. Check the path{self._remote_hint()}.")
        # Hidden files are left by downloads and file managers.
        return [path for path in found if not re.search(r"/[._][^/]*", path[len(root) :])]

    def relative(self, path: str) -> str:
        """A path of `files`, relative to the location."""
        return path[len(self._opened[1]) :].lstrip("/")

    def shown(self, path: str) -> str:
        """A path of `files`, as a user would write it."""
        return path if not self.is_remote else f"{self.location.partition('://')[0]}://{path}"

    def open(self, path: str) -> IO[bytes]:
        """Open one of `files` for reading."""
        try:
            return self._opened[0].open(path, "rb")  # type: ignore[no-any-return]  # untyped
        except Exception as error:
            raise self.failed(self.shown(path), error) from error

    def size(self, path: str) -> int:
        """The size of one of `files` in bytes."""
        try:
            return int(self._opened[0].size(path))
        except Exception as error:
            raise self.failed(self.shown(path), error) from error

    def failed(self, shown: str, error: Exception) -> DataError:
        """A DataError for whatever a store raised."""
        if isinstance(error, DataError):
            return error
        if isinstance(error, FileNotFoundError):
            return DataError(f"There is no {shown}. Check the path{self._remote_hint()}.")
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return DataError(f"{shown} cannot be read: {said}{self._remote_hint()}.")

    def _remote_hint(self) -> str:
        return ", and the credentials (for S3: AWS_* in the environment)" if self.is_remote else ""
