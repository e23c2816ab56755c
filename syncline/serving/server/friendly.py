"""Inputs as people have them, and answers as they read them: images, rows of numbers, text; classes by name.

Here: `POST /v2/models/M/predict`, for models that Syncline exported: their metadata says what an input is. Not here:
the protocol's own tensors (`messages.py`).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from math import prod
from typing import Any

import msgspec
import numpy as np

from syncline.data.image_input import read_image
from syncline.errors import DataError
from syncline.serving.metadata import ModelMetadata
from syncline.serving.server.batching import Outputs
from syncline.serving.server.datatypes import DTYPES, from_json, to_json
from syncline.serving.server.refusal import RequestRefused
from syncline.serving.server.registry import LoadedVersion
from syncline.serving.server.signature import TensorSpec

__all__ = ["described", "tensors_of"]

_MOST_PIXELS = 20_000_000


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    rows: list[list[Any]] | None = None
    text: str | None = None


def tensors_of(body: bytes, content_type: str, version: LoadedVersion) -> dict[str, np.ndarray]:
    """The model's input in a request: an image, `{"rows": [[...], ...]}`, or `{"text": "..."}`."""
    if len(version.signature.inputs) != 1:
        raise RequestRefused("The model has several inputs. Use /infer.", code="several-inputs")
    (spec,) = version.signature.inputs
    if content_type.startswith("image/"):
        return {spec.name: _image(body, spec, version.metadata)}
    try:
        asked = msgspec.json.decode(body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRefused(f"Send an image, or JSON with rows or text: {error}.", code="malformed") from error
    if asked.text is not None and asked.rows is not None:
        raise RequestRefused("Send rows or text, not both.", code="malformed")
    if asked.text is not None:
        return {spec.name: _text(asked.text, spec, version.metadata)}
    if not asked.rows:
        raise RequestRefused('Send {"rows": [[...], ...]} with one row or more.', code="missing-data")
    return {spec.name: _rows(asked.rows, spec, version)}


def described(version: LoadedVersion, outputs: Outputs) -> dict[str, Any]:
    """One prediction for each row: the class with its probability, or the plain values."""
    metadata, served = version.metadata, version.served
    answer: dict[str, Any] = {"model_name": served.model, "model_version": served.version}
    if metadata is not None and metadata.answers == "classes" and metadata.kind != "text":
        scores = _probabilities(outputs)
        names = metadata.class_names or tuple(map(str, range(scores.shape[1])))
        answer["predictions"] = [_classified(row, names) for row in scores.tolist()]
    elif metadata is not None and metadata.kind == "text":
        last = next(iter(outputs.values()))[:, -1]
        answer["predictions"] = [_next_token(row, metadata) for row in _softmax(last).tolist()]
    else:
        rows = len(next(iter(outputs.values())))
        values = {name: [to_json(array[row]) for row in range(rows)] for name, array in outputs.items()}
        answer["predictions"] = [{name: found[row] for name, found in values.items()} for row in range(rows)]
    return answer


def _image(body: bytes, spec: TensorSpec, metadata: ModelMetadata | None) -> np.ndarray:
    if metadata is None or metadata.kind != "image":
        raise RequestRefused("The model takes no images.", status=415, code="wrong-content-type")
    channels, height, width = metadata.inputs[0].shape
    try:
        _check_pixels(body)
        pixels = read_image(io.BytesIO(body), (channels, height, width), is_handwriting=metadata.is_handwriting)
    except DataError as error:
        raise RequestRefused(str(error), code="bad-image") from error
    dtype = DTYPES[spec.datatype]
    # An exported graph scales bytes itself.
    found = (pixels * 255).round().astype(dtype) if dtype.kind == "u" else pixels.astype(dtype)
    return np.ascontiguousarray(found[None])


def _check_pixels(body: bytes) -> None:
    """Refuse a small file that unpacks to a huge image, before it is unpacked."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(body)) as image:
            width, height = image.size
    except Exception as error:  # Pillow raises many types for damaged files
        raise DataError(f"This is not an image that Pillow can read: {type(error).__name__}.") from error
    if width * height > _MOST_PIXELS:
        raise DataError(f"The image has {width} x {height} pixels; {_MOST_PIXELS:,} are allowed.")


def _rows(rows: list[list[Any]], spec: TensorSpec, version: LoadedVersion) -> np.ndarray:
    shape = [len(rows), *_sample_shape(version.metadata.inputs[0].shape if version.metadata else spec.shape[1:], rows)]
    version.signature.check_input(spec.name, spec.datatype, shape)
    flat = [value for row in rows for value in row]
    if any(len(row) != len(flat) // len(rows) for row in rows):
        raise RequestRefused("The rows have different lengths.", code="wrong-size", rows=len(rows))
    return from_json(flat, spec.datatype, shape, spec.name)


def _sample_shape(shape: Sequence[int], rows: list[list[Any]]) -> list[int]:
    """A dimension of any size follows from the length of the rows."""
    if sum(size < 0 for size in shape) > 1:
        raise RequestRefused("The model's input has several dimensions of any size. Use /infer.", code="several-shapes")
    known = prod(size for size in shape if size >= 0)
    return [len(rows[0]) // max(known, 1) if size < 0 else size for size in shape]


def _text(text: str, spec: TensorSpec, metadata: ModelMetadata | None) -> np.ndarray:
    if metadata is None or metadata.kind != "text" or not metadata.class_names:
        raise RequestRefused("The model takes no text.", code="no-text")
    tokens = {character: token for token, character in enumerate(metadata.class_names)}
    unknown = sorted(set(text) - set(tokens))
    if unknown or not text:
        raise RequestRefused(
            f"The model does not know these characters: {' '.join(map(repr, unknown[:10]))}."
            if unknown else "The text is empty.",
            code="unknown-characters", characters=unknown[:10],
        )  # fmt: skip
    length = metadata.inputs[0].shape[0]
    if length >= 0 and len(text) < length:
        raise RequestRefused(
            f"The model reads {length} characters; the text has {len(text)}.",
            code="wrong-size", expected=length, found=len(text),
        )  # fmt: skip
    used = text[-length:] if length > 0 else text
    return np.array([[tokens[character] for character in used]], DTYPES[spec.datatype])


def _probabilities(outputs: Outputs) -> np.ndarray:
    """Of the classes: an output of this name, else the softmax of the first one."""
    found = outputs.get("probabilities")
    return found if found is not None else _softmax(next(iter(outputs.values())))


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def _classified(row: list[float], names: tuple[str, ...]) -> dict[str, Any]:
    best = max(range(len(row)), key=row.__getitem__)
    return {"class": names[best], "probability": row[best], "probabilities": dict(zip(names, row, strict=True))}


def _next_token(row: list[float], metadata: ModelMetadata) -> dict[str, Any]:
    best = max(range(len(row)), key=row.__getitem__)
    names = metadata.class_names or tuple(map(str, range(len(row))))
    return {"next": names[best], "probability": row[best]}
