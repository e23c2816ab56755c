"""Checks for model options: each function returns the typed value, or raises.

Here: the checks that several models share. Not here: whether the option exists (`registry.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from syncline.errors import ConfigError, UnknownName


def check_images(model: str, shape: tuple[int, ...], smallest_side: int = 1) -> None:
    """Samples must be (channels, height, width), with no side below `smallest_side`."""
    if len(shape) == 3 and min(shape[1:]) >= smallest_side:
        return
    sides = f" with sides of {smallest_side} or more" if smallest_side > 1 else ""
    others = "'lenet' for smaller images, or " if model != "lenet" else ""
    raise ConfigError(
        f"The model {model!r} cannot take samples of shape {shape}. It needs images (channels, height, width){sides}. "
        f"Reshape the samples, for example to (3, 32, 32), or choose {others}'mlp' or 'linear', which take any shape."
    )


def check_whole(model: str, option: str, value: object, meaning: str) -> int:
    """An integer of 1 or more; `meaning` describes it."""
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"The option {option} of the model {model!r} is {value!r}, but must be an integer of 1 or more: {meaning}."
        )
    return value


def check_fraction(model: str, option: str, value: object, meaning: str) -> float:
    """A number from 0 to less than 1; `meaning` describes it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError(
            f"The option {option} of the model {model!r} is {value!r}, but must be from 0 to less than 1: {meaning}."
        )
    return value


def check_dropout(model: str, value: object) -> float:
    return check_fraction(model, "dropout", value, "the dropout probability")


def check_switch(model: str, option: str, value: object) -> bool:
    """A bool; truthy values are rejected."""
    if not isinstance(value, bool):
        raise ConfigError(f"The option {option} of the model {model!r} is {value!r}, but must be True or False.")
    return value


def check_choice(model: str, option: str, value: object, choices: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise UnknownName.among(f"{option} for the model {model!r} named", str(value), choices)
    return value


def check_widths(model: str, value: object, meaning: str) -> tuple[int, ...]:
    """The option `hidden`: at least one width; `meaning` describes them."""
    is_list = isinstance(value, tuple | list) and len(value) > 0
    if not is_list or not all(type(width) is int and width >= 1 for width in value):  # type: ignore[attr-defined]
        raise ConfigError(
            f"The option hidden of the model {model!r} is {value!r}, but {meaning} must be integers of 1 or more, "
            "for example (1000, 500, 250, 30)."
        )
    return tuple(value)  # type: ignore[arg-type]  # checked above
