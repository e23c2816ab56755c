"""torch's dropout operators, with masks by sample while a forward pass is running.

Here: `replace_operators`, which registers other kernels for them with torch's dispatcher. All ways to call dropout end
there: `nn.Dropout`, `F.dropout`, `torch.dropout`, under whatever name they were imported, `nn.MultiheadAttention` and
`F.scaled_dot_product_attention`; and no other operator takes longer. Outside of a forward pass, and for what cannot be
divided by sample, they are torch's own. Not here: when a forward pass is running (`dropout.py`), and the masks
(`kernels/dropout.py`).

`nn.LSTM`, `nn.GRU` and `nn.RNN` drop between their layers inside of one operator: it is called for each layer, with
dropout in between.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from syncline.compute.dropout import DropoutCall, current_scope, is_repeating, repeated_call
from syncline.compute.kernels import dropout as masks

_ALPHA = 1.7580993408473766
"""The negative saturation value of SELU (Klambauer et al., Self-Normalizing Neural Networks, 2017)."""

_DEVICES = ("CPU", "CUDA", "MPS")
_Operator = Callable[..., Any]


@functools.cache
def replace_operators() -> torch.library.Library:
    """Register the kernels, once in a process."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    kernels = {
        **{name: _elementwise(getattr(torch.ops.aten, name).default, **options) for name, options in _VARIANTS.items()},
        **{f"{name}.input": _recurrent(getattr(torch.ops.aten, name).input) for name in _RECURRENT},
        **{f"{name}.data": _packed(getattr(torch.ops.aten, name).data) for name in _RECURRENT},
    }
    for name, kernel in kernels.items():
        for device in _DEVICES:
            library.impl(name, kernel, f"Autograd{device}")  # type: ignore[no-untyped-call]
    return library


def drop_by_row(x: torch.Tensor, rows: torch.Tensor, p: float) -> torch.Tensor:
    """Dropout of `x` whose masks depend on the numbers of its `rows`; outside of a step, torch's own."""
    scope = current_scope()
    if scope is None or not x.numel():
        return torch.nn.functional.dropout(x, p)
    dropped: torch.Tensor = _Drop.apply(x.contiguous(), scope.call_of(rows), p)  # type: ignore[no-untyped-call]
    return dropped


def ones_by_row(shape: torch.Size, rows: torch.Tensor, p: float, dtype: torch.dtype) -> torch.Tensor:
    """Ones, some of them zero and the others scaled up, as `drop_by_row` would multiply with."""
    scope = current_scope()
    if scope is None or not math.prod(shape):
        return torch.nn.functional.dropout(torch.ones(shape, dtype=dtype), p)
    call = scope.call_of(rows)
    return masks.ones(call.draw(p), call.samples, shape, dtype, rows.device)


def step_key(number: int) -> int:
    """64 random bits for purpose `number`: the same on all workers in a step, outside of one drawn by torch."""
    scope = current_scope()
    return int(torch.randint(2**62, ())) if scope is None else scope.key_of(number)


_KINDS = {
    "": {"of_features": False, "is_alpha": False}, "feature_": {"of_features": True, "is_alpha": False},
    "alpha_": {"of_features": False, "is_alpha": True}, "feature_alpha_": {"of_features": True, "is_alpha": True},
}  # fmt: skip
_VARIANTS = {
    f"{kind}dropout{suffix}": {**options, "in_place": bool(suffix)}
    for kind, options in _KINDS.items()
    for suffix in ("", "_")
}
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def _elementwise(of_torch: Any, *, of_features: bool, is_alpha: bool, in_place: bool) -> _Operator:
    def kernel(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # the names are torch's
        is_valid = input.dim() > 1 or not of_features  # otherwise torch says what is wrong
        call = _call_for(input) if train and 0 < p < 1 and input.numel() > 0 and is_valid else None
        if call is None:
            return of_torch.decompose(input, p, train)  # type: ignore[no-any-return]
        if not (of_features or is_alpha or in_place) and call.axis == 0 and input.is_contiguous():
            return _Drop.apply(input, call, p)  # type: ignore[no-any-return, no-untyped-call]
        noise = _noise(call, p, input, of_features=of_features)
        if is_alpha:
            return _alpha_dropped(input, noise != 0, p, in_place=in_place)
        return input.mul_(noise) if in_place else input * noise

    return kernel


def _call_for(x: torch.Tensor) -> DropoutCall | None:
    """The call of dropout by sample; None if torch draws the mask."""
    scope = current_scope()
    if scope is None:
        return repeated_call()
    if type(x) not in (torch.Tensor, torch.nn.Parameter):
        is_compiled = type(x).__module__.startswith("torch._")  # what torch.compile traces a model with
        scope.leave_to_torch("in a compiled model" if is_compiled else f"for a {type(x).__name__}")
        return None
    return scope.call(x) if x.is_floating_point() else None


class _Drop(torch.autograd.Function):
    """Dropout of a contiguous tensor. Nothing is kept for the backward pass: the mask is computed again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: DropoutCall, p: float) -> torch.Tensor:
        ctx.call, ctx.p = call, p
        return masks.drop(call.draw(p), call.samples, x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The gradient of the input, which has derivatives of its own."""
        return _Drop.apply(dy.contiguous(), ctx.call, ctx.p), None, None  # type: ignore[no-untyped-call]


def _noise(call: DropoutCall, p: float, x: torch.Tensor, *, of_features: bool = False) -> torch.Tensor:
    """What to multiply `x` by, in its memory format; of features: the same for all elements of a channel."""
    shape = [*x.shape[:2], *(1 for _ in x.shape[2:])] if of_features else list(x.shape)
    if call.axis == 1:
        shape[:2] = shape[1], shape[0]
    noise = masks.ones(call.draw(p), call.samples, torch.Size(shape), x.dtype, x.device)
    if call.axis == 1:
        return noise.transpose(0, 1)
    is_channels_last = noise.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return noise.contiguous(memory_format=torch.channels_last) if is_channels_last else noise


def _alpha_dropped(x: torch.Tensor, kept: torch.Tensor, p: float, *, in_place: bool) -> torch.Tensor:
    """a (x kept - alpha (1 - kept)) + a alpha p, which keeps mean and variance."""
    a = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
    noise = kept.to(x.dtype)
    shift = noise.add(-1).mul_(_ALPHA * a).add_(_ALPHA * a * p)
    noise.mul_(a)
    return x.mul_(noise).add_(shift) if in_place else (x * noise).add_(shift)


def _recurrent(of_torch: Any) -> _Operator:
    def kernel(
        input: torch.Tensor,  # the names are torch's
        hx: torch.Tensor | Sequence[torch.Tensor],
        params: Sequence[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[torch.Tensor, ...]:
        drops = train and 0 < dropout < 1 and num_layers > 1 and type(input) is torch.Tensor
        if not drops or (current_scope() is None and not is_repeating()):
            result: tuple[torch.Tensor, ...] = of_torch.decompose(
                input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
            )
            return result
        x = input.transpose(0, 1) if batch_first else input
        ends: list[Sequence[torch.Tensor]] = []
        for number, (states, weights) in enumerate(_layers(hx, params, num_layers)):
            if number > 0:
                x = _drop_sequence(x, dropout)
            x, *end = of_torch.decompose(x, states, weights, has_biases, 1, 0.0, train, bidirectional, False)
            ends.append(end)
        return x.transpose(0, 1) if batch_first else x, *(torch.cat(end) for end in zip(*ends, strict=True))

    return kernel


def _layers(
    states: torch.Tensor | Sequence[torch.Tensor], params: Sequence[torch.Tensor], count: int
) -> Iterator[tuple[Any, Sequence[torch.Tensor]]]:
    """The states and the parameters of each layer."""
    per_layer = len(params) // count
    for number in range(count):
        own = [state.chunk(count)[number] for state in ([states] if isinstance(states, torch.Tensor) else states)]
        yield (
            own[0] if isinstance(states, torch.Tensor) else own,
            params[number * per_layer : (number + 1) * per_layer],
        )


def _drop_sequence(x: torch.Tensor, p: float) -> torch.Tensor:
    """Dropout of (time, samples, features)."""
    scope = current_scope()
    call = scope.call(x, axis=1) if scope is not None else repeated_call()
    assert call is not None, "the generator has not changed since the operator was called"
    return x * _noise(call, p, x)


def _packed(of_torch: Any) -> _Operator:
    def kernel(*arguments: Any) -> tuple[torch.Tensor, ...]:
        num_layers, dropout, train, _is_bidirectional = arguments[-4:]
        scope = current_scope()
        if scope is not None and train and dropout > 0 and num_layers > 1:
            # Sequences of different lengths are sorted, and only the script knows how.
            scope.leave_to_torch("between recurrent layers with packed sequences")
        result: tuple[torch.Tensor, ...] = of_torch.decompose(*arguments)
        return result

    return kernel
