"""Finding and building models by name.

Here: from a name to a card, and from a card to a model. Not here: the cards (`cards.py`), models of other packages
(`external.py`), and the models themselves (one file for each family, imported when built). Nothing here imports torch,
so that the driver can check a run without it.

To add a model, add a file with `build(input_shape, classes, **options)` and a card in `cards.py`. Models that share
most of their code share a file, with a function each. A model for tokens has one argument more, `vocabulary`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from syncline.errors import ConfigError, UnknownName, check_options
from syncline.models.zoo import external
from syncline.models.zoo.cards import CARDS
from syncline.models.zoo.graph_cards import GRAPH_CARDS
from syncline.models.zoo.model_card import ModelCard

if TYPE_CHECKING:
    from torch import nn


def names() -> list[str]:
    """The names of all models of samples, sorted, without those of other packages."""
    return sorted(CARDS)


def graph_names() -> list[str]:
    """The names of all graph networks, sorted."""
    return sorted(GRAPH_CARDS)


def is_known(name: str) -> bool:
    """Whether this is a model of the zoo, or of an external package."""
    return name in CARDS or name in GRAPH_CARDS or external.is_external(name)


def card(name: str) -> ModelCard:
    """The card of the model called `name`; also of another package's, such as `timm:resnet50` or `hf:gpt2`."""
    if external.is_external(name):
        return external.card(name)
    if name in GRAPH_CARDS:
        return GRAPH_CARDS[name]
    if name not in CARDS:
        raise UnknownName.among("model", name, [*CARDS, *GRAPH_CARDS])
    return CARDS[name]


def build(
    name: str, input_shape: tuple[int, ...], classes: int, vocabulary: int | None = None, **options: object
) -> nn.Module:
    """The model called `name`, for samples of `input_shape` (without the batch dimension) and `classes` outputs.

    If the samples are tokens, `vocabulary` says how many different ones there are. The parameters are drawn from
    torch's global generator: the same after the same `torch.manual_seed`.
    """
    model = card(name)
    check_model_options(model, options)
    shape = tuple(input_shape)
    if not shape or not all(_is_positive_integer(n) for n in shape):
        raise ConfigError(
            f"The model {name!r} cannot take samples of shape {shape}: every dimension must be an integer of 1 or "
            "more. Pass the shape of one sample without the batch, for example (1, 28, 28)."
        )
    if not _is_positive_integer(classes):
        raise ConfigError(
            f"The model {name!r} cannot have {classes!r} classes. Set classes to the number of distinct targets, an "
            "integer of 1 or more."
        )
    if vocabulary is not None and not _is_positive_integer(vocabulary):
        raise ConfigError(
            f"The model {name!r} cannot have a vocabulary of {vocabulary!r}. Set it to the number of distinct tokens, "
            "an integer of 1 or more, or leave it out if the samples are not tokens."
        )
    function = getattr(importlib.import_module(model.module), model.function)
    arguments = {**model.options, **options}
    if model.external_name is not None:
        arguments["named"] = model.external_name
    if model.takes in ("tokens", "both"):
        arguments["vocabulary"] = vocabulary
    elif vocabulary is not None:
        readers = ", ".join(n for n in names() if CARDS[n].takes in ("tokens", "both"))
        raise ConfigError(
            f"The model {name!r} needs floats, but the samples are tokens from a vocabulary of {vocabulary}. For "
            f"tokens, choose one of: {readers}."
        )
    module: nn.Module = function(shape, classes, **arguments)
    return module


def check_model_options(model: ModelCard, options: Mapping[str, object]) -> None:
    """Raise `UnknownName` for an option that the model does not have; external packages check their own on building."""
    if model.external_name is None:
        check_options(f"The model {model.name!r}", options, model.options)


def _is_positive_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
