"""Options of data given as a path: `table.csv(label="species", test_share=0.2)`.

Here: `FileOptions`, checked on construction. Not here: options of datasets known by name (their own modules).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from syncline.errors import ConfigError, check_options

Shuffle = Literal["auto", "global", "groups"]

_FORMATS = ("parquet", "arrow", "csv", "images", "lmdb")


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """What to read of the files, and how.

    Attributes:
        features: Input columns. Default: all but the label.
        label: Target column; "none" for no target. Default: a column named label, target, class or y, else the last.
        classes: Number of classes; 0 for regression. Default: counted in the data.
        test: Location of the test data. Default: files or folders named test, if the rest is named train.
        test_share: Fraction to hold out for testing, if there is no test data.
        split_seed: Seed of the held-out split.
        shape: Shape of one input, if rows store it flat.
        size: Side, or (height, width), to resize images to.
        channels: 1 for grayscale, 3 for RGB. Default: as the first image.
        scale: (mean, std): bytes become (x / 255 - mean) / std.
        shuffle: "global" shuffles all samples, "groups" a few row groups at a time; "auto" is global if everything fits
            into the cache.
        window: How many row groups "groups" shuffles together.
        cache_mb: Memory limit for decoded row groups, per worker.
        format: File format, if the names do not show it.
        storage: Settings of a remote store, as for fsspec.
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
        """From what a user wrote; `UnknownName` for an option that does not exist."""
        known = [f.name for f in dataclasses.fields(cls)]
        check_options("Data in files", options, known)
        lists = {k: tuple(v) for k, v in options.items() if isinstance(v, list)}
        return cls(**{**options, **lists})

    def __post_init__(self) -> None:
        for name, least in (("classes", 0), ("split_seed", 0), ("window", 1), ("channels", 1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ConfigError(f"{name} is {value!r}, but must be an integer of {least} or more.")
        if not isinstance(self.test_share, (int, float)) or not 0 <= self.test_share < 1:
            raise ConfigError(f"test_share is {self.test_share!r}, but must be from 0 to less than 1, such as 0.1.")
        if self.test is not None and self.test_share:
            raise ConfigError(
                "test and test_share are both set. Set test if the test data is elsewhere, or test_share to "
                "hold out a part."
            )
        if self.channels not in (None, 1, 3):
            raise ConfigError(f"channels is {self.channels}, but images have 1 (grayscale) or 3 (RGB).")
        if self.shuffle not in get_args(Shuffle):
            raise ConfigError(f"shuffle is {self.shuffle!r}, but must be one of {', '.join(get_args(Shuffle))}.")
        if self.format not in (None, *_FORMATS):
            raise ConfigError(f"format is {self.format!r}, but must be one of {', '.join(_FORMATS)}.")
        if not isinstance(self.cache_mb, (int, float)) or not self.cache_mb > 0:
            raise ConfigError(f"cache_mb is {self.cache_mb!r}, but must be more than 0.")
        sides = self.side
        if sides is not None and (len(sides) != 2 or not all(isinstance(s, int) and s > 0 for s in sides)):
            raise ConfigError(f"size is {self.size!r}, but must be an integer of pixels, or (height, width).")
        if self.shape is not None and not (
            isinstance(self.shape, tuple) and all(isinstance(s, int) and s > 0 for s in self.shape)
        ):
            raise ConfigError(f"shape is {self.shape!r}, but must be a list of integers, such as (1, 28, 28).")

    @property
    def side(self) -> tuple[int, int] | None:
        if self.size is None or isinstance(self.size, tuple):
            return self.size
        return (self.size, self.size)

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        return (self.features,) if isinstance(self.features, str) else self.features
