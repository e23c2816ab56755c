"""Images in folders, one for each class: `cats/1.png`, `dogs/1.png`, or the same below `train/` and `test/`.

Here: which folders are classes, and reading images by index. Samples are in the order of their sorted paths. Not
here: decoding (`image_codec.py`).
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from typing import TYPE_CHECKING

from syncline.data.files.format import Found
from syncline.data.files.image_codec import decode, shape_of
from syncline.data.files.manifest import FileFacts, Manifest
from syncline.data.files.options import FileOptions
from syncline.data.files.store import SUFFIXES, Store
from syncline.errors import DataError

if TYPE_CHECKING:
    import numpy as np


class Images:
    """All images of a store are one group; each row is read separately."""

    name = "images"

    def scan(self, found: Found, options: FileOptions) -> Manifest:
        """Count the images and look at the header of the first."""
        train, test = image_paths(found.train), image_paths(found.test)
        names = sorted({class_of(path) for path in (*train, *test)})
        if len(names) < 2:
            raise DataError(
                f"{found.store.location} has images in only one folder ({names[0]!r}). The folder of an image is "
                "its class: use one folder per class."
            )
        with found.store.open(train[0]) as file:
            shape = shape_of(file.read(), options.channels, options.side, found.store.shown(train[0]))
        of_train = (FileFacts(_common(train), (len(train),)),)
        of_test = (FileFacts(_common(test), (len(test),)),) if test else ()
        return found.manifest(
            options,
            of_train,
            of_test,
            format=self.name,
            kind="images",
            input_shape=shape,
            classes=len(names),
            class_names=tuple(names),
            is_bytes=True,
        )

    def reader(self, manifest: Manifest, store: Store) -> _ImageReader:
        return _ImageReader(manifest, store)


class _ImageReader:
    reads_whole_groups = False

    def __init__(self, manifest: Manifest, store: Store) -> None:
        self._manifest, self._store = manifest, store
        self._numbers = {name: i for i, name in enumerate(manifest.class_names or ())}
        self._found: dict[FileFacts, list[str]] = {}

    def read(self, facts: FileFacts, group: int, rows: np.ndarray | None) -> tuple[np.ndarray, ...]:  # noqa: ARG002
        """Images and the numbers of their classes."""
        import numpy as np

        paths = self._paths(facts)
        chosen = range(len(paths)) if rows is None else rows.tolist()
        inputs = np.empty((len(chosen), *self._manifest.input_shape), np.uint8)
        targets = np.empty(len(chosen), np.int64)
        for i, row in enumerate(chosen):
            with self._store.open(paths[row]) as file:
                data = file.read()
            where, resize = self._store.shown(paths[row]), self._manifest.options.size is not None
            inputs[i] = decode(data, self._manifest.input_shape, resize=resize, where=where)
            targets[i] = self._numbers[class_of(paths[row])]
        return inputs, targets

    def _paths(self, facts: FileFacts) -> list[str]:
        """The images of a split, in the order of their numbers."""
        if facts in self._found:
            return self._found[facts]
        paths = [path for path in image_paths(self._store.files()) if path.startswith(facts.path)]
        if len(paths) != facts.rows or any(class_of(path) not in self._numbers for path in paths):
            raise DataError(
                f"{self._store.shown(facts.path)} has changed: it has {len(paths)} images, but had {facts.rows} when "
                "the run was planned. Do not change the files during a run, or start a new run."
            )
        self._found[facts] = paths
        return paths


def image_paths(paths: Sequence[str]) -> list[str]:
    """The paths with an image suffix."""
    return [path for path in paths if path.lower().endswith(SUFFIXES["images"])]


def class_of(path: str) -> str:
    """The folder of an image."""
    return path.rsplit("/", 2)[-2]


def _common(paths: Sequence[str]) -> str:
    """The folder above those of all classes."""
    return posixpath.commonpath([path.rsplit("/", 2)[0] for path in paths]) + "/"
