"""Sources of samples: anything with a length and batches by index.

Here: the `Source` protocol, and sources of tensors, arrays and map-style Datasets. Not here: datasets by name
(`named.py`), the order of samples (`order.py`), prefetching (`prefetch.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from syncline.data.collating import misfit
from syncline.data.length import length_of
from syncline.errors import ConfigError, DataError

Indices = Sequence[int] | np.ndarray


class Source(Protocol):
    """Samples by index.

    A source whose samples are stored in groups may have `group_sizes`, and `window`, the number of groups to shuffle
    together (`order.py`).
    """

    def __len__(self) -> int:
        """How many samples there are."""

    def fetch(self, indices: Indices) -> Any:
        """The samples at `indices`, collated into one batch."""


class ArraySource:
    """Tensors or arrays with the samples along the first dimension.

    Images can stay uint8 in memory: with `scale=(mean, std)` each batch of the first array is converted to floats,
    `(x / 255 - mean) / std`.
    """

    def __init__(self, *arrays: torch.Tensor | np.ndarray, scale: tuple[float, float] | None = None) -> None:
        if not arrays:
            raise ConfigError("An ArraySource needs at least one array.")
        self.tensors = tuple(torch.as_tensor(a) for a in arrays)
        if any(t.dim() == 0 for t in self.tensors):
            raise DataError("The data is a single number. Pass an array with one row per sample.")
        lengths = [len(t) for t in self.tensors]
        if len(set(lengths)) > 1:
            raise DataError(
                f"The arrays have {', '.join(map(str, lengths))} samples. Inputs and targets must have one row "
                "per sample: pass arrays of the same length."
            )
        self.scale = scale

    def __len__(self) -> int:
        return len(self.tensors[0])

    @property
    def bytes_per_sample(self) -> int:
        """The size of one fetched sample in bytes."""
        sizes = [t.nbytes // max(len(t), 1) for t in self.tensors]
        return sum(sizes) + (3 * sizes[0] if self.scale is not None else 0)

    def fetch(self, indices: Indices) -> tuple[torch.Tensor, ...]:
        index = torch.as_tensor(np.asarray(indices, dtype=np.int64))
        parts = [t.index_select(0, index) for t in self.tensors]
        if self.scale is not None:
            mean, deviation = self.scale
            parts[0] = parts[0].float().mul_(1.0 / (255.0 * deviation)).sub_(mean / deviation)
        return tuple(parts)


class DatasetSource:
    """A map-style Dataset and its collate function."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self.dataset = dataset
        self.collate = collate

    def __len__(self) -> int:
        return length_of(self.dataset)

    def fetch(self, indices: Indices) -> Any:
        """Fetch items one by one, then collate."""
        return self.collated(indices, [self.dataset[int(i)] for i in indices])

    def collated(self, indices: Indices, items: list[Any]) -> Any:
        """The `items` at `indices` as one batch; `DataError` names the first that does not fit the others."""
        try:
            return self.collate(items)
        except Exception as error:
            is_default = getattr(self.collate, "collate", self.collate) is default_collate
            problem = misfit([int(i) for i in indices], items) if is_default else None
            if problem is None:
                raise  # the user's own collate function, or a type that torch cannot collate, which it names
            raise problem from error


def as_source(data: Any) -> Source:
    """The source for a user's data: a Source, a Dataset, a tensor, an array or a tuple of these."""
    if isinstance(data, (ArraySource, DatasetSource)):
        return data
    if isinstance(data, TensorDataset):
        return ArraySource(*data.tensors)
    if isinstance(data, (torch.Tensor, np.ndarray)):
        return ArraySource(data)
    if isinstance(data, (tuple, list)) and data and all(isinstance(d, (torch.Tensor, np.ndarray)) for d in data):
        return ArraySource(*data)
    if hasattr(data, "fetch") and hasattr(data, "__len__"):
        return data  # type: ignore[no-any-return]  # it has both methods of a Source
    # An IterableDataset inherits a __getitem__ that only raises.
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset):
        return DatasetSource(data)
    if hasattr(data, "__iter__"):
        raise ConfigError(
            f"The data is a {type(data).__name__}, which can only be iterated. Sharding among workers and exact "
            "resuming need access by index. Pass a map-style Dataset (with __getitem__ and __len__).",
            code="not-indexable",
            type=type(data).__name__,
        )
    raise ConfigError(
        f"The data is a {type(data).__name__}. Pass a name such as 'mnist', a map-style Dataset, a tensor, an array, "
        "or a tuple (inputs, targets) of tensors or arrays.",
        code="unsupported-data",
        type=type(data).__name__,
    )


def inputs_only(source: Source) -> Source:
    """The same samples without targets, for a model that reconstructs its input."""
    if isinstance(source, ArraySource):
        return ArraySource(source.tensors[0], scale=source.scale)
    if isinstance(source, DatasetSource):
        return DatasetSource(source.dataset, _FirstOf(source.collate))
    return _InputsOnly(source)


class WrappedSource:
    """Another source, grouped as that is, with changed samples."""

    def __init__(self, base: Source) -> None:
        self.base = base

    def __len__(self) -> int:
        return len(self.base)

    @property
    def group_sizes(self) -> np.ndarray | None:
        return getattr(self.base, "group_sizes", None)

    @property
    def window(self) -> int:
        return getattr(self.base, "window", 1)


class _FirstOf:
    """Collates, and keeps the first part of the batch."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, items: list[Any]) -> Any:
        return _first(self.collate(items))


class _InputsOnly(WrappedSource):
    """A user's source without its targets."""

    def fetch(self, indices: Indices) -> Any:
        return _first(self.base.fetch(indices))


def _first(batch: Any) -> Any:
    return batch[0] if isinstance(batch, (tuple, list)) else batch
