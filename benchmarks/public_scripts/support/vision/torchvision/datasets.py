"""MNIST from its files, and random images in place of CIFAR-10."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


class _Images(Dataset[Any]):
    data: torch.Tensor
    targets: torch.Tensor
    transform: Callable[[Any], Any] | None

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image: Any = self.data[index]
        return self.transform(image) if self.transform is not None else image, int(self.targets[index])


class MNIST(_Images):
    def __init__(self, root: str, train: bool = True, transform: Any = None, download: bool = False) -> None:
        del root, download
        folder, part, count = Path(os.environ["MNIST"]), "train" if train else "t10k", int(os.environ["IMAGES"])
        pixels = gzip.decompress((folder / f"{part}-images-idx3-ubyte.gz").read_bytes())[16:]
        labels = gzip.decompress((folder / f"{part}-labels-idx1-ubyte.gz").read_bytes())[8:]
        count = count if train else max(200, count // 10)
        self.data = torch.from_numpy(np.frombuffer(pixels, np.uint8).copy()).view(-1, 28, 28)[:count]
        self.targets = torch.from_numpy(np.frombuffer(labels, np.uint8).copy()).long()[:count]
        self.transform = transform


class CIFAR10(_Images):
    def __init__(self, root: str, train: bool = True, transform: Any = None, download: bool = False) -> None:
        del root, download
        count = int(os.environ["IMAGES"]) if train else 200
        generator = torch.Generator().manual_seed(int(train))
        self.data = torch.randint(256, (count, 32, 32, 3), generator=generator, dtype=torch.uint8)
        self.targets = torch.randint(10, (count,), generator=generator)
        self.transform = transform
