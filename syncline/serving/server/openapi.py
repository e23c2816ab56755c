"""The OpenAPI document of a server: the addresses of the protocol, with the models that it serves."""

from __future__ import annotations

from math import prod
from typing import Any

from syncline import __version__
from syncline.serving.server.openapi_schemas import ERRORS, FEEDBACK, SCHEMAS, value_schema
from syncline.serving.server.registry import LoadedVersion, Registry

__all__ = ["openapi"]

_MOST_VALUES = 10_000
"""Larger inputs have no example."""


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
        "components": {"schemas": SCHEMAS, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{"token": []}, {}],
    }


def _model_paths(name: str, version: LoadedVersion) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in (f"/v2/models/{name}", f"/v2/models/{name}/versions/{version.served.version}"):
        found[base] = _get(f"Inputs and outputs of {name}.", "metadata_model")
        found[f"{base}/ready"] = _get("Whether it is loaded.", "ready")
        infer = _operation("Run the model.", "inference_response", body=_infer_body(version))
        infer["requestBody"]["content"]["application/json"] |= _example(version)
        found[f"{base}/infer"] = {"post": infer}
        if content := _predict_content(version):
            predict = _operation("Predict for an image, rows or text.", "predict_response")
            found[f"{base}/predict"] = {"post": {**predict, "requestBody": {"required": True, "content": content}}}
    found[f"/v2/models/{name}/versions/{version.served.version}/feedback"] = {
        "post": _operation("Count which predictions were right.", "feedback_response", body=FEEDBACK)
    }
    for action in ("load", "unload"):
        found[f"/v2/repository/models/{name}/{action}"] = {"post": _operation(f"{action.title()} {name}.", "empty")}
    return found


def _get(summary: str, schema: str) -> dict[str, Any]:
    return {"get": _operation(summary, schema)}


def _operation(summary: str, schema: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    answer = {"schema": {"$ref": f"#/components/schemas/{schema}"}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/error"}}}
    errors = {status: {"description": text, "content": error} for status, text in ERRORS.items()}
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


def _infer_body(version: LoadedVersion) -> dict[str, Any]:
    """The protocol's request, with the names and types of this model."""
    general, signature = SCHEMAS["inference_request"]["properties"], version.signature
    tensors = [
        {**SCHEMAS["tensor"], "properties": {
            **SCHEMAS["tensor"]["properties"],
            "name": {"type": "string", "enum": [spec.name]},
            "datatype": {"type": "string", "enum": [spec.datatype]},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 0},
                      "minItems": len(spec.shape), "maxItems": len(spec.shape)},
        }}
        for spec in signature.inputs
    ]  # fmt: skip
    output = general["outputs"]["items"]
    names = {"name": {"type": "string", "enum": list(signature.output_names)}}
    output = {**output, "properties": {**output["properties"], **names}}
    inputs = {"type": "array", "items": {"oneOf": tensors}, "minItems": len(tensors), "maxItems": len(tensors)}
    properties = {**general, "inputs": inputs, "outputs": {**general["outputs"], "items": output}}
    return {"type": "object", "required": ["inputs"], "properties": properties}


def _predict_content(version: LoadedVersion) -> dict[str, Any]:
    """What this model's prediction takes, by content type; empty if nothing."""
    if len(version.signature.inputs) != 1:
        return {}
    (spec,), metadata = version.signature.inputs, version.metadata
    bodies = []
    value, shape = value_schema(spec.datatype), metadata.inputs[0].shape if metadata else spec.shape[1:]
    if value is not None and sum(size < 0 for size in shape) < 2 and 0 not in shape:
        row: dict[str, Any] = {"type": "array", "items": value, "minItems": 1}
        if all(size > 0 for size in shape):
            row |= {"minItems": prod(shape), "maxItems": prod(shape)}
        bodies.append(_one_field("rows", {"type": "array", "items": row, "minItems": 1}))
    if metadata is not None and metadata.kind == "text" and metadata.class_names:
        known = "".join(f"\\{one}" if one in "\\]^-" else one for one in metadata.class_names)
        least = max(1, metadata.inputs[0].shape[0])
        bodies.append(_one_field("text", {"type": "string", "pattern": f"^[{known}]{{{least},}}$"}))
    content: dict[str, Any] = {"application/json": {"schema": {"oneOf": bodies}}} if bodies else {}
    if metadata is not None and metadata.kind == "image":
        content["image/*"] = {"schema": {"type": "string", "format": "binary"}}
    return content


def _one_field(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": [name], "properties": {name: schema}, "additionalProperties": False}


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
