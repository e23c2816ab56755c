"""`Replica`: one process of a Ray Serve deployment, which answers with the same `App` as a process of our own server.

Here: from the requests of Ray's proxy to `App` and back. Not here: the deployment (`service.py`), the protocol and the
models (`serving/server/`).
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from syncline.serving.server.access import Access
from syncline.serving.server.app import App, HttpRequest, Manager, Response, refused
from syncline.serving.server.batching import Batcher
from syncline.serving.server.catalog import Catalog, ServedVersion
from syncline.serving.server.engine import TORCH_SUFFIX, load_engine
from syncline.serving.server.limits import Limits
from syncline.serving.server.metrics import ServerMetrics
from syncline.serving.server.refusal import RequestRefused
from syncline.serving.server.registry import LoadedVersion, Registry
from syncline.serving.server.tuning import Tuned, tune

__all__ = ["Replica", "ReplicaSettings", "VersionFiles"]


@dataclass(frozen=True, kw_only=True)
class VersionFiles:
    """A version and the files of its model; `served.path` is the name of the one to load."""

    served: ServedVersion
    files: dict[str, bytes]


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """What all replicas have in common."""

    limits: Limits
    token: str | None
    cores: int
    max_batch: int


class Replica:
    """Ray Serve makes one in each process, and calls it with each request."""

    def __init__(self, versions: Sequence[Any], settings: ReplicaSettings) -> None:
        """`versions` are references of Ray to `VersionFiles`."""
        import ray

        self._settings = settings
        found: list[VersionFiles] = ray.get(list(versions))
        self._loaded = [self._load(one) for one in found]
        self._app: App | None = None

    async def __call__(self, request: Any) -> Any:
        """Answer a request of Starlette with a response of Starlette."""
        from starlette.responses import Response as StarletteResponse

        app = self._app or self._start()
        response = await _answer(app, request)
        headers = {name.decode(): value.decode("latin-1") for name, value in response.headers}
        headers["X-Content-Type-Options"] = "nosniff"
        app.metrics.status(response.status)
        return StarletteResponse(response.body, response.status, headers, response.kind.decode())

    def _load(self, one: VersionFiles) -> tuple[ServedVersion, Tuned]:
        """The files are needed for loading only; nothing is left behind by a replica that is killed."""
        with tempfile.TemporaryDirectory(prefix="syncline-replica-") as folder:
            for name, data in one.files.items():
                (Path(folder) / name).write_bytes(data)
            path = Path(folder) / one.served.path
            cores = 1 if path.suffix == TORCH_SUFFIX else self._settings.cores
            return one.served, tune(lambda threads: load_engine(path, threads), cores, self._settings.max_batch)

    def _start(self) -> App:
        """The models are loaded before there is an event loop, and their queues need one."""
        loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, "syncline-run")
        limits, metrics = self._settings.limits, ServerMetrics(os.getpid())
        registry = Registry(metrics, lambda *_: None)  # without a canary, there is none to end
        versions: dict[tuple[str, str], LoadedVersion] = {}
        for served, tuned in self._loaded:
            batcher = Batcher(tuned, loop, thread)
            batcher.longest_wait_s = limits.wait_s
            versions[served.key] = LoadedVersion(served, tuned, batcher)
        registry.apply(Catalog(versions=tuple(served for served, _ in self._loaded)), versions)
        self._app = App(registry, metrics, Access(self._settings.token), limits, _RayManager())
        return self._app


class _RayManager(Manager):
    """Nothing is loaded or unloaded while replicas run: Ray would replace them by others with the first models."""

    def load(self, model: str, done: Callable[[str | None], None]) -> None:
        done(f"On Ray, {model} stays what it was when the server started. Start the server again.")


async def _answer(app: App, request: Any) -> Response:
    """The answer of `app` to a request of Starlette."""
    scope = request.scope
    target: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    if query := scope.get("query_string"):
        target += b"?" + query
    asked = HttpRequest(scope["method"].encode(), target, {name.lower(): value for name, value in scope["headers"]})
    try:
        app.check_head(asked)
        asked.body = await _body(request, app.limits.body_bytes)
    except RequestRefused as refusal:
        return refused(refusal)
    answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

    def respond(response: Response) -> None:
        if not answer.done():  # the client may be gone
            answer.set_result(response)

    app.handle(asked, respond)
    return await answer


async def _body(request: Any, most_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most_bytes:
            raise RequestRefused(
                f"The request has {size:,} bytes or more; {most_bytes:,} are allowed.",
                status=413, code="too-large", size_bytes=size, most_bytes=most_bytes,
            )  # fmt: skip
        parts.append(part)
    return b"".join(parts)
