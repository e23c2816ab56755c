"""Transformations of images: tensors of (height, width) or (height, width, channels), or PIL's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch


class Compose:
    def __init__(self, steps: Sequence[Callable[[Any], Any]]) -> None:
        self.steps = steps

    def __call__(self, image: Any) -> Any:
        for step in self.steps:
            image = step(image)
        return image


class ToTensor:
    def __call__(self, image: Any) -> torch.Tensor:
        if not isinstance(image, torch.Tensor):
            image = torch.from_numpy(np.array(image))
        channels_first = image.unsqueeze(0) if image.dim() == 2 else image.permute(2, 0, 1)
        return channels_first.to(torch.get_default_dtype()).div(255)


class Normalize:
    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return (image - self.mean) / self.std


class Resize:
    def __init__(self, size: Any) -> None:
        self.size = size

    def __call__(self, image: Any) -> Any:
        if not isinstance(image, torch.Tensor):
            return image.resize(self.size)
        resized = torch.nn.functional.interpolate(image[None, None].float(), size=(self.size, self.size))
        return resized[0, 0].to(torch.uint8)


class RandomCrop:
    def __init__(self, size: int, padding: int) -> None:
        self.size, self.padding = size, padding

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        p = self.padding
        padded = torch.nn.functional.pad(image, (0, 0, p, p, p, p))
        top, left = (int(torch.randint(2 * p + 1, ())) for _ in range(2))
        return padded[top : top + self.size, left : left + self.size]


class RandomResizedCrop:
    def __init__(self, size: tuple[int, int], scale: tuple[float, float]) -> None:
        self.size, self.scale = size, scale

    def __call__(self, image: Any) -> Any:
        side = float(torch.empty(()).uniform_(*self.scale)) ** 0.5
        width, height = int(image.width * side), int(image.height * side)
        left = int(torch.randint(image.width - width + 1, ()))
        top = int(torch.randint(image.height - height + 1, ()))
        return image.resize(self.size, box=(left, top, left + width, top + height))


class RandomHorizontalFlip:
    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image.flip(1) if random.random() < 0.5 else image
