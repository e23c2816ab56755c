"""What may be said of data that is given as a path: `table.csv(label="species", test_share=0.2)`.

Here: `FileOptions`, checked on construction. Not here: options of data sets known by name (their own modules).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from syncline.errors import ConfigError, nearest

__all__ = ["FileOptions", "Shuffle"]

Shuffle = Literal["auto", "global", "groups"]

_FORMATS = ("parquet", "arrow", "csv", "images", "lmdb")


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """What to read of the files, and how.

    Attributes:
        features: The columns that are inputs. Default: all but the label.
        label: The column with the target; "none" if there is none. Default: one called label or the like, else the
            last.
        classes: How many classes there are. Default: as many as are found. 0: the labels are numbers to be fitted.
        test: Where the test data is. Default: what lies in test/ or is called test..., if the rest is called train.
        test_share: What part to hold back for testing, if there is no test data.
        split_seed: Which samples these are.
        shape: The shape of one input, where a row holds it flat.
        size: The side, or (height, width), to which pictures are brought.
        channels: 1 for grey, 3 for colour. Default: as the first picture has it.
        scale: (mean, deviation): bytes become (x / 255 - mean) / deviation.
        shuffle: "global" mixes all samples, "groups" a few row groups at a time; "auto" takes global if all fits into
            the cache.
        window: How many row groups "groups" mixes at a time.
        cache_mb: The most memory for decoded row groups, in each worker.
        format: What the files are, if their names do not say it.
        storage: Settings of a remote store, as fsspec takes them.
    """

    features: str | tuple[str, ...] | None = None
    label: str | None = None
    classes: int | None = None
    test: str | None = None
    test_share: float = 0.0
    split_seed: int = 0
    shape: tuple[int, ...] | None = None
    size: int | tuple[int, int] | None = None
    channels: int | None = None
    scale: tuple[float, float] = (0.5, 0.5)
    shuffle: Shuffle = "auto"
    window: int = 8
    cache_mb: float = 512
    format: str | None = None
    storage: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> FileOptions:
        """From what a user wrote; ConfigError with the nearest name for one that there is not."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                close = nearest(name, known)
                hint = f"Did you mean {close[0]!r}?" if close else f"There are: {', '.join(known)}."
                raise ConfigError(f"Data in files has no option {name!r}. {hint}")
        lists = {k: tuple(v) for k, v in options.items() if isinstance(v, list)}
        return cls(**{**options, **lists})

    def __post_init__(self) -> None:
        for name, least in (("classes", 0), ("split_seed", 0), ("window", 1), ("channels", 1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ConfigError(f"{name} is {value!r}, but must be a whole number of {least} or more.")
        if not isinstance(self.test_share, (int, float)) or not 0 <= self.test_share < 1:
            raise ConfigError(f"test_share is {self.test_share!r}, but must be from 0 to less than 1, such as 0.1.")
        if self.test is not None and self.test_share:
            raise ConfigError("test and test_share are both given: the test data is either elsewhere, or held back.")
        if self.channels not in (None, 1, 3):
            raise ConfigError(f"channels is {self.channels}, but pictures have 1 (grey) or 3 (colour).")
        if self.shuffle not in get_args(Shuffle):
            raise ConfigError(f"shuffle is {self.shuffle!r}, but must be one of {', '.join(get_args(Shuffle))}.")
        if self.format not in (None, *_FORMATS):
            raise ConfigError(f"format is {self.format!r}, but must be one of {', '.join(_FORMATS)}.")
        if not isinstance(self.cache_mb, (int, float)) or not self.cache_mb > 0:
            raise ConfigError(f"cache_mb is {self.cache_mb!r}, but must be more than 0.")
        sides = self.side
        if sides is not None and (len(sides) != 2 or not all(isinstance(s, int) and s > 0 for s in sides)):
            raise ConfigError(f"size is {self.size!r}, but must be a whole number of pixels, or (height, width).")
        if self.shape is not None and not (
            isinstance(self.shape, tuple) and all(isinstance(s, int) and s > 0 for s in self.shape)
        ):
            raise ConfigError(f"shape is {self.shape!r}, but must be a list of whole numbers, such as (1, 28, 28).")

    @property
    def side(self) -> tuple[int, int] | None:
        """`size` as (height, width)."""
        if self.size is None or isinstance(self.size, tuple):
            return self.size
        return (self.size, self.size)

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        """`features` as a tuple."""
        return (self.features,) if isinstance(self.features, str) else self.features
