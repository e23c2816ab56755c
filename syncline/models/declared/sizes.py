"""Layer arguments that the data determines: in_channels, in_features, num_features and the like.

Here: which argument is which size of the input, and binding the user's arguments to the layer's signature. Not here:
the input of a layer (`build.py` traces it).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from syncline.errors import ConfigError, check_options
from syncline.models.catalog.layers import signature_of
from syncline.models.declared.call import Call


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of the data: the shape of a sample, and the number of classes and tokens, if any."""

    input_shape: tuple[int, ...]
    classes: int | None = None
    vocabulary: int | None = None
    are_tokens: bool = False
    """Whether samples are integer tokens, even if the vocabulary is unknown."""


_FOLLOWS: dict[str, Callable[[Sequence[Tensor]], int]] = {
    "in_channels": lambda inputs: inputs[0].shape[1],
    "num_features": lambda inputs: inputs[0].shape[1],
    "num_channels": lambda inputs: inputs[0].shape[1],
    "in_features": lambda inputs: inputs[0].shape[-1],
    "input_size": lambda inputs: inputs[0].shape[-1],
    "normalized_shape": lambda inputs: inputs[0].shape[-1],
    "embed_dim": lambda inputs: inputs[0].shape[-1],
    "d_model": lambda inputs: inputs[0].shape[-1],
    "in1_features": lambda inputs: inputs[0].shape[-1],
    "in2_features": lambda inputs: inputs[-1].shape[-1],
}
"""Required arguments that are sizes of the input, whose dimension 0 is the batch."""


def bound(layer: type[nn.Module], call: Call, inputs: Sequence[Tensor], sizes: Sizes) -> inspect.BoundArguments:
    """All arguments of a layer: the user's, and those that its inputs determine."""
    signature = signature_of(layer)
    parameters = signature.parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        _check_options(layer, call, list(parameters))
    following = _following(layer, parameters, call, inputs, sizes)
    options = {**following, **{name: _size(value, sizes) for name, value in call.options.items()}}
    arguments = [_size(value, sizes) for value in call.arguments]
    # Positional arguments skip those that the input determines.
    open_names = [n for n, p in parameters.items() if n not in following and p.kind is not p.KEYWORD_ONLY]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    if takes_any:
        return signature.bind(*arguments, **options)
    if len(arguments) > len(open_names):
        raise ConfigError(f"{layer.__name__} takes at most {len(open_names)} arguments, not {len(arguments)}.")
    for name, argument in zip(open_names, arguments, strict=False):
        if name in options:
            raise ConfigError(f"{layer.__name__} gets {name} twice: {argument!r} by position, and by name.")
        options[name] = argument
    missing = [n for n, p in parameters.items() if p.default is p.empty and n not in options and p.kind < 2]
    if missing:
        raise ConfigError(f"{layer.__name__} needs {' and '.join(missing)}{_why(parameters, sizes)}.")
    if "batch_first" in parameters:
        options.setdefault("batch_first", True)  # data is batch-first here; torch's default is historical
    return signature.bind(**options)


def _following(
    layer: type[nn.Module],
    parameters: Mapping[str, inspect.Parameter],
    call: Call,
    inputs: Sequence[Tensor],
    sizes: Sizes,
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if name in call.options or parameter.default is not parameter.empty:
            continue
        if name in _FOLLOWS:
            if inputs[0].dim() < 2:
                raise ConfigError(f"{layer.__name__} needs samples with at least one dimension, not scalars.")
            found[name] = _FOLLOWS[name](inputs)
        elif name == "num_embeddings" and sizes.vocabulary is not None:
            found[name] = sizes.vocabulary
    return found


def _check_options(layer: type[nn.Module], call: Call, known: Sequence[str]) -> None:
    shown = [name for name in known if name not in ("device", "dtype")]
    check_options(layer.__name__, call.options, shown, kind="argument")


def _size(value: Any, sizes: Sizes) -> Any:
    """Replace `'classes'` and `'vocabulary'` by the sizes of the data."""
    if value not in ("classes", "vocabulary"):
        return value
    number = getattr(sizes, value)
    if number is None:
        raise ConfigError(f"The number of {value} cannot be determined from this data. Write the number itself.")
    return number


def _why(parameters: Mapping[str, Any], sizes: Sizes) -> str:
    has_none = "num_embeddings" in parameters and sizes.vocabulary is None
    return "; this data has no vocabulary to determine num_embeddings" if has_none else ""
