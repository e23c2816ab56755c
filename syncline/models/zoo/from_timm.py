"""Models for images from timm, by its own names and with its own options: `timm:resnet50(pretrained=True)`.

Here: `build`, and the names. Of timm, only `create_model` and `list_models` are used. Weights are random, unless
`pretrained` is set; then timm downloads them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from syncline.errors import ConfigError, UnknownName


def names() -> list[str]:
    import timm

    found: list[str] = timm.list_models()
    return found


def build(input_shape: tuple[int, ...], classes: int, named: str, **options: Any) -> nn.Module:
    """timm's model called `named`, with as many input channels and classes as the data has."""
    import timm

    if len(input_shape) != 3:
        raise ConfigError(
            f"The model 'timm:{named}' cannot take samples of shape {input_shape}. timm's models need images "
            "(channels, height, width)."
        )
    architecture = named.partition(".")[0]  # after the dot is the name of the weights
    if architecture not in timm.list_models():
        raise UnknownName.among("timm model", architecture, timm.list_models())
    arguments = {"num_classes": classes, "in_chans": input_shape[0], **options}
    try:
        model: nn.Module = timm.create_model(named, **arguments)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise ConfigError(f"timm cannot build {named} with {arguments}: {error}") from error
    return model
