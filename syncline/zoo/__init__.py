"""Ready models by name, each with the settings that train it well.

    >>> from syncline import zoo
    >>> zoo.names()
    ['lenet', 'linear', 'mlp', 'resnet18']
    >>> zoo.card("mlp").options["hidden"]
    (256, 128)

`build(name, input_shape, classes)` makes the model. One file for each model, and one card in `registry.py`; names and
cards can be read without torch. Not here: data sets by name (`syncline.data`), and how a card becomes a run
(`syncline.config`).
"""

from syncline.zoo.registry import ModelCard, build, card, names

__all__ = ["ModelCard", "build", "card", "names"]
