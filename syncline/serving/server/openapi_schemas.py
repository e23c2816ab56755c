"""Schemas of the OpenAPI document that are the same for all models. Not here: the document (`openapi.py`)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from syncline.serving.server.datatypes import DTYPES

__all__ = ["ERRORS", "FEEDBACK", "SCHEMAS", "value_schema"]

_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer"}},
        "datatype": {"type": "string", "enum": list(DTYPES)},
        "parameters": {"type": "object", "nullable": True},
        "data": {"type": "array", "items": {}, "nullable": True},
    },
}
_METADATA_TENSOR = {"type": "array", "items": {"$ref": "#/components/schemas/tensor_metadata"}}
SCHEMAS: dict[str, Any] = {
    "error": {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}},
    "tensor": _TENSOR,
    "tensor_metadata": {
        "type": "object",
        "required": ["name", "datatype", "shape"],
        "properties": {
            "name": {"type": "string"},
            "datatype": {"type": "string", "enum": list(DTYPES)},
            "shape": {"type": "array", "items": {"type": "integer"}},
        },
    },
    "metadata_server": {
        "type": "object",
        "required": ["name", "version", "extensions"],
        "properties": {
            "name": {"type": "string"},
            "version": {"type": "string"},
            "extensions": {"type": "array", "items": {"type": "string"}},
        },
    },
    "metadata_model": {
        "type": "object",
        "required": ["name", "platform", "inputs", "outputs"],
        "properties": {
            "name": {"type": "string"},
            "versions": {"type": "array", "items": {"type": "string"}},
            "platform": {"type": "string"},
            "inputs": _METADATA_TENSOR,
            "outputs": _METADATA_TENSOR,
            "parameters": {"type": "object"},
        },
    },
    "inference_request": {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "parameters": {"type": "object", "nullable": True},
            "inputs": {"type": "array", "items": {"$ref": "#/components/schemas/tensor"}, "minItems": 1},
            "outputs": {
                "type": "array",
                "nullable": True,
                "items": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": {"type": "string"}, "parameters": {"type": "object", "nullable": True}},
                },
            },
        },
    },
    "inference_response": {
        "type": "object",
        "required": ["model_name", "outputs"],
        "properties": {
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "id": {"type": "string"},
            "outputs": {"type": "array", "items": {"$ref": "#/components/schemas/tensor"}},
        },
    },
    "predict_response": {
        "type": "object",
        "required": ["model_name", "model_version", "predictions"],
        "properties": {
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "predictions": {"type": "array", "items": {"type": "object"}},
        },
    },
    "feedback_response": {
        "type": "object",
        "required": ["counted", "right"],
        "properties": {"counted": {"type": "integer"}, "right": {"type": "integer"}},
    },
    "index": {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["name", "version", "state", "reason"],
            "properties": {key: {"type": "string"} for key in ("name", "version", "state", "reason")},
        },
    },
    "live": {"type": "object", "required": ["live"], "properties": {"live": {"type": "boolean"}}},
    "ready": {"type": "object", "required": ["ready"], "properties": {"ready": {"type": "boolean"}}},
    "empty": {"type": "object", "maxProperties": 0},
}
_PAIRS = [
    {
        "type": "object",
        "required": ["prediction", "label"],
        "properties": {"prediction": {"type": kind}, "label": {"type": kind}},
        "additionalProperties": False,
    }
    for kind in ("number", "string", "boolean")
]
FEEDBACK = {
    "type": "object",
    "required": ["outcomes"],
    "properties": {"outcomes": {"type": "array", "items": {"oneOf": _PAIRS}, "minItems": 1}},
    "additionalProperties": False,
}
ERRORS = {"400": "The request is wrong.", "401": "The token is missing.", "403": "Another host or site asks.",
           "404": "There is no such model or version.", "413": "The request is too large.",
           "415": "The content is of another type.", "500": "The model failed.",
           "503": "The server is busy or not ready; try again after Retry-After."}  # fmt: skip
_MOST_FP32 = math.nextafter(2.0**128 - 2.0**103, 0.0)
"""The largest 64-bit number that rounds to a finite 32-bit one."""
_MOST_FP64 = 1.7976931348623157e308


def value_schema(datatype: str) -> dict[str, Any] | None:
    """One value of a tensor in JSON; None for FP16, which has no JSON form.

    >>> value_schema("UINT8")
    {'type': 'integer', 'minimum': 0, 'maximum': 255}
    """
    if datatype == "FP16":
        return None
    if datatype in ("BOOL", "BYTES"):
        return {"type": "boolean" if datatype == "BOOL" else "string"}
    if datatype in ("FP32", "FP64"):
        most = _MOST_FP32 if datatype == "FP32" else _MOST_FP64
        return {"type": "number", "minimum": -most, "maximum": most}
    limits = np.iinfo(DTYPES[datatype])
    return {"type": "integer", "minimum": int(limits.min), "maximum": int(limits.max)}
