"""The tensors in a state that is being saved: how much they take, a copy of them, or the same memory.

Here: pure functions over nested dicts, lists and tuples. Not here: when a copy is needed (`writer.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch


def copied(value: Any) -> Any:
    """A copy of `value` with every tensor copied to CPU memory."""
    return _with_tensors(value, _copy)


def in_place(value: Any) -> Any:
    """A copy of `value` with the same tensors, each as if its memory were its own; nothing of that is copied.

    `torch.save` writes the whole memory that a tensor is a view of, and parameters can be views of one vector with all
    of them, or of memory that workers share. Two names for one tensor are written once. What torch cannot see this way
    is copied: tensors on other devices, with gaps, or of special kinds.
    """
    seen: dict[Any, torch.Tensor] = {}

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if not _is_dense(tensor):
            return _copy(tensor)
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in seen:
            memory = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
            whole = torch.from_numpy(memory).view(tensor.dtype)
            seen[key] = whole.as_strided(tensor.shape, tensor.stride())
        return seen[key]

    return _with_tensors(value, own)


def bytes_in(value: Any) -> int:
    """How much memory the tensors in `value` take."""
    sizes: list[int] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    _with_tensors(value, count)
    return sum(sizes)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor is plain CPU memory without gaps."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not is_plain or tensor.device.type != "cpu" or not tensor.numel():
        return False
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of `value` with `change` applied to every tensor in it."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, OrderedDict):
        ordered = OrderedDict((k, _with_tensors(v, change)) for k, v in value.items())
        vars(ordered).update(vars(value))  # a Module's `_metadata`: the version of each layer's state
        return ordered
    if isinstance(value, dict):
        return {k: _with_tensors(v, change) for k, v in value.items()}
    if isinstance(value, list):
        return [_with_tensors(v, change) for v in value]
    if isinstance(value, tuple):
        items = [_with_tensors(v, change) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
