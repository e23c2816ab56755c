"""Models by name, each with recommended training settings.

    >>> from syncline.models import zoo
    >>> zoo.names()[:6]
    ['alexnet', 'autoencoder', 'destin', 'googlenet', 'lenet', 'linear']
    >>> zoo.card("mlp").options["hidden"]
    (256, 128)

`build(name, input_shape, classes)` builds the model. There is one file per family, and one card in `cards.py` per
model; names and cards do not import torch. Not here: datasets by name (`syncline.data`), and the settings of a run
(`syncline.config`).
"""

from syncline.models.zoo.model_card import ModelCard
from syncline.models.zoo.registry import build, card, names

__all__ = ["ModelCard", "build", "card", "names"]
