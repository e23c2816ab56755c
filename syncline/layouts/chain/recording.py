"""Recording a forward pass: which modules and functions a model calls, in which order, with what.

The model runs as always, on real tensors. A `TorchFunctionMode` sees every torch function; `nn.Module.__call__` and
`torch.autograd.Function.apply` are replaced for the duration. Modules that are kept whole (`whole_modules.py`) are one
step, whatever they do inside; other modules are opened, and what they do is recorded. Tensors are known by identity.

Symbolic tracing (torch.fx) would stop at the first `if` about an argument or a shape, as in all models of transformers;
`torch.export` would replace the modules by their operations, and lose hooks and replaced forward functions. What
recording cannot see, a check finds (`checking.py`). Not here: what depends on the batch size (`parts.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from syncline.layouts.chain.parts import Fixed, Held, Part, Use, leaves_of, part_of
from syncline.layouts.chain.untouched import are_equal, random_states

_READERS = {
    "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__",
    "__contains__", "is_nonzero", "equal", "allclose",
}  # fmt: skip
"""Functions that bring the numbers of a tensor to Python, where a program can branch on them."""


class Untraceable(Exception):
    """What a module does cannot be recorded; `reason` completes "because ..."."""

    def __init__(self, scope: str, reason: str) -> None:
        super().__init__(reason)
        self.scope, self.reason = scope, reason


@dataclass(frozen=True)
class Context:
    """What surrounds an operation and changes its result."""

    has_gradients: bool
    autocast: torch.dtype | None

    @classmethod
    def current(cls, device: str) -> Context:
        """That of the caller."""
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return cls(torch.is_grad_enabled(), dtype)


@dataclass(frozen=True)
class Step:
    """A call of a module or function."""

    target: Any
    """The module or function."""
    arguments: Part
    """(positional, by name)"""
    outputs: tuple[tuple[int, int], ...]
    """Which results are tensors that were not there before, and their numbers."""
    scope: str
    """The opened module that makes the call."""
    context: Context
    is_pure: bool
    """Whether the result depends on nothing but shapes, so that any stage can compute it again."""
    changes: frozenset[int] = frozenset()
    """The values that it changes in place."""


@dataclass
class Recording:
    """What a model does with one batch."""

    samples: int
    inputs: int
    context: Context
    """What surrounds the whole pass."""
    steps: list[Step] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    """The values, by number. They stay here, so that no two of them have the same identity."""
    output: Part = field(default_factory=lambda: Fixed(None))


def record(
    model: nn.Module, forward: Callable[..., Any], inputs: Sequence[Tensor], whole: Callable[[nn.Module], bool]
) -> Recording:
    """What `forward`, the forward pass of the model, does with these inputs."""
    recorder = _Recorder(model, inputs, whole)
    with recorder, _replaced_calls(recorder):
        output = forward(*inputs)
    recorder.recording.output = recorder.parts(output, scope="")
    return recorder.recording


class _Recorder(TorchFunctionMode):
    """Sees the calls of one thread."""

    def __init__(self, model: nn.Module, inputs: Sequence[Tensor], whole: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._device = inputs[0].device
        self.recording = Recording(len(inputs[0]), len(inputs), Context.current(self._device.type))
        self._whole = whole
        self._names = {module: name for name, module in model.named_modules()}
        self._held = dict(_held(model))
        # If the model replaces a buffer, another tensor must not get the identity of the one that was there.
        self._alive = [*model.parameters(), *model.buffers()]
        self._numbers: dict[int, int] = {}
        self._is_data: list[bool] = []
        self._scopes = [""]
        self._is_inside = False
        self._thread = threading.get_ident()
        for tensor in inputs:
            self._add(tensor, is_data=True)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        return self.call(func, func, args, kwargs or {})

    @property
    def is_watching(self) -> bool:
        """Whether a call of this thread is one to record, not one inside of another."""
        return not self._is_inside and threading.get_ident() == self._thread

    def call_module(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """A module's call: a step, or what the module calls."""
        if module not in self._names or self._whole(module):
            return self.call(module, call, args, kwargs)
        self._scopes.append(self._names[module])
        try:
            return call(*args, **kwargs)
        finally:
            self._scopes.pop()

    def call(self, target: Any, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Make a call and record it."""
        if not self.is_watching:
            return call(*args, **kwargs)
        versions = [tensor._version for tensor in self.recording.tensors]
        context = Context.current(self._device.type)
        uses = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        is_data = any(self._depends_on_data(tensor) for tensor in uses) or isinstance(target, nn.Module)
        if is_data and getattr(target, "__name__", "") in _READERS:
            raise Untraceable(self._scopes[-1], "it reads the numbers of a tensor, on which its operations may depend")
        before = None if is_data else random_states(self._device)
        self._is_inside = True
        try:
            result = call(*args, **kwargs)
        finally:
            self._is_inside = False
        is_pure = before is not None and are_equal(before, random_states(self._device))
        now = self.recording.tensors
        changes = frozenset(n for n, version in enumerate(versions) if now[n]._version != version)
        arguments = (args, kwargs)
        if changes or isinstance(target, nn.Module) or any(isinstance(leaf, Tensor) for leaf in leaves_of(result)):
            parts = self.parts(arguments, self._scopes[-1])
            outputs = tuple(self._outputs(result, is_data=not is_pure))
            step = Step(target, parts, outputs, self._scopes[-1], context, is_pure and not changes, changes)
            self.recording.steps.append(step)
        return result

    def parts(self, arguments: Any, scope: str) -> Part:
        """The arguments, with tensors by number."""

        def of_leaf(leaf: Any) -> Part:
            if not isinstance(leaf, Tensor):
                return Fixed(leaf)
            if id(leaf) in self._numbers:
                return Use(self._numbers[id(leaf)])
            if id(leaf) in self._held:
                return self._held[id(leaf)]
            if leaf.requires_grad:
                raise Untraceable(scope, "a tensor with a gradient is computed in a way that cannot be followed")
            return Fixed(leaf)

        return part_of(arguments, of_leaf)

    def _outputs(self, result: Any, *, is_data: bool) -> Iterator[tuple[int, int]]:
        for position, leaf in enumerate(leaves_of(result)):
            if isinstance(leaf, Tensor) and id(leaf) not in self._numbers and id(leaf) not in self._held:
                yield position, self._add(leaf, is_data=is_data)

    def _add(self, tensor: Tensor, *, is_data: bool) -> int:
        number = self._numbers[id(tensor)] = len(self.recording.tensors)
        self.recording.tensors.append(tensor)
        self._is_data.append(is_data)
        return number

    def _depends_on_data(self, tensor: Tensor) -> bool:
        number = self._numbers.get(id(tensor))
        return number is None or self._is_data[number]


def _held(model: nn.Module) -> Iterator[tuple[int, Held]]:
    """The parameters and buffers of the model, by identity. A tied one has the name that comes first."""
    names = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
    for module in model.modules():
        for attribute, tensor in (
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ):
            yield id(tensor), Held(module, attribute, names[id(tensor)])


@contextmanager
def _replaced_calls(recorder: _Recorder) -> Iterator[None]:
    """Have the recorder see the calls of modules and of autograd functions, which no torch function mode sees."""
    call_module, apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not recorder.is_watching:
            return call_module(module, *args, **kwargs)
        return recorder.call_module(module, lambda *a, **k: call_module(module, *a, **k), args, kwargs)

    def applied(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not recorder.is_watching:
            return apply.__func__(cls, *args, **kwargs)
        return recorder.call(cls, lambda *a, **k: apply.__func__(cls, *a, **k), args, kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]  # undone below
    torch.autograd.Function.apply = classmethod(applied)  # type: ignore[assignment, method-assign]  # undone below
    try:
        yield
    finally:
        nn.Module.__call__ = call_module  # type: ignore[method-assign]  # as it was
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]  # as it was
