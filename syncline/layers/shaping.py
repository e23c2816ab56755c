"""Layers that only change the shape, or pick a part. Dimension 0 is the batch, and stays."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

__all__ = ["Average", "Last", "Permute", "Reshape", "Squeeze", "Unsqueeze"]


class Last(nn.Module):
    """The last step of a sequence, (N, T, ...) to (N, ...): what follows a recurrent layer in a classifier."""

    def forward(self, input: Tensor) -> Tensor:  # the name is torch's
        """The end of dimension 1."""
        return input[:, -1]


class Permute(nn.Module):
    """The dimensions of each sample in another order: permute(2, 1) makes (N, T, F) to (N, F, T)."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = tuple(dims)

    def forward(self, input: Tensor) -> Tensor:
        """As `Tensor.permute` does, with the batch first."""
        return input.permute(0, *self.dims)

    def extra_repr(self) -> str:
        """The order."""
        return ", ".join(map(str, self.dims))


class Reshape(nn.Module):
    """The numbers of each sample in another shape; one size may be -1, which means what is left."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)

    def forward(self, input: Tensor) -> Tensor:
        """As `Tensor.reshape` does, with the batch first."""
        return input.reshape(len(input), *self.shape)

    def extra_repr(self) -> str:
        """The shape."""
        return f"shape={self.shape}"


class Average(nn.Module):
    """The mean over some dimensions: over time with average(1), over the pixels of an image with average([2, 3])."""

    def __init__(self, dim: int | Sequence[int], keepdim: bool = False) -> None:
        super().__init__()
        self.dim, self.keepdim = tuple(dim) if isinstance(dim, Sequence) else dim, keepdim

    def forward(self, input: Tensor) -> Tensor:
        """As `Tensor.mean` does."""
        return input.mean(dim=self.dim, keepdim=self.keepdim)

    def extra_repr(self) -> str:
        """The dimensions."""
        return f"dim={self.dim}"


class Squeeze(nn.Module):
    """Without a dimension of size 1."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, input: Tensor) -> Tensor:
        """As `Tensor.squeeze` does."""
        return input.squeeze(self.dim)

    def extra_repr(self) -> str:
        """The dimension."""
        return f"dim={self.dim}"


class Unsqueeze(nn.Module):
    """With another dimension, of size 1."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, input: Tensor) -> Tensor:
        """As `Tensor.unsqueeze` does."""
        return input.unsqueeze(self.dim)

    def extra_repr(self) -> str:
        """The dimension."""
        return f"dim={self.dim}"
