"""`TensorSplit`: a model whose large layers the workers of a replica compute together, for one View.

Here: applying a split to a model and undoing it, and the gradients that come of it. The parameters lie in memory that
all workers share. All workers call the model with the same samples, and draw the same random numbers; what whole layers
compute is then the same on all of them. Not here: what is divided (`tensor_split.py`), how a layer is computed
(`divided_layers.py`, `divided_attention.py`), and updating (`optimizer_shards.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from syncline.comms.collective import Collective
from syncline.layouts.activation_exchange import ActivationExchange
from syncline.layouts.divided_attention import DividedAttention
from syncline.layouts.divided_layers import LAYERS
from syncline.layouts.gradient_rounds import in_memory_order
from syncline.layouts.local_forward import replace_forward, restore_forward
from syncline.layouts.shards import Leaf
from syncline.layouts.tensor_split import SMALLEST_NUMBERS, Split, own_rows, split_of


class Rows(NamedTuple):
    """This worker's rows of a divided parameter."""

    original: nn.Parameter
    low: int
    """The first of its numbers in the original, in the order of memory."""
    high: int
    leaf: nn.Parameter


class TensorSplit:
    """One worker's side of a divided `model`. All workers make it at the same time, and call the model together.

    `parameters` are those that lie one after another in a flat vector, by default all that are trained. They must be
    in shared memory already.
    """

    def __init__(
        self,
        model: nn.Module,
        collective: Collective,
        *,
        parameters: Sequence[nn.Parameter] | None = None,
        split: Split | None = None,
        smallest_numbers: int = SMALLEST_NUMBERS,
    ) -> None:
        rank, size = collective.rank, collective.size
        self.split = split or split_of(model, size, smallest_numbers=smallest_numbers)
        self.parameters = [p for p in model.parameters() if p.requires_grad] if parameters is None else list(parameters)
        named = dict(model.named_parameters())
        names = {p: name for name, p in named.items()}
        self._names = [names[p] for p in self.parameters]
        self.leaves = [_rows_of(named[name], size, rank) for name in sorted(self.split.divided)]
        """This worker's rows of each divided parameter. Backward leaves their gradients there."""
        self._leaf_of: dict[torch.Tensor, nn.Parameter] = {leaf.original: leaf.leaf for leaf in self.leaves}
        self._exchange = ActivationExchange(collective)
        self._modules = {model.get_submodule(layer.name): layer.kind for layer in self.split.layers}
        self._divide()

    def _divide(self) -> None:
        for module, kind in self._modules.items():
            divided = DividedAttention if kind == "attention" else LAYERS[kind]
            replace_forward(module, divided(self._exchange, self._leaf_of))

    @property
    def bytes_sent(self) -> int:
        """How many bytes of activations this worker has given to the others so far."""
        return self._exchange.bytes_sent

    @property
    def shared_bytes(self) -> int:
        """The size of the memory that activations pass through, which all workers share."""
        return self._exchange.shared_bytes

    def pieces(self, rank: int) -> list[Leaf]:
        """The numbers of the flat vector that a worker owns; each worker knows everyone's."""
        return self.split.pieces(rank, self._names)

    def gradient_of(self, p: nn.Parameter, low: int, high: int) -> torch.Tensor | None:
        """The gradient of the numbers `low` to `high` of a parameter, in the order of memory; None if it has none.

        Of a divided parameter, `low` to `high` are this worker's rows.
        """
        terms = self._gradients_of(p, low, high)
        return sum(terms[1:], terms[0]) if terms else None

    def _gradients_of(self, p: nn.Parameter, low: int, high: int) -> list[torch.Tensor]:
        """The terms of the gradient of some numbers: that of the leaf, and that of uses outside of divided layers."""
        found = []
        leaf = self._leaf_of.get(p)
        if leaf is not None and leaf.grad is not None:
            found.append(in_memory_order(leaf))
        if p.grad is not None:
            found.append(in_memory_order(p)[low:high])
        return found

    def zero_gradients(self) -> None:
        """Forget all gradients, those of whole parameters included."""
        for leaf in self._leaf_of.values():
            leaf.grad = None
        for p in self.parameters:
            p.grad = None

    @contextmanager
    def undivided(self) -> Iterator[None]:
        """A context in which this worker computes the model by itself, as for evaluation with samples of its own.

        The parameters are all there, in shared memory.
        """
        for module in self._modules:
            restore_forward(module)
        try:
            yield
        finally:
            self._divide()

    def close(self) -> None:
        """Make the model compute by itself again; also after a failure in the middle of a pass."""
        for module in self._modules:
            restore_forward(module)
        self._modules.clear()
        self.leaves.clear()
        self._leaf_of.clear()


def _rows_of(p: nn.Parameter, size: int, rank: int) -> Rows:
    rows, row = own_rows(len(p), size, rank), p.numel() // len(p)
    leaf = nn.Parameter(p.detach()[rows], requires_grad=p.requires_grad)
    return Rows(p, rows.start * row, rows.stop * row, leaf)
