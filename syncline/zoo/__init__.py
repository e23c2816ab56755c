"""Ready models by name, each with the settings that train it well.

    >>> from syncline import zoo
    >>> zoo.names()[:6]
    ['alexnet', 'autoencoder', 'googlenet', 'lenet', 'linear', 'lstm']
    >>> zoo.card("mlp").options["hidden"]
    (256, 128)

`build(name, input_shape, classes)` makes the model. One file for each family, and one card in `cards.py` for each
model; names and cards can be read without torch. Not here: data sets by name (`syncline.data`), and how a card becomes
a run (`syncline.config`).
"""

from syncline.zoo.registry import ModelCard, build, card, names

__all__ = ["ModelCard", "build", "card", "names"]
