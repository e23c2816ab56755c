"""Starting a worker without loading torch's compiler.

torch guards its optimizers against tracing by its compiler, and for that loads the compiler (1.4 s on our machine, as
long as torch itself) when the first optimizer is created, whether anything is compiled or not. `without_compiler`
removes the guards for as long as the compiler is not loaded; once user code loads it, they work as usual.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

_COMPILER = "torch._dynamo"
_GUARD_RESULT = "__dynamo_disable"  # where torch caches the guarded form of a function


def without_compiler() -> None:
    """Create and use optimizers without loading torch's compiler. Call this before the first one is created."""
    if _COMPILER in sys.modules:
        return
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        function = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if function is not None and not hasattr(function, _GUARD_RESULT):
            setattr(function, _GUARD_RESULT, function)
    for optimizer in vars(torch.optim).values():
        step = vars(optimizer).get("step") if inspect.isclass(optimizer) else None
        if step is not None and getattr(step, "__name__", "") == "step" and hasattr(step, "__wrapped__"):
            optimizer.step = _unguarded(step)


def _unguarded(guarded: Callable[..., Any]) -> Callable[..., Any]:
    plain = guarded.__wrapped__  # type: ignore[attr-defined]  # checked by the caller

    @functools.wraps(plain)
    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if _COMPILER in sys.modules:
            return guarded(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults.get("differentiable", False)):
            return plain(self, *args, **kwargs)

    return step
