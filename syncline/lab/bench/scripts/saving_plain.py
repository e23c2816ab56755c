"""A hand-written loop with a transformer of up to 86 million parameters; prints its peak memory in MB.

python -m syncline.lab.bench.scripts.saving_plain LAYERS

Here also: that model and its samples, which `saving.py` trains with `syncline.train`.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from syncline.compute.memory import Peak

WIDTH, HEADS, VOCABULARY, LENGTH = 768, 12, 1000, 64
SHARE = 2
"""Samples of one worker in a step."""
_STEPS = 4
_LR = 0.01


class BenchTransformer(nn.Module):
    """Blocks as in GPT-2, of some seven million parameters each."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(_block() for _ in range(layers)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.tokens(tokens) + self.places.weight)
        logits: torch.Tensor = self.head(hidden).transpose(1, 2)
        return logits


def _block() -> nn.Module:
    return nn.TransformerEncoderLayer(
        WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )


def samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens, each with the next one as its target."""
    text = torch.randint(0, VOCABULARY, (count, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def main() -> None:
    torch.set_num_threads(1)
    model = BenchTransformer(int(sys.argv[1]))
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR)
    inputs, targets = samples(_STEPS * SHARE)
    peak = Peak(torch.device("cpu"))
    peak.reset()
    for start in range(0, _STEPS * SHARE, SHARE):
        part = slice(start, start + SHARE)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[part]), targets[part])
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        optimizer.step()
    sys.stdout.write(f"{peak.read() / 1e6:.1f}\n")


if __name__ == "__main__":
    main()
