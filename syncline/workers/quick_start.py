"""Starting a worker without loading torch's compiler.

torch guards its optimizers against tracing by its compiler, and for that loads the compiler (1.4 s on our machine, as
long as torch itself) when the first optimizer is created, whether anything is compiled or not. `without_compiler`
removes the guards for as long as the compiler is not loaded; once user code loads it, they work as usual. In the same
way DistributedDataParallel loads the compiler: to ask it for one setting, and for a guard in its forward pass.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
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
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    ddp.__init__ = _without_asking(ddp.__init__)
    forward = inspect.unwrap(ddp._inside_ddp_forward)
    ddp._inside_ddp_forward = _unless_loaded(ddp._inside_ddp_forward, contextlib.contextmanager(forward))


def _unless_loaded(guarded: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (guarded if _COMPILER in sys.modules else plain)(*args, **kwargs)

    return call


class _Unloaded:
    """Stands in for a module of the compiler: answers what is known, and loads the module for anything else."""

    def __init__(self, name: str, **known: Any) -> None:
        self._name = name
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


def _without_asking(init: Callable[..., None]) -> Callable[..., None]:
    """DDP's constructor, which gets the compiler's default for `optimize_ddp` without loading the compiler."""
    utils = _Unloaded(f"{_COMPILER}.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
    unloaded: Any = _Unloaded(_COMPILER, utils=utils)

    @functools.wraps(init)
    def construct(*args: Any, **kwargs: Any) -> None:
        if _COMPILER not in sys.modules:
            torch._dynamo = unloaded
        try:
            init(*args, **kwargs)
        finally:
            if vars(torch).get("_dynamo") is unloaded:
                del torch._dynamo

    return construct


def _unguarded(guarded: Callable[..., Any]) -> Callable[..., Any]:
    plain = guarded.__wrapped__  # type: ignore[attr-defined]  # checked by the caller

    @functools.wraps(plain)
    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if _COMPILER in sys.modules:
            return guarded(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults.get("differentiable", False)):
            return plain(self, *args, **kwargs)

    return step
