"""Why samples cannot be collated into one batch.

Here: finding the sample that differs from the others, for the message. torch reports such a batch as a tensor that
cannot be stacked or a storage that cannot be resized, without the sample. Not here: collating itself (`source.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from syncline.errors import DataError

_FIX = "All samples of a batch need the same structure and shapes: pad, crop or resize them in the Dataset."


def misfit(indices: Sequence[int], items: Sequence[Any]) -> DataError | None:
    """The error that names the first of the samples at `indices` that is unlike most of the batch; None if none is."""
    forms = [_form(item, has_types=False) for item in items]
    empty = next((k for k, form in enumerate(forms) if _has_none(form)), None)
    if empty is not None:
        where = "is None" if items[empty] is None else f"contains None: {_text(forms[empty])}"
        return DataError(
            f"Sample {indices[empty]} of the data {where}. Its __getitem__ must return a value for each sample: leave "
            "out what cannot be read, or raise an exception.",
            code="sample-is-none",
            sample=indices[empty],
        )
    if len(set(forms)) == 1:
        forms = [_form(item, has_types=True) for item in items]
    ((usual, _),) = Counter(forms).most_common(1)
    odd = next((k for k, form in enumerate(forms) if form != usual), None)
    if odd is None:
        return None
    other = forms.index(usual)
    return DataError(
        f"Sample {indices[odd]} of the data is {_text(forms[odd])}, but sample {indices[other]} in the same batch is "
        f"{_text(usual)}. {_FIX}",
        code="ragged-samples",
        sample=indices[odd],
        form=_text(forms[odd]),
        other_sample=indices[other],
        other_form=_text(usual),
    )


def _form(item: Any, *, has_types: bool) -> Hashable:
    """What must be the same in all samples of a batch: structure, shapes and, if that is not it, dtypes."""
    if item is None:
        return None
    if isinstance(item, (torch.Tensor, np.ndarray)):
        return "array", tuple(item.shape), str(item.dtype).removeprefix("torch.") if has_types else "array"
    if isinstance(item, Mapping):
        return "dict", *((str(key), _form(value, has_types=has_types)) for key, value in item.items())
    if isinstance(item, (tuple, list)):
        return "tuple", *(_form(part, has_types=has_types) for part in item)
    if isinstance(item, (int, float, np.number)):
        return ("number",)
    return (type(item).__name__,)


def _has_none(form: Hashable) -> bool:
    return form is None or (isinstance(form, tuple) and form[0] != "array" and any(map(_has_none, form[1:])))


def _text(form: Hashable) -> str:
    if not isinstance(form, tuple):
        return str(form)
    kind, *parts = form
    if kind == "array":
        return f"{parts[1]}{parts[0]}"
    if kind == "tuple":
        return f"({', '.join(map(_text, parts))})"
    if kind == "dict":
        return "{" + ", ".join(f"{key!r}: {_text(value)}" for key, value in parts) + "}"
    return str(kind)
