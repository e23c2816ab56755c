"""`Signature`: the tensors that a model takes and returns, and the check of a request against them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from syncline.serving.server.datatypes import DTYPES
from syncline.serving.server.refusal import RequestRefused

__all__ = ["Signature", "TensorSpec"]

_NUMBERS: dict[str, type[int] | type[float]] = {"u": int, "i": int, "f": float}


@dataclass(frozen=True)
class TensorSpec:
    """One input or output; -1 in the shape is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}

    def accepts(self, shape: Sequence[int]) -> bool:
        return len(shape) == len(self.shape) and all(
            size == wanted or (wanted < 0 <= size) for size, wanted in zip(shape, self.shape, strict=True)
        )


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a model, in its order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    by_name: Mapping[str, TensorSpec] = field(init=False)
    output_names: tuple[str, ...] = field(init=False)
    numbers: type[int] | type[float] | None = field(init=False)
    """The kind of all inputs; None if it is not the same, or another one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {spec.name: spec for spec in self.inputs})
        object.__setattr__(self, "output_names", tuple(spec.name for spec in self.outputs))
        kinds = {_NUMBERS.get(DTYPES[spec.datatype].kind) for spec in self.inputs}
        object.__setattr__(self, "numbers", kinds.pop() if len(kinds) == 1 else None)

    def check_input(self, name: str, datatype: str, shape: Sequence[int]) -> None:
        """Refuse an input that the model does not have, or not with this type and shape."""
        spec = self.by_name.get(name)
        if spec is None:
            known = ", ".join(self.by_name)
            raise RequestRefused(
                f"The model has no input {name!r}. It has: {known}.",
                code="unknown-input", input=name, known=list(self.by_name),
            )  # fmt: skip
        if datatype != spec.datatype:
            hint = "" if datatype in DTYPES else " The protocol has no such datatype."
            raise RequestRefused(
                f"Input {name!r} is {datatype}, but must be {spec.datatype}.{hint}",
                code="wrong-datatype", input=name, datatype=datatype, expected=spec.datatype,
            )  # fmt: skip
        if not spec.accepts(shape):
            raise RequestRefused(
                f"Input {name!r} has the shape {list(shape)}, but must have {list(spec.shape)} (-1 is any size).",
                code="wrong-shape", input=name, shape=list(shape), expected=list(spec.shape),
            )  # fmt: skip

    def check_complete(self, tensors: Mapping[str, np.ndarray]) -> None:
        missing = [name for name in self.by_name if name not in tensors]
        if missing:
            raise RequestRefused(f"The request lacks the input {missing[0]!r}.", code="missing-input", missing=missing)

    def check_outputs(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.output_names:
                raise RequestRefused(
                    f"The model has no output {name!r}. It has: {', '.join(self.output_names)}.",
                    code="unknown-output", output=name, known=list(self.output_names),
                )  # fmt: skip
