"""Where samples come from: anything with a length and a way to fetch a batch by index.

Here: the `Source` protocol, and the sources made from tensors, arrays and map-style Datasets. Not here: data sets
known by name (`named.py`), the order of samples (`order.py`), fetching ahead (`prefetch.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from syncline.errors import ConfigError, DataError

__all__ = ["ArraySource", "DatasetSource", "Source", "as_source", "inputs_only"]

Indices = Sequence[int] | np.ndarray


class Source(Protocol):
    """Samples by index.

    One whose samples lie in groups that are best read one after the other may say so with `group_sizes`, and with
    `window` how many of these are to be mixed at a time (`order.py`).
    """

    def __len__(self) -> int:
        """How many samples there are."""

    def fetch(self, indices: Indices) -> Any:
        """The samples at `indices`, collated into one batch."""


class ArraySource:
    """Tensors or arrays with the samples along the first dimension.

    Integer images may be kept small in memory: with `scale=(mean, deviation)` the first array is turned into
    floats batch by batch, `(x / 255 - mean) / deviation`.
    """

    def __init__(self, *arrays: torch.Tensor | np.ndarray, scale: tuple[float, float] | None = None) -> None:
        if not arrays:
            raise ConfigError("An ArraySource needs at least one array.")
        self.tensors = tuple(torch.as_tensor(a) for a in arrays)
        if any(t.dim() == 0 for t in self.tensors):
            raise DataError("The data is a single number. Give an array with one row for each sample.")
        lengths = [len(t) for t in self.tensors]
        if len(set(lengths)) > 1:
            raise DataError(
                f"The arrays have {', '.join(map(str, lengths))} samples. Inputs and targets must have one row "
                "for each sample: give arrays of the same length."
            )
        self.scale = scale

    def __len__(self) -> int:
        return len(self.tensors[0])

    @property
    def bytes_per_sample(self) -> int:
        """How large one fetched sample is."""
        sizes = [t.nbytes // max(len(t), 1) for t in self.tensors]
        return sum(sizes) + (3 * sizes[0] if self.scale is not None else 0)

    def fetch(self, indices: Indices) -> tuple[torch.Tensor, ...]:
        """One gather per array."""
        index = torch.as_tensor(np.asarray(indices, dtype=np.int64))
        parts = [t.index_select(0, index) for t in self.tensors]
        if self.scale is not None:
            mean, deviation = self.scale
            parts[0] = parts[0].float().mul_(1.0 / (255.0 * deviation)).sub_(mean / deviation)
        return tuple(parts)


class DatasetSource:
    """A map-style Dataset and the function that makes a batch of its items."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self.dataset = dataset
        self.collate = collate

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # map-style Datasets are Sized by convention only

    def fetch(self, indices: Indices) -> Any:
        """Item by item, then collated."""
        return self.collate([self.dataset[int(i)] for i in indices])


def as_source(data: Any) -> Source:
    """The source for what a user may pass as data: a Source, a Dataset, a tensor, an array or a tuple of these."""
    if isinstance(data, (ArraySource, DatasetSource)):
        return data
    if isinstance(data, TensorDataset):
        return ArraySource(*data.tensors)
    if isinstance(data, (torch.Tensor, np.ndarray)):
        return ArraySource(data)
    if isinstance(data, (tuple, list)) and data and all(isinstance(d, (torch.Tensor, np.ndarray)) for d in data):
        return ArraySource(*data)
    if hasattr(data, "fetch") and hasattr(data, "__len__"):
        return data  # type: ignore[no-any-return]  # it has the two methods that make a Source
    # An IterableDataset inherits a __getitem__ that only raises.
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset):
        return DatasetSource(data)
    if hasattr(data, "__iter__"):
        raise ConfigError(
            f"The data is a {type(data).__name__}, which can only be read from front to back. Exact order, sharing "
            "among workers and resumption need access by index: "
            "give a map-style Dataset (with __getitem__ and __len__)."
        )
    raise ConfigError(
        f"The data is a {type(data).__name__}. Give a name such as 'mnist', a map-style Dataset, a tensor, an array, "
        "or a tuple (inputs, targets) of tensors or arrays."
    )


def inputs_only(source: Source) -> Source:
    """The same samples without their targets, for a model that is to give back its input."""
    if isinstance(source, ArraySource):
        return ArraySource(source.tensors[0], scale=source.scale)
    if isinstance(source, DatasetSource):
        return DatasetSource(source.dataset, lambda items: _first(source.collate(items)))
    return _InputsOnly(source)


class _InputsOnly:
    """A user's own source without its targets."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    @property
    def group_sizes(self) -> np.ndarray | None:
        """As the source has them."""
        return getattr(self._source, "group_sizes", None)

    @property
    def window(self) -> int:
        """As the source has it."""
        return getattr(self._source, "window", 1)

    def fetch(self, indices: Indices) -> Any:
        """What comes first."""
        return _first(self._source.fetch(indices))


def _first(batch: Any) -> Any:
    return batch[0] if isinstance(batch, (tuple, list)) else batch
