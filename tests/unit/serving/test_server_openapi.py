"""The OpenAPI document against the server that it describes."""

from __future__ import annotations

import json

import pytest
from server_world import BODY, INFER, Adds

from syncline.serving.server.signature import Signature, TensorSpec


def test_the_openapi_document_has_every_address_that_answers(world):
    server = world()
    document = server.ask("GET", "/v2/openapi.json")[1]
    from openapi_spec_validator import validate

    validate(document)
    example = document["paths"][INFER]["post"]["requestBody"]["content"]["application/json"]["example"]
    assert server.ask("POST", INFER, json.dumps(example).encode())[0] == 200


def body_schema(server, path: str):
    """What the document says about the body of a request."""
    from jsonschema import Draft202012Validator

    document = server.ask("GET", "/v2/openapi.json")[1]
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return Draft202012Validator({**schema, "components": document["components"]})


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"rows": [[1, 2], [3, 4.5]]}, 200),
        ({"rows": [[1, 2, 3]]}, 400),
        ({"rows": [[1, "2"]]}, 400),
        ({"rows": [[1, 1e39]]}, 400),
        ({"rows": []}, 400),
        ({"rows": [[1, 2]], "text": "a"}, 400),
        ({"rows": [[1, 2]], "more": 1}, 400),
        ({"text": "a"}, 400),
        ({}, 400),
    ],
)
def test_the_document_says_which_predictions_are_answered(world, body, status):
    server, path = world(), "/v2/models/m/predict"
    assert body_schema(server, path).is_valid(body) == (status == 200)
    assert server.ask("POST", path, json.dumps(body).encode())[0] == status


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, 200),
        ({"outputs": [{"name": "y"}]}, 200),
        ({"outputs": [{"name": ""}]}, 400),
        ({"inputs": []}, 400),
        ({"inputs": [{"name": "z", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}, 400),
        ({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "INT8", "data": [1, 2]}]}, 400),
        ({"inputs": [{"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2]}]}, 400),
        ({"id": 3}, 400),
    ],
)
def test_the_document_has_the_names_and_types_of_the_model(world, change, status):
    server, body = world(), {**json.loads(BODY), **change}
    assert body_schema(server, INFER).is_valid(body) == (status == 200)
    assert server.ask("POST", INFER, json.dumps(body).encode())[0] == status


def test_a_model_with_several_inputs_has_no_prediction_for_people_in_the_document(world):
    engine = Adds()
    engine.signature = Signature((*Adds.signature.inputs, TensorSpec("z", "FP32", (-1, 2))), Adds.signature.outputs)
    paths = world(engine).ask("GET", "/v2/openapi.json")[1]["paths"]
    assert INFER in paths
    assert not [path for path in paths if path.endswith("/predict")]
