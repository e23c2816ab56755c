"""Models of external packages by name: `timm:resnet50`, `hf:gpt2(n_layer=2)`.

Here: the packages, and cards for their models. Not here: building them (`from_timm.py`, `from_transformers.py`). The
packages are not imported here, because that takes seconds, and the driver does not need it.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Literal

from syncline.errors import ConfigError
from syncline.models.zoo.model_card import ModelCard


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package with models."""

    prefix: str
    name: str
    module: str
    """The module here that builds the models and lists their names."""
    takes: Literal["floats", "tokens", "both"]
    summary: str
    paper: str

    @property
    def is_installed(self) -> bool:
        """Whether the package is installed; does not import it."""
        return importlib.util.find_spec(self.name) is not None

    def names(self) -> list[str]:
        """The names of its models, with prefix, sorted; imports the package."""
        found: list[str] = importlib.import_module(self.module).names()
        return [f"{self.prefix}:{name}" for name in sorted(found)]


PACKAGES = {
    package.prefix: package
    for package in (
        Package(
            prefix="timm",
            name="timm",
            module="syncline.models.zoo.from_timm",
            takes="floats",
            summary="A model for images from timm; options as for timm.create_model, such as pretrained.",
            paper="R. Wightman, PyTorch Image Models, 2019",
        ),
        Package(
            prefix="hf",
            name="transformers",
            module="syncline.models.zoo.from_transformers",
            takes="both",
            summary="A model for text or images from transformers; options as in its config, and pretrained.",
            paper="Wolf et al., Transformers: State-of-the-Art Natural Language Processing, EMNLP 2020",
        ),
    )
}


def is_external(name: str) -> bool:
    """Whether this names a model of an external package."""
    prefix, colon, rest = name.partition(":")
    return bool(colon and rest) and prefix in PACKAGES


def card(name: str) -> ModelCard:
    """The card of an external model; whether the package has the model shows when it is built.

    `ConfigError` if the package is not installed. The training settings are a starting point for any model.
    """
    prefix, _, rest = name.partition(":")
    package = PACKAGES[prefix]
    if not package.is_installed:
        raise ConfigError(
            f"The model {name!r} comes from the package {package.name}, which is not installed here. "
            f"Install it with: pip install 'syncline[{prefix}]'"
        )
    return ModelCard(
        name=name,
        summary=package.summary,
        paper=package.paper,
        module=package.module,
        external_name=rest,
        takes=package.takes,
        loss="cross_entropy",
        optimizer={"name": "AdamW", "lr": 5e-4, "weight_decay": 0.05},
        schedule={"name": "OneCycleLR"},
        batch=64,
        metrics=("accuracy",),
        epochs=3,
    )
