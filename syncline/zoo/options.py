"""Checking the options of models: each function gives the value back, typed, or raises the error for it.

Here: what several models have in common. Not here: whether a model has such an option at all (`registry.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from syncline.errors import ConfigError, UnknownName

__all__ = ["check_choice", "check_dropout", "check_fraction", "check_switch", "check_whole", "check_widths"]


def check_whole(model: str, option: str, value: object, meaning: str) -> int:
    """An integer of 1 or more; `meaning` says what it is."""
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"The option {option} of the model {model!r} is {value!r}, but it is {meaning}. Give an integer of 1 or "
            "more."
        )
    return value


def check_fraction(model: str, option: str, value: object, meaning: str) -> float:
    """A number from 0 to less than 1; `meaning` says what it is."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError(
            f"The option {option} of the model {model!r} is {value!r}, but it is {meaning}. Give a number from 0 to "
            "less than 1."
        )
    return value


def check_dropout(model: str, value: object) -> float:
    """The part of the values that a dropout leaves out."""
    return check_fraction(model, "dropout", value, "the part of the values that is left out")


def check_switch(model: str, option: str, value: object) -> bool:
    """True or False, and not just something that is as good as that."""
    if not isinstance(value, bool):
        raise ConfigError(f"The option {option} of the model {model!r} is {value!r}. Give True or False.")
    return value


def check_choice(model: str, option: str, value: object, choices: Sequence[str]) -> str:
    """One of several words."""
    if not isinstance(value, str) or value not in choices:
        raise UnknownName.among(f"{option} of the model {model!r} called", str(value), choices)
    return value


def check_widths(model: str, value: object, meaning: str) -> tuple[int, ...]:
    """The option `hidden` as a list of at least one width; `meaning` says what they are."""
    is_list = isinstance(value, tuple | list) and len(value) > 0
    if not is_list or not all(type(width) is int and width >= 1 for width in value):  # type: ignore[attr-defined]
        raise ConfigError(
            f"The option hidden of the model {model!r} is {value!r}, but it lists {meaning}. Give integers of 1 or "
            "more, for example (1000, 500, 250, 30)."
        )
    return tuple(value)  # type: ignore[arg-type]  # a list or tuple, as was just seen
