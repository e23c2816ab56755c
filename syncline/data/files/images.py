"""Pictures in folders, one for each class: `cats/1.png`, `dogs/1.png`, or the same below `train/` and `test/`.

Here: which folders are classes, and reading pictures by number. The order of samples is that of the sorted paths. Not
here: decoding (`pictures.py`).
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from typing import TYPE_CHECKING

from syncline.data.files.format import Found, held_back
from syncline.data.files.options import FileOptions
from syncline.data.files.pictures import decode, shape_of
from syncline.data.files.store import SUFFIXES, Store
from syncline.data.files.survey import FileFacts, Survey
from syncline.errors import DataError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Images"]


class Images:
    """All pictures of a store are one group of which any row is read by itself."""

    name = "images"

    def survey(self, found: Found, options: FileOptions) -> Survey:
        """Count the pictures and look at the header of the first."""
        train, test = pictures_of(found.train), pictures_of(found.test)
        names = sorted({class_of(path) for path in (*train, *test)})
        if len(names) < 2:
            raise DataError(
                f"{found.store.location} has pictures in one folder only ({names[0]!r}). The folder of a picture is "
                "its class: put those of each class into a folder of its own."
            )
        with found.store.open(train[0]) as file:
            shape = shape_of(file.read(), options.channels, options.side, found.store.shown(train[0]))
        of_train = (FileFacts(_common(train), (len(train),)),)
        of_test = (FileFacts(_common(test), (len(test),)),) if test else ()
        return Survey(
            location=found.store.location,
            test_location=found.test_location,
            format=self.name,
            options=options,
            train=of_train,
            test=of_test,
            held_back=held_back(options, len(train), of_test, found.store.location),
            kind="pictures",
            input_shape=shape,
            classes=len(names),
            class_names=tuple(names),
            is_bytes=True,
            size=found.size,
        )

    def reader(self, survey: Survey, store: Store) -> _ImageReader:
        """Reads pictures."""
        return _ImageReader(survey, store)


class _ImageReader:
    reads_whole_groups = False

    def __init__(self, survey: Survey, store: Store) -> None:
        self._survey, self._store = survey, store
        self._numbers = {name: i for i, name in enumerate(survey.class_names or ())}
        self._found: dict[FileFacts, list[str]] = {}

    def read(self, facts: FileFacts, group: int, rows: np.ndarray | None) -> tuple[np.ndarray, ...]:  # noqa: ARG002
        """Pictures and the numbers of their classes."""
        import numpy as np

        paths = self._paths(facts)
        chosen = range(len(paths)) if rows is None else rows.tolist()
        inputs = np.empty((len(chosen), *self._survey.input_shape), np.uint8)
        targets = np.empty(len(chosen), np.int64)
        for i, row in enumerate(chosen):
            with self._store.open(paths[row]) as file:
                data = file.read()
            where, resize = self._store.shown(paths[row]), self._survey.options.size is not None
            inputs[i] = decode(data, self._survey.input_shape, resize=resize, where=where)
            targets[i] = self._numbers[class_of(paths[row])]
        return inputs, targets

    def _paths(self, facts: FileFacts) -> list[str]:
        """The pictures of a split, in the order of their numbers."""
        if facts in self._found:
            return self._found[facts]
        paths = [path for path in pictures_of(self._store.files()) if path.startswith(facts.path)]
        if len(paths) != facts.rows or any(class_of(path) not in self._numbers for path in paths):
            raise DataError(
                f"{self._store.shown(facts.path)} has changed: it has {len(paths)} pictures, but had {facts.rows} when "
                "the run was planned. The order of a run holds only as long as its files stay as they are."
            )
        self._found[facts] = paths
        return paths


def pictures_of(paths: Sequence[str]) -> list[str]:
    """Those that are called like pictures."""
    return [path for path in paths if path.lower().endswith(SUFFIXES["images"])]


def class_of(path: str) -> str:
    """The folder of a picture."""
    return path.rsplit("/", 2)[-2]


def _common(paths: Sequence[str]) -> str:
    """The folder above those of all classes."""
    return posixpath.commonpath([path.rsplit("/", 2)[0] for path in paths]) + "/"
