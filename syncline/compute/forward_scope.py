"""Channels-last memory inside a model's forward pass, and ordinary memory outside of it.

Compiled convolutions need channels-last images. A user's own script may depend on the order of memory wherever it sees
a tensor: `view` refuses a channels-last one. So the layers compute in channels-last memory only while the forward pass
of a whole model is running, of which a trial has shown that it works so, and its outputs are given back in ordinary
memory. Parameters stay as they are.

Here: `ForwardScope`, which knows whether such a pass is running, and `keep_dropout_masks`. Not here: the layers that
ask whether they are inside (`convolutions.py`), and the functions that are replaced inside (`functional_pooling.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from syncline.compute.functional_pooling import CompiledPooling, may_pool_functionally
from syncline.compute.local_hook import LocalHook, register_local_hook


class ForwardScope:
    """Whether the forward pass of one of the models is running, in a training step."""

    def __init__(self) -> None:
        self.is_active = False
        self._hooks: list[Any] = []
        self._left: list[Any] = []  # hooks of forward passes that have failed
        self._pools: dict[int, bool] = {}  # of each model, whether it calls pooling functions, once that is known

    def watch(self, models: Iterable[nn.Module]) -> None:
        """Be active during the forward passes of these models, and of no others."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = [register_local_hook(model, LocalHook(self._enter)) for model in models]

    @contextmanager
    def active(self, model: nn.Module) -> Iterator[None]:
        """Be active inside this context, in which `model` is called."""
        outer, self.is_active = self.is_active, True
        try:
            with self._pooling(model):
                yield
        finally:
            self.is_active = outer

    @contextmanager
    def _pooling(self, model: nn.Module) -> Iterator[None]:
        """Replace pooling functions; after a pass without any, look no more, as that costs time in each function."""
        if not self._pools.setdefault(id(model), may_pool_functionally(model)):
            yield
            return
        with CompiledPooling() as mode:
            yield
        self._pools[id(model)] = mode.calls > 0

    def _enter(self, model: nn.Module) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        scope: AbstractContextManager[None] = nullcontext() if self.is_active else self.active(model)
        scope.__enter__()
        while self._left:
            self._left.pop().remove()

        def leave(_model: nn.Module, _arguments: Any, outputs: Any) -> Any:
            scope.__exit__(None, None, None)
            if outputs is None:  # an exception, after which torch iterates over the hooks themselves
                self._left.append(hook)
            else:
                hook.remove()
            return pytree.tree_map_only(torch.Tensor, _ordinary, outputs)

        # Only for this forward pass: the model may be pickled with its hooks at any other time.
        hook = model.register_forward_hook(leave, always_call=True)


def keep_dropout_masks(model: nn.Module) -> None:
    """Make the Dropout layers of `model` drop the same elements whatever the memory format is.

    torch draws a mask in the order of memory. In channels-last memory that would be another mask. Dropout often stands
    before the images are flattened, from where gradients come back contiguous: the layers give them on in the memory
    format of their input, because torch's max pooling takes six times as long for gradients in another one.
    """
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.__class__ = _OrderedDropout


class _OrderedDropout(nn.Dropout):
    """Torch's layer with masks in the order of the dimensions. Instances get this class by assignment."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # the name is torch's
        if not self.training or self.inplace or input.is_contiguous():
            return super().forward(input)
        if input.requires_grad and input.dim() == 4:
            input.register_hook(_as_channels_last)  # type: ignore[no-untyped-call]
        return input * super().forward(torch.ones(input.shape, dtype=input.dtype, device=input.device))

    def _get_name(self) -> str:
        return nn.Dropout.__name__  # where a user prints the model

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as torch's layer."""
        del protocol
        return nn.Dropout, (), self.__dict__


def _as_channels_last(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.contiguous(memory_format=torch.channels_last)


def _ordinary(tensor: torch.Tensor) -> torch.Tensor:
    is_channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.contiguous() if is_channels_last else tensor
