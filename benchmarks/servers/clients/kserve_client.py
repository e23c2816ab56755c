"""kserve's own clients against a server of ours: kserve_client.py HTTP_PORT GRPC_PORT MODEL. Exits with 1 if one fails.

It runs in an environment with kserve, which does not install beside Syncline's pins. `agree.py` starts it.
"""

import asyncio
import sys

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

IMAGES = np.random.default_rng(0).integers(0, 256, (2, 1, 28, 28), np.uint8)


def request(model: str, *, is_binary: bool) -> InferRequest:
    tensor = InferInput("input", list(IMAGES.shape), "UINT8")
    tensor.set_data_from_numpy(IMAGES, binary_data=is_binary)
    return InferRequest(model_name=model, infer_inputs=[tensor], request_id="mine")


def logits(answer) -> np.ndarray:
    assert answer.id == "mine", answer.id
    return next(one.as_numpy() for one in answer.outputs if one.name == "logits")


async def over_rest(url: str, model: str) -> list[np.ndarray]:
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    assert await client.is_server_live(url)
    assert await client.is_server_ready(url)
    assert await client.is_model_ready(url, model)
    found = [
        await client.infer(url, request(model, is_binary=is_binary), model_name=model) for is_binary in (False, True)
    ]
    await client.close()
    return [logits(one) for one in found]


async def over_grpc(url: str, model: str) -> np.ndarray:
    client = InferenceGRPCClient(url)
    assert await client.is_server_live()
    assert await client.is_server_ready()
    assert await client.is_model_ready(model)
    found = await client.infer(request(model, is_binary=True))
    await client.close()
    return logits(found)


async def main(http_port: str, grpc_port: str, model: str) -> None:
    json, binary = await over_rest(f"http://127.0.0.1:{http_port}", model)
    grpc = await over_grpc(f"127.0.0.1:{grpc_port}", model)
    assert json.shape == binary.shape == grpc.shape == (2, 10), (json.shape, binary.shape, grpc.shape)
    assert np.array_equal(binary, grpc)
    assert np.allclose(json, binary, rtol=1e-6, atol=1e-6)
    print("kserve: REST with JSON and binary, and gRPC: equal answers")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
