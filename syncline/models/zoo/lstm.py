"""LSTMs (Hochreiter & Schmidhuber, 1997): sequence classification and next-token prediction.

Samples are sequences of floats (time, features), which are classified by the last state. An image (channels, height,
width) is read row by row: MNIST is 28 steps of 28 features. Or samples are tokens (time,): then there is an output for
each of them, (batch, classes, time), the order in which torch's cross_entropy wants it.
"""

from __future__ import annotations

import torch
from torch import nn

from syncline.errors import ConfigError
from syncline.models.zoo.options import check_whole


def build(
    input_shape: tuple[int, ...], classes: int, vocabulary: int | None, hidden: object, layers: object
) -> nn.Module:
    """`layers` LSTMs of width `hidden`, stacked."""
    if len(input_shape) not in ((2, 3) if vocabulary is None else (1,)):
        raise ConfigError(
            f"The model 'lstm' cannot take samples of shape {input_shape}. It needs sequences: "
            "(time, features), or images (channels, height, width), of which each row is a step, or tokens (time,) "
            "with a vocabulary. Reshape the samples, for example to (28, 28), or choose 'mlp' or 'linear', which take "
            "any shape."
        )
    width = check_whole("lstm", "hidden", hidden, "the width of a state")
    depth = check_whole("lstm", "layers", layers, "the number of LSTMs on top of each other")
    if vocabulary is not None:
        return TokenPredictor(vocabulary, width, depth, classes)
    features = input_shape[-1] * (input_shape[0] if len(input_shape) == 3 else 1)
    return SequenceClassifier(features, width, depth, classes)


class SequenceClassifier(nn.Module):
    """Classifies a sequence by the state after its last step."""

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


class TokenPredictor(nn.Module):
    """Predicts the next token from the state after each token; the embedding has the same width."""

    def __init__(self, vocabulary: int, hidden: int, layers: int, classes: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, batch_first=True)
        self.classify = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores (batch, classes, time) for tokens (batch, time)."""
        states, _ = self.lstm(self.tokens(x))
        scores: torch.Tensor = self.classify(states)
        return scores.transpose(1, 2)
