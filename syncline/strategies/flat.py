"""A model's parameters as one flat vector, and back.

Here: `FlatParameters`, and the order in which numbers lie in such a vector: parameter after parameter, each as its
memory has it, so that a channels-last weight is a plain copy. The gradients lie in the same order (`gradients.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from syncline.errors import ConfigError

__all__ = ["FlatParameters", "dense_strides", "distance", "views_of"]


def dense_strides(p: torch.Tensor) -> tuple[int, ...]:
    """The strides of `p` if it fills its memory without gaps, else those of an ordinary tensor of its shape."""
    is_dense = p.is_contiguous() or (p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last))
    return p.stride() if is_dense else torch.empty(p.shape, device="meta").stride()


def views_of(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of `flat` that belong to the parameters, each with its parameter's shape and order in memory."""
    views, offset = [], 0
    for p in parameters:
        views.append(flat.as_strided(p.shape, dense_strides(p), flat.storage_offset() + offset))
        offset += p.numel()
    return views


class FlatParameters:
    """The parameters of a model, all of one type, read and written as one vector."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, what: str = "This strategy") -> None:
        self.parameters = list(parameters)
        dtypes = {p.dtype for p in self.parameters}
        if len(dtypes) > 1:
            names = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
            raise ConfigError(
                f"{what} exchanges whole models, whose parameters must be of one type, and this one has {names}. "
                "Convert the model to one of them, or use --strategy allreduce."
            )
        self.dtype = next(iter(dtypes), torch.float32)
        self.device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self.numel = sum(p.numel() for p in self.parameters)
        self._moved_to: torch.Tensor | None = None

    def empty(self) -> torch.Tensor:
        return torch.empty(self.numel, dtype=self.dtype, device=self.device)

    def read(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Copy them into `out`, or into a new vector."""
        out = self.empty() if out is None else out
        with torch.no_grad():
            torch._foreach_copy_(views_of(out, self.parameters), [p.detach() for p in self.parameters])
        return out

    def write(self, flat: torch.Tensor) -> None:
        with torch.no_grad():
            torch._foreach_copy_([p.detach() for p in self.parameters], views_of(flat, self.parameters))

    def move_to(self, flat: torch.Tensor) -> None:
        """Let the parameters live in `flat` from now on, with what it holds."""
        for p, view in zip(self.parameters, views_of(flat, self.parameters), strict=True):
            p.data = view
        self._moved_to = flat

    def leave_memory(self) -> None:
        """Copy the parameters out of the memory that `move_to` has moved them to, if it has."""
        if self._moved_to is not None:
            self.move_to(self._moved_to.clone())


def distance(own: torch.Tensor, common: torch.Tensor) -> float:
    """How far `own` is from what all have in common, relative to that."""
    return float(torch.linalg.vector_norm(own - common) / torch.linalg.vector_norm(common).clamp_min(1e-12))
