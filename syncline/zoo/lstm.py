"""A classifier of sequences: an LSTM (Hochreiter & Schmidhuber, 1997) and a linear layer on its last state.

Samples are sequences of floats (time, features). An image (channels, height, width) is read row by row: MNIST is 28
steps of 28 features.
"""

from __future__ import annotations

import torch
from torch import nn

from syncline.errors import ConfigError

__all__ = ["SequenceClassifier", "build"]


def build(input_shape: tuple[int, ...], classes: int, hidden: object, layers: object) -> nn.Module:
    """`layers` LSTMs of width `hidden`, one on top of the other."""
    if len(input_shape) not in (2, 3):
        raise ConfigError(
            f"The model 'lstm' was asked for samples of shape {input_shape}, but it reads sequences: it needs "
            "(time, features), or images (channels, height, width), of which each row is a step. Reshape the samples, "
            "for example to (28, 28), or choose 'mlp' or 'linear', which take any shape."
        )
    for name, value in (("hidden", hidden), ("layers", layers)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"The option {name} of the model 'lstm' is {value!r}. Give an integer of 1 or more.")
    features = input_shape[-1] * (input_shape[0] if len(input_shape) == 3 else 1)
    return SequenceClassifier(features, hidden, layers, classes)  # type: ignore[arg-type]  # checked above


class SequenceClassifier(nn.Module):
    """What the last step's state says about the whole sequence."""

    def __init__(self, features: int, hidden: int, layers: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, layers, batch_first=True)
        self.classify = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output for a batch of sequences or of images."""
        if x.dim() == 4:
            x = x.transpose(1, 2).flatten(2)  # (batch, height, channels * width): a row of all channels is a step
        states, _ = self.lstm(x)
        output: torch.Tensor = self.classify(states[:, -1])
        return output
