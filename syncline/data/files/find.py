"""Scanning a path or URL: which files are there, and in which format.

Here: detecting the format, and splitting the files into training and test data. Not here: the formats (one file each),
and reading samples (`source.py`): the driver scans without importing torch.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from syncline.data.files.format import Format, Found
from syncline.data.files.options import FileOptions
from syncline.data.files.store import SUFFIXES, Store
from syncline.errors import DataError

if TYPE_CHECKING:
    from syncline.data.files.manifest import Manifest

_FORMATS = {
    "parquet": ("syncline.data.files.parquet", "Parquet"),
    "arrow": ("syncline.data.files.arrow", "Arrow"),
    "csv": ("syncline.data.files.csv", "Csv"),
    "images": ("syncline.data.files.images", "Images"),
    "lmdb": ("syncline.data.files.lmdb", "Lmdb"),
}

_TEST_WORDS = ("test", "validation", "valid", "val", "eval")
"""Names of test folders or files; the first one found is used."""


def scan(location: str, options: FileOptions) -> Manifest:
    """The manifest of the data at this location; DataError if it cannot be used."""
    store = Store(location, options.storage)
    name, files = of_one_format(store, options.format)
    train, test_store = files, store
    test: list[str] = []
    if options.test is not None:
        test_store = Store(options.test, options.storage)
        _, test = of_one_format(test_store, name)
    elif len(files) > 1:
        train, test = split(files, [store.relative(path) for path in files])
    found = Found(store, tuple(train), test_store, tuple(test))
    return format_named(name).scan(found, options)


def format_named(name: str) -> Format:
    """The format of this name."""
    module, attribute = _FORMATS[name]
    return cast("Format", getattr(importlib.import_module(module), attribute)())


def split(files: Sequence[str], relative: Sequence[str]) -> tuple[list[str], list[str]]:
    """The training and the test files, by the names of the files or of their topmost folders.

    `relative` are the same files, relative to the location. If a name matches neither, all files are for training.
    """
    words = [set(re.split(r"[^a-z]+", path.lower().split("/")[0])) for path in relative]
    train = [path for path, of_path in zip(files, words, strict=True) if "train" in of_path or "training" in of_path]
    for name in _TEST_WORDS:
        test = [path for path, of_path in zip(files, words, strict=True) if name in of_path]
        if test and train:
            others = set(files) - set(train) - set(test)
            known = {p for p, w in zip(files, words, strict=True) if w & set(_TEST_WORDS)}
            return (train, test) if others <= known else (list(files), [])
    return list(files), []


def of_one_format(store: Store, wanted: str | None) -> tuple[str, list[str]]:
    """The format of the files at a location, and those that have it."""
    files = store.files()
    by_format = {
        name: [path for path in files if path.lower().endswith(suffixes)] for name, suffixes in SUFFIXES.items()
    }
    by_format["lmdb"] = [path for path in by_format["lmdb"] if not path.endswith("lock.mdb")]
    present = [name for name, paths in by_format.items() if paths]
    if wanted is not None:
        chosen = by_format[wanted] or (files if len(files) == 1 else [])
        if not chosen:
            raise DataError(f"{store.location} has no {wanted} files: no name ends in {' or '.join(SUFFIXES[wanted])}.")
        return wanted, chosen
    if len(present) > 1:
        counts = ", ".join(f"{len(by_format[name])} of {name}" for name in present)
        raise DataError(
            f"{store.location} has files of several formats: {counts}. Choose one with format={present[0]!r}."
        )
    if not present:
        if not files:
            raise DataError(f"{store.location} is an empty folder.")
        known = "; ".join(f"{name} ({', '.join(suffixes)})" for name, suffixes in SUFFIXES.items())
        raise DataError(
            f"{store.location} has {len(files)} files, but none with a known suffix. Known are {known}. "
            "Or set format=..."
        )
    return present[0], by_format[present[0]]
