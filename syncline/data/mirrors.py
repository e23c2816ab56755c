"""Finding the files of a published dataset on this machine, or downloading them.

Here: `PublishedDataset`, which lists the file names, the folders where they may be and the mirrors, and the search
through these in the same order for every dataset. Not here: downloading (`download.py`, `package_indexes.py`), and
the contents of the files (one module for each dataset).
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from syncline.data.download import cache_dir, environment_data_dir
from syncline.data.named import Progress
from syncline.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Mirror:
    """A place to download the files from.

    Attributes:
        fetch: Downloads the named files into a folder; DataError if it cannot. Files that were complete stay.
        label: Prefixes its error message, if that does not name the mirror itself.
    """

    fetch: Callable[[Sequence[str], Path, Progress | None], None]
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class PublishedDataset:
    """Where the files of a dataset may be.

    Attributes:
        title: Its usual name, for messages.
        folder: Its folder in the cache and in `data_dir`.
        files: Its files; each may also be compressed, as NAME.gz.
        elsewhere: More folders to search: relative to `data_dir` ("" is `data_dir` itself) or absolute.
        mirrors: Where to download the files, in this order.
        advice: How to get the files by hand.
    """

    title: str
    folder: str
    files: tuple[str, ...]
    mirrors: tuple[Mirror, ...]
    advice: str
    elsewhere: tuple[str, ...] = ()


def find_or_download(dataset: PublishedDataset, data_dir: Path | None, progress: Progress | None) -> Path:
    """The first folder with all files: `data_dir`, $SYNCLINE_DATA, the system, the cache; else download them."""
    tried: list[str] = []
    below = (*(place for place in dataset.elsewhere if not place.startswith("/")), dataset.folder)
    for label, root in (("data_dir", data_dir), ("$SYNCLINE_DATA", environment_data_dir())):
        if root is None:
            tried.append(f"{label}: not set")
            continue
        for folder in (root / place for place in below):
            if not _missing(dataset, folder):
                return folder.absolute()  # workers may have another working directory
            tried.append(f"{label}, {folder}: {_why_not(dataset, folder)}")
    for place in dataset.elsewhere:
        if place.startswith("/"):
            if not _missing(dataset, Path(place)):
                return Path(place)
            tried.append(f"{place}: {_why_not(dataset, Path(place))}")
    try:
        cache = cache_dir() / dataset.folder
    except DataError as error:
        raise _found_nowhere(dataset, [*tried, f"the cache: {error}"]) from error
    if not _missing(dataset, cache):
        return cache
    tried.append(f"the cache, {cache}: {_why_not(dataset, cache)}")
    if _downloaded(dataset, cache, tried, progress):
        return cache
    raise _found_nowhere(dataset, tried)


def find_file(folder: Path, name: str) -> Path | None:
    """The file, uncompressed (faster to read) or compressed."""
    # os.path, because Path.is_file raises for an unreadable folder, which here just means "not found".
    return next((path for path in (folder / name, folder / f"{name}.gz") if os.path.isfile(path)), None)


def read_file(path: Path, *, most_bytes: int) -> bytes:
    """The bytes of a file, unpacked if its name ends in .gz; OSError if it unpacks to more than `most_bytes`.

    A megabyte can unpack to a gigabyte.
    """
    if path.suffix != ".gz":
        return path.read_bytes()
    with gzip.open(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise gzip.BadGzipFile(f"it unpacks to more than {most_bytes:,} bytes")
    return data


def was_downloaded(path: Path, folder: str) -> bool:
    """Whether Syncline downloaded this file into `folder` of its cache; otherwise it is the user's own."""
    try:
        return path.parent == cache_dir() / folder
    except DataError:  # without a cache, nothing can have been downloaded
        return False


def _downloaded(dataset: PublishedDataset, cache: Path, tried: list[str], progress: Progress | None) -> bool:
    """Download the missing files into `cache` and add failures to `tried`; whether all files are there now.

    Files from one mirror are kept when the next one is tried, because each file is verified by itself.
    """
    for mirror in dataset.mirrors:
        try:
            mirror.fetch(_missing(dataset, cache), cache, progress)
        except DataError as error:
            tried.append(f"{mirror.label}: {error}" if mirror.label else str(error))
        else:
            return True
    return False


def _missing(dataset: PublishedDataset, folder: Path) -> list[str]:
    return [name for name in dataset.files if find_file(folder, name) is None]


def _why_not(dataset: PublishedDataset, folder: Path) -> str:
    try:
        os.listdir(folder)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    missing = _missing(dataset, folder)
    if len(missing) == len(dataset.files):
        return "none of its files found" if len(missing) > 1 else f"{missing[0]} not found"
    return f"{', '.join(missing)} not found, with or without .gz"


def _found_nowhere(dataset: PublishedDataset, tried: list[str]) -> DataError:
    places = "\n".join(f"  - {place}" for place in tried)
    return DataError(
        f"{dataset.title} was not found on this machine and could not be downloaded. Tried:\n{places}\n"
        f"{dataset.advice}\nThe datasets 'digits' and 'iris' need no download.",
        code="data-not-found",
        dataset=dataset.title,
        tried=tried,
    )
