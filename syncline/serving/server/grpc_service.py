"""The protocol over gRPC: health, metadata and inference, on the same models, queues and limits as HTTP.

The messages come from the package open-inference-grpc, which is compiled from the protocol's own definition. Loading
and unloading are not in it: use HTTP. Not here: what happens to a request (`app.py`).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from open_inference.grpc import protocol, service

from syncline import __version__
from syncline.serving.server.app import EXTENSIONS, App, engine_error
from syncline.serving.server.batching import Outputs
from syncline.serving.server.datatypes import datatype_of, from_bytes, from_json, to_bytes
from syncline.serving.server.refusal import RequestRefused
from syncline.serving.server.registry import LoadedVersion
from syncline.serving.server.signature import TensorSpec

__all__ = ["start_grpc"]

_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT, 401: grpc.StatusCode.UNAUTHENTICATED, 404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED, 500: grpc.StatusCode.INTERNAL, 503: grpc.StatusCode.UNAVAILABLE,
}  # fmt: skip
_FIELDS = {
    "BOOL": "bool_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents",
}  # fmt: skip
_ROOM_BYTES = 2**20
"""For what a message holds besides its tensors."""


async def start_grpc(app: App, address: str, tls: tuple[str, str] | None) -> grpc.aio.Server:
    """A server on this address, which all processes share."""
    most = app.limits.body_bytes + _ROOM_BYTES
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 1),
            ("grpc.max_receive_message_length", most),
            ("grpc.max_send_message_length", -1),
        ]
    )
    service.add_GRPCInferenceServiceServicer_to_server(_Service(app), server)  # type: ignore[no-untyped-call]
    if tls is None:
        server.add_insecure_port(address)
    else:
        certificate, key = (Path(file).read_bytes() for file in tls)
        server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)]))
    await server.start()
    return server


class _Service(service.GRPCInferenceServiceServicer):
    def __init__(self, app: App) -> None:
        self._app = app

    async def ServerLive(self, request: Any, context: Any) -> Any:
        del request, context
        return protocol.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        del request, context
        return protocol.ServerReadyResponse(ready=self._app.is_ready)

    async def ModelReady(self, request: Any, context: Any) -> Any:
        await self._check(context)
        try:
            self._app.registry.find(request.name, request.version or None)
        except RequestRefused:
            return protocol.ModelReadyResponse(ready=False)
        return protocol.ModelReadyResponse(ready=self._app.is_ready)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        del request
        await self._check(context)
        return protocol.ServerMetadataResponse(name="syncline", version=__version__, extensions=EXTENSIONS)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        await self._check(context)
        try:
            version = self._app.registry.find(request.name, request.version or None)
        except RequestRefused as refusal:
            await _abort(context, refusal)
        answer = protocol.ModelMetadataResponse(
            name=request.name, versions=self._app.registry.versions_of(request.name),
            platform=version.tuned.engine.platform,
        )  # fmt: skip
        for specs, described in (
            (version.signature.inputs, answer.inputs),
            (version.signature.outputs, answer.outputs),
        ):
            for spec in specs:
                described.add(name=spec.name, datatype=spec.datatype, shape=spec.shape)
        return answer

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        await self._check(context)
        try:
            version = self._app.registry.pick(request.model_name, request.model_version or None)
            self._app.admit(version)
            tensors = _tensors(request, version)
            wanted = [output.name for output in request.outputs]
            version.signature.check_outputs(wanted)
            result = await self._infer(version, tensors)
        except RequestRefused as refusal:
            await _abort(context, refusal)
        return _answer(request.id, version, result, wanted or list(result))

    async def _infer(self, version: LoadedVersion, tensors: dict[str, np.ndarray]) -> Outputs:
        future: asyncio.Future[Outputs] = asyncio.get_running_loop().create_future()

        def done(result: Outputs | BaseException) -> None:
            if future.done():  # the client has gone
                return
            if isinstance(result, BaseException):
                future.set_exception(result if isinstance(result, RequestRefused) else engine_error(result))
            else:
                future.set_result(result)

        self._app.infer(version, tensors, done)
        return await future

    async def _check(self, context: Any) -> None:
        given = dict(context.invocation_metadata() or ()).get("authorization", "")
        if not self._app.access.allows(given.encode()):
            await _abort(context, RequestRefused("This server needs its token.", status=401, code="unauthorized"))


def _tensors(request: Any, version: LoadedVersion) -> dict[str, np.ndarray]:
    """The inputs, from raw bytes or from the typed fields."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise RequestRefused(
            f"There are {len(request.inputs)} inputs and the data of {len(raw)}.", code="wrong-size", inputs=len(raw)
        )
    found: dict[str, np.ndarray] = {}
    for k, one in enumerate(request.inputs):
        shape = list(one.shape)
        version.signature.check_input(one.name, one.datatype, shape)
        if raw:
            found[one.name] = from_bytes(raw[k], one.datatype, shape, one.name)
        else:
            found[one.name] = _typed(one, version.signature.by_name[one.name], shape)
    version.signature.check_complete(found)
    return found


def _typed(one: Any, spec: TensorSpec, shape: list[int]) -> np.ndarray:
    if spec.datatype == "BYTES":
        words = [value.decode(errors="surrogateescape") for value in one.contents.bytes_contents]
        return from_json(words, "BYTES", shape, one.name)
    field = _FIELDS.get(spec.datatype)
    if field is None:
        raise RequestRefused(f"{spec.datatype} needs raw_input_contents.", code="binary-only", input=one.name)
    return from_json(list(getattr(one.contents, field)), spec.datatype, shape, one.name, may_have_booleans=False)


def _answer(identity: str, version: LoadedVersion, outputs: Outputs, wanted: list[str]) -> Any:
    answer = protocol.ModelInferResponse(
        model_name=version.served.model, model_version=version.served.version, id=identity
    )
    for name in wanted:
        array = outputs[name]
        answer.outputs.add(name=name, datatype=datatype_of(array.dtype), shape=array.shape)
        answer.raw_output_contents.append(to_bytes(array))
    return answer


async def _abort(context: Any, refusal: RequestRefused) -> None:
    await context.abort(_STATUS.get(refusal.status, grpc.StatusCode.UNKNOWN), str(refusal))
    raise AssertionError("abort raises")
