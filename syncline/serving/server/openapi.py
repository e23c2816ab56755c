"""The OpenAPI document of a server: the addresses of the protocol, with the models that it serves."""

from __future__ import annotations

from math import prod
from typing import Any

from syncline import __version__
from syncline.serving.server.datatypes import DTYPES
from syncline.serving.server.registry import LoadedVersion, Registry

__all__ = ["openapi"]

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
_SCHEMAS: dict[str, Any] = {
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
                    "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}},
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
_PREDICT = {
    "type": "object",
    "properties": {
        "rows": {"type": "array", "items": {"type": "array", "items": {}, "minItems": 1}, "minItems": 1},
        "text": {"type": "string", "minLength": 1},
    },
    "minProperties": 1,
    "maxProperties": 1,
    "additionalProperties": False,
}
_MOST_VALUES = 10_000
"""Larger inputs have no example."""
_ERRORS = {"400": "The request is wrong.", "401": "The token is missing.", "403": "Another host or site asks.",
           "404": "There is no such model or version.", "413": "The request is too large.",
           "415": "The content is of another type.", "500": "The model failed.",
           "503": "The server is busy or not ready; try again after Retry-After."}  # fmt: skip


def openapi(registry: Registry) -> dict[str, Any]:
    """The document, with one example request for each model."""
    paths = {
        "/v2": _get("The server.", "metadata_server"),
        "/v2/health/live": _get("Whether the process runs.", "live"),
        "/v2/health/ready": _get("Whether all models are loaded.", "ready"),
        "/v2/repository/index": {"post": _operation("What is served.", "index", body={"type": "object"})},
    }
    for name in registry.names():
        paths |= _model_paths(name, registry.find(name, registry.versions_of(name)[0]))
    return {
        "openapi": "3.0.3",
        "info": {"title": "syncline serve", "version": __version__},
        "paths": paths,
        "components": {"schemas": _SCHEMAS, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{"token": []}, {}],
    }


def _model_paths(name: str, version: LoadedVersion) -> dict[str, Any]:
    found: dict[str, Any] = {}
    request = {"$ref": "#/components/schemas/inference_request"}
    for base in (f"/v2/models/{name}", f"/v2/models/{name}/versions/{version.served.version}"):
        found[base] = _get(f"Inputs and outputs of {name}.", "metadata_model")
        found[f"{base}/ready"] = _get("Whether it is loaded.", "ready")
        infer = _operation("Run the model.", "inference_response", body=request)
        infer["requestBody"]["content"]["application/json"] |= _example(version)
        found[f"{base}/infer"] = {"post": infer}
    found[f"/v2/models/{name}/predict"] = {
        "post": _operation("Predict for an image, rows or text.", "predict_response", body=_PREDICT)
    }
    for action in ("load", "unload"):
        found[f"/v2/repository/models/{name}/{action}"] = {"post": _operation(f"{action.title()} {name}.", "empty")}
    return found


def _get(summary: str, schema: str) -> dict[str, Any]:
    return {"get": _operation(summary, schema)}


def _operation(summary: str, schema: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    answer = {"schema": {"$ref": f"#/components/schemas/{schema}"}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/error"}}}
    errors = {status: {"description": text, "content": error} for status, text in _ERRORS.items()}
    if schema == "ready":
        errors["503"] = {"description": "Not ready.", "content": {"application/json": answer}}
    found: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "OK", "content": {"application/json": answer}}, **errors},
    }
    if body is not None:
        is_needed = schema != "index"
        found["requestBody"] = {"required": is_needed, "content": {"application/json": {"schema": body}}}
    return found


def _example(version: LoadedVersion) -> dict[str, Any]:
    """A request that the model answers; nothing if its inputs are large or have no JSON form."""
    inputs, values = [], 0
    for spec in version.signature.inputs:
        shape = [abs(size) for size in spec.shape]
        values += prod(shape)
        zero: Any = {"BYTES": "", "BOOL": False}.get(spec.datatype, 0)
        if values > _MOST_VALUES or spec.datatype == "FP16":
            return {}
        inputs.append({"name": spec.name, "shape": shape, "datatype": spec.datatype, "data": [zero] * prod(shape)})
    return {"example": {"inputs": inputs}}
