"""The cards of the models and the lookup by name.

Here: what is known about each model, as plain data, so that a driver can check a run without importing torch. Not
here: the models (one file each, imported when built) and what a setting's name stands for (`syncline.config`).

To add a model, add a file with `build(input_shape, classes, **options)` and a card below. Models that share most of
their code share a file, with a function each.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from syncline.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ModelCard", "build", "card", "check_options", "names"]


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """What is worth knowing about a model before it is built; training settings are recommendations.

    Optimiser and schedule are named as in `torch.optim` and `torch.optim.lr_scheduler`. The schedule advances once
    for each optimiser step; what follows from the rest of the run is filled in later: its length (`T_max`,
    `total_steps`) and, for OneCycleLR, the peak (`max_lr`, the optimiser's `lr`).
    """

    name: str
    summary: str
    """One sentence."""
    paper: str
    """Where it comes from."""
    module: str
    """Import path of its file."""
    function: str = "build"
    """What makes it there."""
    options: Mapping[str, object] = field(default_factory=dict)
    """The options of that function, with their defaults."""
    target: Literal["given", "input"] = "given"
    """What its output is compared with: the target that the data gives, or the input itself."""
    loss: str
    optimizer: Mapping[str, object]
    """`name`, and the arguments."""
    schedule: Mapping[str, object] | None
    """`name`, and the arguments that do not follow from the rest."""
    batch: int
    """Samples in the global batch."""
    metrics: tuple[str, ...]
    epochs: int


_CARDS = {
    model.name: model
    for model in (
        ModelCard(
            name="linear",
            summary="One linear layer on the flattened input: softmax regression.",
            paper="D. R. Cox, The Regression Analysis of Binary Sequences, J. Royal Statistical Society B 20(2), 1958",
            module="syncline.zoo.linear",
            loss="cross_entropy",
            optimizer={"name": "SGD", "lr": 0.1, "momentum": 0.9},
            schedule={"name": "CosineAnnealingLR"},
            batch=128,
            metrics=("accuracy",),
            epochs=10,
        ),
        ModelCard(
            name="mlp",
            summary="Linear layers with ReLU between them, on the flattened input.",
            paper="Rumelhart, Hinton & Williams, Learning representations by back-propagating errors, Nature 323, 1986",
            module="syncline.zoo.mlp",
            options={"hidden": (256, 128)},
            loss="cross_entropy",
            optimizer={"name": "SGD", "lr": 0.1, "momentum": 0.9},
            schedule={"name": "CosineAnnealingLR"},
            batch=64,
            metrics=("accuracy",),
            epochs=20,
        ),
        ModelCard(
            name="lenet",
            summary="Two convolutions with pooling and two linear layers, as in Caffe's LeNet; images of any size.",
            paper="LeCun, Bottou, Bengio & Haffner, Gradient-based learning applied to document recognition, "
            "Proc. IEEE 86(11), 1998",
            module="syncline.zoo.lenet",
            loss="cross_entropy",
            optimizer={"name": "SGD", "lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
            # With a warm-up: at a constant start of 0.05 some seeds diverge within the first epoch.
            schedule={"name": "OneCycleLR"},
            batch=128,
            metrics=("accuracy",),
            epochs=3,
        ),
        ModelCard(
            name="resnet18",
            summary="ResNet-18 with a stem for small images: a 3x3 convolution of stride 1 and no pooling.",
            paper="He, Zhang, Ren & Sun, Deep Residual Learning for Image Recognition, arXiv:1512.03385, 2015",
            module="syncline.zoo.resnet",
            function="resnet18",
            options={"width": 64},
            loss="cross_entropy",
            # What is customary for CIFAR-10; unlike the settings above, not measured here.
            optimizer={"name": "SGD", "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
            schedule={"name": "CosineAnnealingLR"},
            batch=128,
            metrics=("accuracy",),
            epochs=200,
        ),
        ModelCard(
            name="resnet50",
            summary="ResNet-50, of bottleneck blocks, with the same stem for small images as resnet18.",
            paper="He, Zhang, Ren & Sun, Deep Residual Learning for Image Recognition, arXiv:1512.03385, 2015",
            module="syncline.zoo.resnet",
            function="resnet50",
            options={"width": 64},
            loss="cross_entropy",
            # As for resnet18: customary, not measured here.
            optimizer={"name": "SGD", "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
            schedule={"name": "CosineAnnealingLR"},
            batch=128,
            metrics=("accuracy",),
            epochs=200,
        ),
        ModelCard(
            name="alexnet",
            summary="Five convolutions and three linear layers with dropout, for images of 15 x 15 pixels or more.",
            paper="Krizhevsky, Sutskever & Hinton, ImageNet Classification with Deep Convolutional Neural Networks, "
            "NIPS 2012",
            module="syncline.zoo.alexnet",
            options={"hidden": 4096, "dropout": 0.5},
            loss="cross_entropy",
            # Tried for 60 steps of MNIST with one seed, no longer: the loss fell from 5.3 to 1.0 in these. With the
            # paper's SGD, at rates of 0.001 to 0.01, it stayed near 2.3.
            optimizer={"name": "Adam", "lr": 0.0002},
            schedule={"name": "OneCycleLR"},
            batch=128,
            metrics=("accuracy",),
            epochs=10,
        ),
        ModelCard(
            name="lstm",
            summary="An LSTM on sequences (time, features), or on images row by row, and a linear layer on its end.",
            paper="Hochreiter & Schmidhuber, Long Short-Term Memory, Neural Computation 9(8), 1997",
            module="syncline.zoo.lstm",
            options={"hidden": 128, "layers": 1},
            loss="cross_entropy",
            optimizer={"name": "Adam", "lr": 0.003},
            schedule={"name": "OneCycleLR"},
            batch=128,
            metrics=("accuracy",),
            epochs=5,
        ),
        ModelCard(
            name="autoencoder",
            summary="Linear layers down to a narrow code and back up, trained to give back their input.",
            paper="Hinton & Salakhutdinov, Reducing the Dimensionality of Data with Neural Networks, "
            "Science 313(5786), 2006",
            module="syncline.zoo.autoencoder",
            options={"hidden": (1000, 500, 250, 30)},
            target="input",
            loss="mse_loss",
            optimizer={"name": "Adam", "lr": 0.001},
            schedule={"name": "OneCycleLR"},
            batch=128,
            metrics=(),
            epochs=10,
        ),
    )
}


def names() -> list[str]:
    """The names of all models, sorted."""
    return sorted(_CARDS)


def card(name: str) -> ModelCard:
    """The card of the model called `name`."""
    if name not in _CARDS:
        raise UnknownName.among("model", name, _CARDS)
    return _CARDS[name]


def build(name: str, input_shape: tuple[int, ...], classes: int, **options: object) -> nn.Module:
    """The model called `name`, for samples of `input_shape` (without the batch dimension) and `classes` outputs.

    The parameters are drawn from torch's global generator: the same after the same `torch.manual_seed`.
    """
    model = card(name)
    check_options(model, options)
    shape = tuple(input_shape)
    if not shape or not all(_is_positive_integer(n) for n in shape):
        raise ConfigError(
            f"The model {name!r} was asked for samples of shape {shape}, but every dimension must be an integer of 1 "
            "or more. Give the shape of one sample without the batch, for example (1, 28, 28)."
        )
    if not _is_positive_integer(classes):
        raise ConfigError(
            f"The model {name!r} was asked for {classes!r} classes, but needs an integer of 1 or more. "
            "Set classes to the number of different targets."
        )
    function = getattr(importlib.import_module(model.module), model.function)
    module: nn.Module = function(shape, classes, **{**model.options, **options})
    return module


def check_options(model: ModelCard, options: Mapping[str, object]) -> None:
    """Raise the error for an option that the model does not have."""
    for option in options:
        if not model.options:
            raise UnknownName(f"The model {model.name!r} has no options, but {option!r} was given. Leave it out.")
        if option not in model.options:
            raise UnknownName.among(f"option of the model {model.name!r} called", option, model.options)


def _is_positive_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
