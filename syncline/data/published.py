"""Finding the files of a published data set on this machine, or bringing them here.

Here: `Publication`, which says what the files are called, where they may lie and who hands them out, and the search
through all these places in one order for every data set. Not here: the downloading itself (`download.py`,
`registries.py`), or what is in the files (one module for each data set).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from syncline.data.download import cache_dir, environment_data_dir
from syncline.data.named import Progress
from syncline.errors import DataError

__all__ = ["Giver", "Publication", "find_file", "folder_of", "was_downloaded"]


@dataclass(frozen=True, kw_only=True)
class Giver:
    """Somebody who hands out the files.

    Attributes:
        bring: Brings files that are missing, by name, to a folder; DataError if it cannot. What it brought stays.
        label: Put before its complaint, if that does not say by itself who complains.
    """

    bring: Callable[[Sequence[str], Path, Progress | None], None]
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Publication:
    """What is known of where a data set is.

    Attributes:
        title: The name people know it by.
        folder: Its folder in the cache, and below the folders that users name.
        files: The files that belong to it; each may also be packed, with .gz at the end.
        elsewhere: Other places: folders below those that users name, "" for these themselves, or absolute ones.
        givers: Who hands out the files, in the order in which they are asked.
        advice: How to get the files by hand.
    """

    title: str
    folder: str
    files: tuple[str, ...]
    givers: tuple[Giver, ...]
    advice: str
    elsewhere: tuple[str, ...] = ()


def folder_of(publication: Publication, data_dir: Path | None, progress: Progress | None) -> Path:
    """The first folder that has all files: in `data_dir`, $SYNCLINE_DATA, the system, the cache; else a download."""
    tried: list[str] = []
    below = (*(place for place in publication.elsewhere if not place.startswith("/")), publication.folder)
    for label, root in (("data_dir", data_dir), ("$SYNCLINE_DATA", environment_data_dir())):
        if root is None:
            tried.append(f"{label}: not set")
            continue
        for folder in (root / place for place in below):
            if not _missing(publication, folder):
                return folder.absolute()  # a worker may run in another folder
            tried.append(f"{label}, {folder}: {_why_not(publication, folder)}")
    for place in publication.elsewhere:
        if place.startswith("/"):
            if not _missing(publication, Path(place)):
                return Path(place)
            tried.append(f"{place}: {_why_not(publication, Path(place))}")
    try:
        cache = cache_dir() / publication.folder
    except DataError as error:
        raise _found_nowhere(publication, [*tried, f"the cache: {error}"]) from error
    if not _missing(publication, cache):
        return cache
    tried.append(f"the cache, {cache}: {_why_not(publication, cache)}")
    if _brought(publication, cache, tried, progress):
        return cache
    raise _found_nowhere(publication, tried)


def find_file(folder: Path, name: str) -> Path | None:
    """The file, unpacked (quicker to read) or packed."""
    # os.path, because Path.is_file raises for a folder that may not be entered, and that is only one more "not here".
    return next((path for path in (folder / name, folder / f"{name}.gz") if os.path.isfile(path)), None)


def was_downloaded(path: Path, folder: str) -> bool:
    """Whether this file of the data set that has this `folder` in the cache is there, and not somebody's own."""
    try:
        return path.parent == cache_dir() / folder
    except DataError:  # without a cache, nothing can have been downloaded
        return False


def _brought(publication: Publication, cache: Path, tried: list[str], progress: Progress | None) -> bool:
    """Bring what is missing to `cache`, adding to `tried` whatever failed; whether all is there now.

    What one giver gave is kept when the next has to go on: every file was checked by itself.
    """
    for giver in publication.givers:
        try:
            giver.bring(_missing(publication, cache), cache, progress)
        except DataError as error:
            tried.append(f"{giver.label}: {error}" if giver.label else str(error))
        else:
            return True
    return False


def _missing(publication: Publication, folder: Path) -> list[str]:
    return [name for name in publication.files if find_file(folder, name) is None]


def _why_not(publication: Publication, folder: Path) -> str:
    try:
        os.listdir(folder)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    missing = _missing(publication, folder)
    if len(missing) == len(publication.files):
        return "none of its files is there" if len(missing) > 1 else f"{missing[0]} is not there"
    return f"{', '.join(missing)} not there, neither with .gz nor without"


def _found_nowhere(publication: Publication, tried: list[str]) -> DataError:
    places = "\n".join(f"  - {place}" for place in tried)
    return DataError(
        f"{publication.title} is in none of the usual places and could not be downloaded. Tried:\n{places}\n"
        f"{publication.advice}\nThe data sets 'digits' and 'iris' need no download at all."
    )
