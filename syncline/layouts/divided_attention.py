"""Self-attention that the workers of a replica compute together: torch's `nn.MultiheadAttention`.

Here: what takes the place of its forward. The projections are divided as linear layers are (`divided_layers.py`). The
heads are divided, too, if each worker gets the same number and nothing is dropped out: what is dropped out must not
depend on the number of workers. Attention to other tensors, and a few rare settings, are computed by all workers in
whole, by torch's own code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from syncline.layouts.activation_exchange import ActivationExchange
from syncline.layouts.divided_layers import DividedLinear, Forward


class DividedAttention(DividedLinear):
    """Softmax(Q K' / sqrt(d)) V for each head, and a linear layer for all of them."""

    def __call__(  # type: ignore[override]
        self,
        module: nn.MultiheadAttention,
        own: Forward,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        if not self._is_supported(module, query, key, value) or (is_causal and attn_mask is None):
            return own(
                query, key, value, key_padding_mask=key_padding_mask, need_weights=need_weights, attn_mask=attn_mask,
                average_attn_weights=average_attn_weights, is_causal=is_causal,
            )  # fmt: skip
        x = query if module.batch_first else query.transpose(0, 1)
        if is_causal and key_padding_mask is None and not need_weights:
            mask = None
        else:
            mask, is_causal = _mask(x, module.num_heads, attn_mask, key_padding_mask), False
        seen, weights = self._attend(module, x, mask, is_causal=is_causal, need_weights=need_weights)
        y = self.compute(seen, module.out_proj.weight, module.out_proj.bias)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        return y.transpose(0, 1) if module.batch_first else y, weights

    def _is_supported(
        self, module: nn.MultiheadAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> bool:
        biases = [p for p in (module.in_proj_bias, module.out_proj.bias) if p is not None]
        return (
            query is key is value
            and query.dim() == 3
            and not query.is_nested
            and module.bias_k is None
            and not module.add_zero_attn
            and all(p in self.leaves for p in (module.in_proj_weight, module.out_proj.weight, *biases))
        )

    def _attend(
        self,
        module: nn.MultiheadAttention,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        is_causal: bool,
        need_weights: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the heads have seen, (time, batch, width), and how much of each, (batch, heads, time, time).

        In torch's order of memory: a dropout that follows draws its numbers in that order.
        """
        heads, dropout = module.num_heads, module.dropout if module.training else 0.0
        joint = self.compute(x, module.in_proj_weight, module.in_proj_bias)
        joint = joint.view(*x.shape[:2], 3, heads, -1).permute(
            2, 0, 3, 1, 4
        )  # (3, batch, heads, time, width of a head)
        by_heads = heads % self.exchange.size == 0 and not dropout and not need_weights
        if by_heads:
            joint = _OwnHeads.apply(joint, self.own(heads), self.exchange)  # type: ignore[no-untyped-call]
            mask = mask[:, self.own(heads)] if mask is not None and mask.shape[1] > 1 else mask
        seen, weights = _attention(joint, mask, dropout, is_causal=is_causal, need_weights=need_weights)
        if by_heads:
            seen = _AllHeads.apply(seen, heads, self.own(heads), self.exchange)  # type: ignore[no-untyped-call]
        return seen.permute(2, 0, 1, 3).flatten(2), weights


def _attention(
    joint: torch.Tensor, mask: torch.Tensor | None, dropout: float, *, is_causal: bool, need_weights: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As torch computes it in the two cases, so that it drops out the same numbers."""
    query, key, value = joint.unbind(0)
    if not need_weights:
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal), None
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    if dropout:
        weights = F.dropout(weights, dropout)
    return weights @ value, weights


def _mask(x: torch.Tensor, heads: int, mask: torch.Tensor | None, padding: torch.Tensor | None) -> torch.Tensor | None:
    """Both masks in one that is added to the scores, (batch or 1, heads or 1, time, time)."""
    if mask is not None:
        mask = _added(mask, x.dtype)
        mask = mask.view(len(x), heads, *mask.shape[1:]) if mask.dim() == 3 else mask[None, None]
    if padding is None:
        return mask
    padding = _added(padding, x.dtype)[:, None, None, :]
    return padding if mask is None else mask + padding


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask whose numbers are added: minus infinity where another one is true."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf")) if mask.dtype == torch.bool else mask


class _OwnHeads(torch.autograd.Function):
    """The heads of this worker, from (..., heads, time, width of a head)."""

    @staticmethod
    def forward(ctx: Any, joint: torch.Tensor, own: slice, exchange: ActivationExchange) -> torch.Tensor:
        ctx.exchange, ctx.heads = exchange, joint.shape[-3]
        return joint[..., own, :, :].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _gathered(ctx.exchange, gradient, ctx.heads), None, None


class _AllHeads(torch.autograd.Function):
    """The heads of all workers."""

    @staticmethod
    def forward(ctx: Any, seen: torch.Tensor, heads: int, own: slice, exchange: ActivationExchange) -> torch.Tensor:
        ctx.own = own
        return _gathered(exchange, seen, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient[..., ctx.own, :, :], None, None, None


def _gathered(exchange: ActivationExchange, part: torch.Tensor, heads: int) -> torch.Tensor:
    *outer, own, time, width = part.shape
    whole = torch.empty(*outer, heads, time, width, dtype=part.dtype)
    exchange.gather(part.reshape(-1, own, time * width), whole.view(-1, heads, time * width))
    return whole
