"""`syncline bench serve`: its requests are those of the protocol."""

from __future__ import annotations

import numpy as np
import pytest

from syncline.lab.bench import serve
from syncline.serving.server.messages import parse_request
from syncline.serving.server.signature import Signature, TensorSpec

LENET = Signature((TensorSpec("input", "UINT8", (-1, 1, 28, 28)),), (TensorSpec("logits", "FP32", (-1, 10)),))


@pytest.mark.parametrize("request_", [serve.binary_request(), serve.json_request()])
def test_both_kinds_of_request_send_the_same_image(request_):
    head, _, body = request_.partition(b"\r\n\r\n")
    size = head.partition(b"Inference-Header-Content-Length: ")[2].split(b"\r\n")[0]
    found = parse_request(body, int(size) if size else None, LENET)
    assert np.array_equal(found.tensors["input"], serve._IMAGE)
    assert found.outputs == (("logits", bool(size)),)
