"""Inference requests and responses of the protocol, in JSON and with binary tensors.

Here: bytes to `InferRequest` and back, pure. Not here: the values of a tensor (`datatypes.py`), URLs and status codes
(`app.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from syncline.serving.server.binary_plan import BinaryPlan, BinaryPlans
from syncline.serving.server.datatypes import DTYPES, datatype_of, from_bytes, from_json, to_bytes, to_json
from syncline.serving.server.refusal import RequestRefused
from syncline.serving.server.signature import Signature

__all__ = ["InferRequest", "encode_response", "parse_request"]

_REFUSED_PARAMETERS = ("shared_memory_region", "classification")
"""Extensions of the protocol that change the meaning of a tensor. Ignoring them would give a wrong answer."""


Value = TypeVar("Value")


class _Input(msgspec.Struct, Generic[Value]):
    name: str
    shape: list[int]
    datatype: str
    data: list[Value] | None = None
    parameters: dict[str, Any] | None = None


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] | None = None


class _Request(msgspec.Struct, Generic[Value]):
    inputs: list[_Input[Value]]
    id: str = ""
    outputs: list[_Output] | None = None
    parameters: dict[str, Any] | None = None


@dataclass(slots=True)
class InferRequest:
    """What a client asks for."""

    tensors: dict[str, np.ndarray]
    id: str = ""
    outputs: tuple[tuple[str, bool], ...] = ()
    """Each requested output, in order, and whether its data is binary. Empty: all of them."""
    is_binary: bool = False
    """Whether outputs that were not requested by name are binary."""
    plan: BinaryPlan | None = None
    """For a request whose JSON, and that of its response, may be known."""


_decode_any = msgspec.json.Decoder(_Request[Any]).decode
_TYPED: dict[type, Callable[[bytes | memoryview], _Request[Any]]] = {
    int: msgspec.json.Decoder(_Request[int]).decode,
    float: msgspec.json.Decoder(_Request[float]).decode,
}
"""Flat numbers of one kind. Refusing booleans while decoding costs nothing; looking for them afterwards does."""
_encode = msgspec.json.Encoder().encode


def parse_request(
    body: bytes, json_size: int | None, signature: Signature, plans: BinaryPlans | None = None
) -> InferRequest:
    """The request in `body`, checked against the model. `json_size` is the header of the binary extension."""
    if json_size and plans is not None and (plan := plans.find(body, json_size)) is not None:
        return InferRequest(plan.tensors(body, json_size), "", plan.outputs, True, plan)
    if json_size == 0 and body:
        return _parse_raw(body, signature)
    if json_size is not None and not 0 <= json_size <= len(body):
        raise RequestRefused(
            f"Inference-Header-Content-Length is {json_size}, but the body has {len(body)} bytes.",
            code="wrong-header", json_size=json_size, size_bytes=len(body),
        )  # fmt: skip
    found, is_typed = _decoded(body if json_size is None else memoryview(body)[:json_size], signature)
    binary = memoryview(body)[len(body) if json_size is None else json_size :]
    tensors = _tensors(found.inputs, binary, signature, may_have_booleans=not is_typed)
    signature.check_complete(tensors)
    is_binary = _flag(found.parameters, "binary_data_output", False)
    request = InferRequest(tensors, found.id, _wanted(found.outputs, is_binary, signature), is_binary)
    is_all_binary = json_size is not None and all(one.data is None for one in found.inputs)
    if plans is not None and is_all_binary and not found.id and (is_binary or request.outputs):
        request.plan = BinaryPlan.of(tensors, request.outputs)
        if request.plan is not None and json_size is not None:
            plans.remember(body, json_size, request.plan)
    return request


def _decoded(text: bytes | memoryview, signature: Signature) -> tuple[_Request[Any], bool]:
    """The JSON, and whether its data are known to be flat numbers of the signature's kind."""
    typed = _TYPED.get(signature.numbers) if signature.numbers is not None else None
    if typed is not None:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return typed(text), True
    try:
        return _decode_any(text), False  # nested rows, strings, and what is wrong
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRefused(f"The request is not valid: {error}.", code="malformed") from error


def encode_response(
    request: InferRequest, name: str, version: str, outputs: Mapping[str, np.ndarray]
) -> tuple[bytes, int | None]:
    """The body of the response; with binary data also the size of its JSON."""
    wanted = request.outputs or [(output, request.is_binary) for output in outputs]
    arrays = [outputs[output] for output, _ in wanted]
    if request.plan is not None and (known := request.plan.head_for(arrays)) is not None:
        return b"".join([known, *[array.tobytes() for array in arrays]]), len(known)
    described, binary = [], []
    for (output, is_binary), array in zip(wanted, arrays, strict=True):
        one: dict[str, Any] = {"name": output, "datatype": datatype_of(array.dtype), "shape": array.shape}
        if is_binary:
            data = to_bytes(array)
            binary.append(data)
            one["parameters"] = {"binary_data_size": len(data)}
        else:
            one["data"] = _json_data(output, array)
        described.append(one)
    answer: dict[str, Any] = {"model_name": name, "model_version": version, "outputs": described}
    if request.id:
        answer["id"] = request.id
    head = _encode(answer)
    if request.plan is not None:
        request.plan.remember_head(arrays, head)
    return (b"".join([head, *binary]), len(head)) if binary else (head, None)


def _json_data(output: str, array: np.ndarray) -> list[Any]:
    values = to_json(array)
    # JSON has neither NaN nor infinity; `null` in their place would be silently wrong. A finite sum has finite terms.
    if array.dtype.kind == "f" and not isfinite(sum(values)) and not all(map(isfinite, values)):
        raise RequestRefused(
            f"Output {output!r} is not finite, which JSON cannot express. Ask for binary data to see it.",
            status=500, code="non-finite-output", output=output,
        )  # fmt: skip
    if array.dtype == np.float16:
        raise RequestRefused(
            f"Output {output!r} is FP16, which has no JSON form. Ask for binary data.",
            code="binary-only", output=output,
        )  # fmt: skip
    return values


def _tensors(
    inputs: list[_Input[Any]], binary: memoryview, signature: Signature, *, may_have_booleans: bool
) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    place = 0
    for one in inputs:
        if one.name in tensors:
            raise RequestRefused(f"Input {one.name!r} is there twice.", code="repeated-input", input=one.name)
        signature.check_input(one.name, one.datatype, one.shape)
        size = _binary_size(one)
        if size is None:
            if one.data is None:
                raise RequestRefused(f"Input {one.name!r} has no data.", code="missing-data", input=one.name)
            tensors[one.name] = from_json(
                one.data, one.datatype, one.shape, one.name, may_have_booleans=may_have_booleans
            )
            continue
        if place + size > len(binary):
            raise RequestRefused(
                f"The binary data ends before that of input {one.name!r}: {place + size} bytes are announced, "
                f"{len(binary)} are there.",
                code="wrong-size", input=one.name, size_bytes=len(binary),
            )  # fmt: skip
        tensors[one.name] = from_bytes(binary[place : place + size], one.datatype, one.shape, one.name)
        place += size
    if place != len(binary):
        raise RequestRefused(
            f"{len(binary) - place} bytes follow the tensors.", code="wrong-size", size_bytes=len(binary)
        )
    return tensors


def _binary_size(one: _Input[Any]) -> int | None:
    """The size of its binary data; None if its data is in the JSON."""
    if not one.parameters:
        return None
    _refuse_extensions(one.parameters, one.name)
    size = one.parameters.get("binary_data_size")
    if size is None:
        return None
    if type(size) is not int or size < 0 or one.data is not None:
        raise RequestRefused(
            f"Input {one.name!r}: binary_data_size is {size!r}; it must be 0 or more, without data in the JSON.",
            code="wrong-size", input=one.name,
        )  # fmt: skip
    return size


def _wanted(outputs: list[_Output] | None, is_binary: bool, signature: Signature) -> tuple[tuple[str, bool], ...]:
    if not outputs:
        return ()
    signature.check_outputs([one.name for one in outputs])
    for one in outputs:
        _refuse_extensions(one.parameters or {}, one.name)
    return tuple((one.name, _flag(one.parameters, "binary_data", is_binary)) for one in outputs)


def _refuse_extensions(parameters: dict[str, Any], name: str) -> None:
    for parameter in _REFUSED_PARAMETERS:
        # tritonclient sends a classification of 0 classes for none.
        if parameters.get(parameter):
            raise RequestRefused(
                f"Tensor {name!r}: this server does not support {parameter}.",
                code="unsupported-parameter", tensor=name, parameter=parameter,
            )  # fmt: skip


def _flag(parameters: dict[str, Any] | None, name: str, default: bool) -> bool:
    value = (parameters or {}).get(name, default)
    if not isinstance(value, bool):
        raise RequestRefused(f"The parameter {name} is {value!r}, but must be true or false.", code="malformed")
    return value


def _parse_raw(body: bytes, signature: Signature) -> InferRequest:
    """A raw binary request: the body is the data of the only input, and the batch follows from its size."""
    if len(signature.inputs) != 1 or signature.inputs[0].datatype == "BYTES":
        raise RequestRefused("A raw request needs a model with one input of numbers.", code="raw-request")
    (spec,) = signature.inputs
    fixed = DTYPES[spec.datatype].itemsize
    for size in spec.shape:
        fixed *= abs(size)
    unknown = sum(size < 0 for size in spec.shape)
    if unknown > 1 or (unknown and len(body) % max(fixed, 1)):
        raise RequestRefused("The shape does not follow from the size of this raw request.", code="raw-request")
    shape = [len(body) // max(fixed, 1) if size < 0 else size for size in spec.shape]
    tensors = {spec.name: from_bytes(body, spec.datatype, shape, spec.name)}
    return InferRequest(tensors, is_binary=True)
