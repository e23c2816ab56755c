"""A decoder-only transformer for tokens, after GPT-2 (Vaswani et al., 2017; Radford et al., 2019).

Token and position embeddings, then blocks of causal self-attention and an MLP. The output is the logits of the next
token at every position: (batch, classes, time), as torch's cross_entropy expects.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from syncline.errors import ConfigError
from syncline.models.zoo.options import check_dropout, check_whole

_DEVIATION = 0.02  # standard deviation of the initial weights, as in GPT-2


def build(
    input_shape: tuple[int, ...],
    classes: int,
    vocabulary: int | None,
    width: object,
    layers: object,
    heads: object,
    dropout: object,
) -> nn.Module:
    """`layers` blocks of `width` values per token, split evenly among `heads` attention heads."""
    if vocabulary is None or len(input_shape) != 1:
        raise ConfigError(
            f"The model 'transformer' cannot take samples of shape {input_shape}. It needs tokens: data "
            "with a vocabulary and samples of shape (time,), such as 'shakespeare'. For images, choose 'lenet' or "
            "'resnet18'."
        )
    size = check_whole("transformer", "width", width, "the size of an embedding")
    depth = check_whole("transformer", "layers", layers, "the number of blocks")
    number = check_whole("transformer", "heads", heads, "the number of attention heads")
    if size % number:
        raise ConfigError(
            f"The options width and heads of the model 'transformer' are {size} and {number}, but the heads share "
            f"the width evenly. Set a width that is a multiple of {number}."
        )
    return Transformer(vocabulary, classes, input_shape[0], size, depth, number, check_dropout("transformer", dropout))


class Transformer(nn.Module):
    """From tokens (batch, time) to logits (batch, classes, time), for at most `time` tokens."""

    def __init__(
        self, vocabulary: int, classes: int, time: int, width: int, layers: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(time, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.classify = nn.Linear(width, classes, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Scale down what each block adds to the residual stream, as in GPT-2.
                is_added = name.endswith(("gather.weight", "shrink.weight"))
                nn.init.normal_(parameter, std=_DEVIATION / (math.sqrt(2 * layers) if is_added else 1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits of the next token, at every position."""
        places = torch.arange(x.shape[1], device=x.device)
        states = self.dropout(self.tokens(x) + self.places(places))
        scores: torch.Tensor = self.classify(self.norm(self.blocks(states)))
        return scores.transpose(1, 2)


class TransformerBlock(nn.Module):
    """Causal self-attention, then an MLP, both with residual connections."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.ask = nn.Linear(width, 3 * width)
        self.gather = nn.Linear(width, width)
        self.widen, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, time, width) to the same shape."""
        x = x + self.dropout(self.gather(self._attend(self.attention_norm(x))))
        inner = functional.gelu(self.widen(self.perceptron_norm(x)))
        added: torch.Tensor = self.dropout(self.shrink(inner))
        return x + added

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        joint = self.ask(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = joint.unbind(0)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return seen.transpose(1, 2).reshape(batch, time, width)
