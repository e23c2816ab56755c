"""DeSTIN by name: the options of `syncline.models.destin.network`, checked."""

from __future__ import annotations

from typing import cast

from torch import nn

from syncline.errors import ConfigError
from syncline.models.destin.geometry import Geometry
from syncline.models.destin.network import DestinNetwork, Memory, Settings, Training
from syncline.models.zoo.options import check_choice, check_switch, check_whole

_NAME = "destin"


def build(
    input_shape: tuple[int, ...],
    classes: int,
    grid: object,
    centroids: object,
    shared: object,
    training: object,
    memory: object,
    movements: object,
    sharpness: object,
) -> nn.Module:
    """Layers of nodes over images of `input_shape`."""
    del classes  # it learns without labels
    sides = _whole_numbers("grid", grid, "the nodes in a row of each layer, for example (8, 4, 2, 1)")
    counts = centroids if isinstance(centroids, tuple | list) else (centroids,) * len(sides)
    clusters = _whole_numbers("centroids", counts, "the clusters of each node, one number or one per layer")
    if len(clusters) != len(sides) or min(clusters) < 2:
        raise ConfigError(
            f"The option centroids of the model {_NAME!r} is {centroids!r}, but must be one number of 2 or more, or "
            f"one for each of the {len(sides)} layers of grid={sides}: for example {(25,) * len(sides)}.",
            code="destin-centroids",
        )
    settings = Settings(
        clusters=clusters,
        shared=check_switch(_NAME, "shared", shared),
        training=cast("Training", check_choice(_NAME, "training", training, ("greedy", "concurrent"))),
        memory=cast("Memory", check_choice(_NAME, "memory", memory, ("none", "table", "recurrent"))),
        movements=check_whole(_NAME, "movements", movements, "how many views of an image, each moved by a pixel"),
        sharpness=_positive("sharpness", sharpness),
    )
    _check_memory(settings)
    return DestinNetwork(Geometry(tuple(input_shape), sides), settings)


def _check_memory(settings: Settings) -> None:
    if settings.memory != "none" and settings.movements == 1:
        raise ConfigError(
            f"memory={settings.memory!r} of the model {_NAME!r} is about beliefs of the view before, but with "
            'movements=1 there is one view of each image. Set movements to 2 or more, or memory="none".',
            code="destin-memory",
        )
    if settings.memory == "recurrent" and settings.training == "greedy":
        raise ConfigError(
            f'memory="recurrent" of the model {_NAME!r} lets a node observe its parent\'s belief, but '
            'training="greedy" trains the node before its parent. Set training="concurrent".',
            code="destin-memory",
        )


def _whole_numbers(option: str, value: object, meaning: str) -> tuple[int, ...]:
    numbers = (value,) if type(value) is int else value
    is_list = isinstance(numbers, tuple | list) and len(numbers) > 0
    if not is_list or not all(type(n) is int and n >= 1 for n in cast("tuple[object, ...]", numbers)):
        raise ConfigError(
            f"The option {option} of the model {_NAME!r} is {value!r}, but must be integers of 1 or more: {meaning}.",
            code=f"destin-{option}",
        )
    return tuple(cast("tuple[int, ...]", numbers))


def _positive(option: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(
            f"The option {option} of the model {_NAME!r} is {value!r}, but must be a number above 0: how much nearer "
            "clusters get of the belief.",
            code=f"destin-{option}",
        )
    return float(value)
