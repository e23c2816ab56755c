"""Labels that come back: which predictions of a version were right.

A client that learns the right answer later sends it with the prediction that it was given, to the address of the
version that gave it. So nothing about a request has to be remembered, and any process can count it. Pure. Not here:
what the counts decide (`canary.py`).
"""

from __future__ import annotations

import msgspec

from syncline.serving.server.refusal import RequestRefused

__all__ = ["outcomes_in"]

Label = str | int | float | bool


class _Outcome(msgspec.Struct, forbid_unknown_fields=True):
    prediction: Label
    label: Label


class _Feedback(msgspec.Struct, forbid_unknown_fields=True):
    outcomes: list[_Outcome]


_decode = msgspec.json.Decoder(_Feedback).decode


def outcomes_in(body: bytes) -> list[bool]:
    """Whether each prediction equals its label.

    >>> outcomes_in(b'{"outcomes": [{"prediction": 7, "label": 7}, {"prediction": 3, "label": 5}]}')
    [True, False]
    """
    try:
        outcomes = _decode(body).outcomes
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRefused(
            f'Send {{"outcomes": [{{"prediction": 7, "label": 7}}, ...]}}, with numbers or words: {error}.',
            code="malformed",
        ) from error
    if not outcomes:
        raise RequestRefused("There are no outcomes. Send at least one.", code="missing-data")
    return [_is_right(one.prediction, one.label) for one in outcomes]


def _is_right(prediction: Label, label: Label) -> bool:
    if _kind(prediction) is not _kind(label):
        # "7" and 7 are never equal: without this, every prediction would count as wrong, and silently.
        raise RequestRefused(
            f"The prediction {prediction!r} and the label {label!r} are of different kinds. Send both as the same, for "
            "example as class names.",
            code="different-kinds", prediction=prediction, label=label,
        )  # fmt: skip
    return prediction == label


def _kind(value: Label) -> type:
    return float if type(value) is int else type(value)
