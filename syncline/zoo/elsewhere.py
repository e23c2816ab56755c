"""Models of other packages by name: `timm:resnet50`, `hf:gpt2(n_layer=2)`.

Here: which packages there are, and cards for their models. Not here: building them (`from_timm.py`,
`from_transformers.py`). The packages are looked for and not imported, which takes seconds: a driver checks a run
without it.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Literal

from syncline.errors import ConfigError
from syncline.zoo.model_card import ModelCard

__all__ = ["PACKAGES", "Package", "card", "is_elsewhere"]


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package with models."""

    prefix: str
    name: str
    module: str
    """The file here that builds them, and lists their names."""
    takes: Literal["floats", "tokens", "both"]
    summary: str
    paper: str

    @property
    def is_installed(self) -> bool:
        """Whether it can be imported, judging by its being there."""
        return importlib.util.find_spec(self.name) is not None

    def names(self) -> list[str]:
        """The names of its models, with the prefix, sorted; imports it."""
        found: list[str] = importlib.import_module(self.module).names()
        return [f"{self.prefix}:{name}" for name in sorted(found)]


PACKAGES = {
    package.prefix: package
    for package in (
        Package(
            prefix="timm",
            name="timm",
            module="syncline.zoo.from_timm",
            takes="floats",
            summary="A model for images from timm; options as for timm.create_model, such as pretrained.",
            paper="R. Wightman, PyTorch Image Models, 2019",
        ),
        Package(
            prefix="hf",
            name="transformers",
            module="syncline.zoo.from_transformers",
            takes="both",
            summary="A model for text or images from transformers; options as in its config, and pretrained.",
            paper="Wolf et al., Transformers: State-of-the-Art Natural Language Processing, EMNLP 2020",
        ),
    )
}


def is_elsewhere(name: str) -> bool:
    """Whether a name is that of another package's model."""
    prefix, colon, rest = name.partition(":")
    return bool(colon and rest) and prefix in PACKAGES


def card(name: str) -> ModelCard:
    """The card of another package's model; whether the package has it is seen when it is built.

    `ConfigError` if the package is not installed. The settings are a beginning, not the best for each of them.
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
        elsewhere=rest,
        takes=package.takes,
        loss="cross_entropy",
        optimizer={"name": "AdamW", "lr": 5e-4, "weight_decay": 0.05},
        schedule={"name": "OneCycleLR"},
        batch=64,
        metrics=("accuracy",),
        epochs=3,
    )
