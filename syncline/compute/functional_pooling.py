"""Max pooling by compiled code where a model calls `F.max_pool2d` instead of having a layer.

Here: `CompiledPooling`, which takes the place of the function while a forward pass is running. The values are
bit-identical to torch's, so nothing has to be measured first. Not here: pooling layers (`pooling.py`), and when it is
active (`forward_scope.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from syncline.compute.pooling import is_pool_applicable, pool, tunable_pools


class CompiledPooling(TorchFunctionMode):
    """Uses compiled code for each call of `F.max_pool2d` that it supports."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        """How many calls were replaced so far."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func is F.max_pool2d:
            x, layer = args[0], nn.MaxPool2d(*args[1:], **kwargs)
            if is_pool_applicable(layer, x):
                self.calls += 1
                return pool(layer, "compiled", x)
        return func(*args, **kwargs)


def may_pool_functionally(model: nn.Module) -> bool:
    """Whether to look for such calls.

    Not with several threads, as the compiled code uses one; not in models with pooling layers, as these have been
    measured; and not in models that torch compiles, which it would do once more for this mode.
    """
    is_compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules())
    return torch.get_num_threads() == 1 and not is_compiled and next(tunable_pools(model), None) is None
