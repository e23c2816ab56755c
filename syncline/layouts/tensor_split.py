"""Which layers of a model the workers of a replica compute together, and which numbers each worker owns then.

Here: `split_of`, a pure function of a model's modules and the number of workers, and `row_pieces`, a pure function of
shapes. Not here: computing (`divided_layers.py`), applying it to a model (`divided_model.py`), and describing it
(`tensor_summary.py`).

A parameter of a divided layer is divided by rows, the indices of its first dimension: each worker computes the
gradients of its rows, and updates them. The rows of a worker lie one after another in memory. A layer is divided if it
is one of torch's own, or of transformers, that computes in the way it is known for, if it is large enough that the work
saved is more than the exchange costs, and if each worker gets a row. All others are whole: all workers compute them, on
the same inputs, and get the same gradients, so that any of them can do the update.

Recurrent layers (LSTM, GRU) are whole: each time step would need an exchange before the next one.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from syncline.compute.convolutions import is_convolution_of_torch
from syncline.compute.partition import share, split
from syncline.errors import ConfigError
from syncline.layouts.shards import Leaf

Kind = Literal["linear", "transposed", "convolution", "embedding", "attention"]
"""How a layer computes; `transposed` is a linear layer whose weight has a row for each input."""

SMALLEST_NUMBERS = 2**14
"""Layers with fewer parameters are whole. A linear layer of this size takes about as long for some tens of samples as
the exchange of its output: tens of microseconds."""
_CUT_NUMBERS = 2**16
"""Whole parameters of this size are updated by all workers, each an equal part; smaller ones by one worker."""


@dataclass(frozen=True)
class DividedLayer:
    """A layer that the workers compute together."""

    name: str
    kind: Kind
    parameters: Mapping[str, str]
    """Its parameters: their names in the module, and in the model. Tied parameters have the first of their names."""


@dataclass(frozen=True)
class Split:
    """How `size` workers divide a model."""

    size: int
    layers: tuple[DividedLayer, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """Of all parameters of the model, in its order."""
    item_bytes: int

    @property
    def divided(self) -> set[str]:
        """The parameters that are divided by rows."""
        return {name for layer in self.layers for name in layer.parameters.values()}

    def count(self, name: str) -> int:
        """How many numbers a parameter has."""
        return math.prod(self.shapes[name])

    def pieces(self, rank: int, names: Sequence[str] | None = None) -> list[Leaf]:
        """What a worker owns of the parameters with these names, which lie one after another in a flat vector."""
        names = list(self.shapes) if names is None else names
        shapes, divided = [self.shapes[name] for name in names], self.divided
        return row_pieces(shapes, [name in divided for name in names], self.size)[rank]


def split_of(model: nn.Module, size: int, *, smallest_numbers: int = SMALLEST_NUMBERS) -> Split:
    """How `size` workers divide `model`; `ConfigError` if they cannot."""
    _check_modules(model)
    names = {id(p): name for name, p in model.named_parameters()}
    sizes = {id(p): p.numel() for p in model.parameters()}
    layers, too_small, too_few = [], [], []
    for name, kind, module in _candidates(model):
        parameters = _parameters_of(kind, module)
        if min(_widths(kind, module)) < size:
            too_few.append(name)
        elif sum(sizes[id(p)] for p in parameters.values()) < smallest_numbers:
            too_small.append(name)
        else:
            layers.append(DividedLayer(name, kind, {own: names[id(p)] for own, p in parameters.items()}))
    if not layers:
        raise _nothing_to_divide(size, too_small, too_few, smallest_numbers)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return Split(size, tuple(layers), shapes, max(p.element_size() for p in model.parameters()))


def row_pieces(shapes: Sequence[Sequence[int]], is_divided: Sequence[bool], size: int) -> list[list[Leaf]]:
    """What each worker owns of parameters that lie one after another: its rows of the divided ones, and some others.

    >>> row_pieces([(3, 4), (5,)], [True, False], 2)
    [[Leaf(parameter=0, low=0, high=8)], [Leaf(parameter=0, low=8, high=12), Leaf(parameter=1, low=12, high=17)]]
    """
    counts = [math.prod(shape) for shape in shapes]
    starts = list(itertools.accumulate(counts, initial=0))
    owned: list[list[Leaf]] = [[] for _ in range(size)]
    totals = [0] * size

    def give(rank: int, number: int, low: int, high: int) -> None:
        if low < high:
            owned[rank].append(Leaf(number, starts[number] + low, starts[number] + high))
        totals[rank] += high - low

    whole = []
    for number, (shape, count) in enumerate(zip(shapes, counts, strict=True)):
        if not is_divided[number] and count < _CUT_NUMBERS:
            whole.append(number)
            continue
        row = count // shape[0] if is_divided[number] and shape[0] else 1
        for rank, (low, high) in enumerate(split(count // row, size)):
            give(rank, number, low * row, high * row)
    # The largest first, each to the worker with the least: no worker has more than another by more than one parameter.
    for number in sorted(whole, key=lambda n: (-counts[n], n)):
        give(totals.index(min(totals)), number, 0, counts[number])
    return [sorted(pieces) for pieces in owned]


def own_rows(rows: int, size: int, rank: int) -> slice:
    """The rows of one worker."""
    return slice(*share(rows, size, rank))


def refusal(why: str, reason: str, *, nearest: str = "sharded", instead: str = "", **facts: Any) -> ConfigError:
    """The error for a run that cannot have this layout."""
    return ConfigError(
        f"--layout tensor is not possible: {why}. Use {f'{instead}, or ' if instead else ''}--layout {nearest}.",
        code="layout", layout="tensor", reason=reason, nearest=nearest, **facts,
    )  # fmt: skip


def _candidates(model: nn.Module) -> Iterator[tuple[str, Kind, nn.Module]]:
    """The modules that can be divided if they are large enough."""
    inside: set[int] = set()  # of an attention, which does not call them
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            inside.update(id(child) for child in module.children())
        kind = None if id(module) in inside else _kind_of(module)
        if kind is not None:
            yield name, kind, module


def _kind_of(module: nn.Module) -> Kind | None:
    """How a module computes, if it is certain: subclasses, hooks and parametrizations may compute something else."""
    for base, kind in (
        (nn.Linear, "linear"),
        (_transformers_conv1d(), "transposed"),
        (nn.Conv1d, "convolution"),
        (nn.Conv2d, "convolution"),
        (nn.Embedding, "embedding"),
        (nn.MultiheadAttention, "attention"),
    ):
        if base is not None and isinstance(module, base) and _computes_as(module, base):
            return kind if _IS_SUPPORTED.get(kind, _always)(module) else None  # type: ignore[return-value]
    return None


def _computes_as(module: nn.Module, base: type[nn.Module]) -> bool:
    plain, known = type(module), {"weight", "bias"}
    if "forward" in module.__dict__ or hasattr(module, "parametrizations"):
        return False
    if base is nn.MultiheadAttention:
        return plain.forward is base.forward
    if not set(module._parameters) <= known or not isinstance(module._parameters.get("weight"), nn.Parameter):
        return False  # weight_norm and others compute the weight from other parameters
    return plain.forward is base.forward or is_convolution_of_torch(module)


def _is_supported_embedding(module: Any) -> bool:
    return not (module.sparse or module.scale_grad_by_freq)


def _is_supported_convolution(module: Any) -> bool:
    return bool(module.groups == 1)


def _always(module: Any) -> bool:
    del module
    return True


def _is_supported_attention(module: Any) -> bool:
    return module.in_proj_weight is not None and module.bias_k is None and not module.add_zero_attn


_IS_SUPPORTED: Mapping[str, Callable[[Any], bool]] = {
    "attention": _is_supported_attention,
    "embedding": _is_supported_embedding,
    "convolution": _is_supported_convolution,
}


_PROJECTIONS = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")


def _transformers_conv1d() -> Any:
    """The linear layer of GPT-2, if transformers is in use."""
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)


def _parameters_of(kind: Kind, module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are divided with a layer, by their names in it."""
    own = dict(module.named_parameters(remove_duplicate=False))
    return {name: own[name] for name in (_PROJECTIONS if kind == "attention" else ("weight", "bias")) if name in own}


def _widths(kind: Kind, module: nn.Module) -> list[int]:
    """The numbers of rows, and of outputs, of which each worker has to get one."""
    widths = [p.shape[0] for p in _parameters_of(kind, module).values()]
    return [*widths, module.weight.shape[1]] if kind == "transposed" else widths  # type: ignore[index,list-item]


def _check_modules(model: nn.Module) -> None:
    """Refuse what would be wrong, whichever layers are divided."""
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise refusal("the model is compiled by torch.compile, which does not know of workers", "compiled")
        if getattr(module, "max_norm", None) is not None and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            why = f"the embedding {name!r} has max_norm: it changes its weight, which all workers share, when it reads"
            raise refusal(why, "max-norm", nearest="replicated", layer=name)


def _nothing_to_divide(size: int, too_small: list[str], too_few: list[str], smallest: int) -> ConfigError:
    found = []
    if too_few:
        found.append(f"{', '.join(too_few)} with fewer rows than the {size} workers")
    if too_small:
        found.append(f"{', '.join(too_small)} with fewer than {smallest} parameters")
    listed = f"; there are only {' and '.join(found)}" if found else ""
    return refusal(
        "the model has no linear layer, embedding, convolution or attention that is worth dividing" + listed,
        "nothing-to-divide", workers=size, too_small=too_small, too_few_rows=too_few,
    )  # fmt: skip
