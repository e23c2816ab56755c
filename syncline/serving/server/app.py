"""`App`: HTTP requests in, responses out, without a socket.

Here: who may ask, status codes, and the messages of the Open Inference Protocol around inference. A response
comes through a callback, at once or when the model has run. Not here: bytes of HTTP (`http.py`), which
addresses there are (`routes.py`), tensors (`messages.py`), models (`registry.py`), prepared inputs such as images
(`friendly.py`), labels that come back (`feedback.py`), the page (`try_page.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from syncline import __version__
from syncline.serving.server import feedback, friendly
from syncline.serving.server.access import Access
from syncline.serving.server.batching import Outputs
from syncline.serving.server.limits import Limits
from syncline.serving.server.messages import InferRequest, encode_response, parse_request
from syncline.serving.server.metrics import ServerMetrics
from syncline.serving.server.openapi import openapi
from syncline.serving.server.refusal import RequestRefused
from syncline.serving.server.registry import LoadedVersion, Registry
from syncline.serving.server.routes import Route, route_of
from syncline.serving.server.try_page import try_page

__all__ = ["App", "HttpRequest", "Manager", "Response"]

EXTENSIONS = ("binary_tensor_data", "model_repository")
JSON = b"application/json"
"""The content type of most responses."""
_MOST_KNOWN_PATHS = 1024
_encode = msgspec.json.encode


@dataclass(slots=True)
class HttpRequest:
    """A whole HTTP request, with the headers that mean something here in lower case."""

    method: bytes
    target: bytes
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""


class Response(NamedTuple):
    """A whole HTTP response."""

    status: int = 200
    body: bytes = b""
    kind: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()
    model: str = ""
    version: str = ""
    """The model and the version that answered, for the access log."""


Respond = Callable[[Response], None]


class Manager:
    """What the supervisor does on behalf of a request. This one is for a process without a supervisor."""

    def load(self, model: str, done: Callable[[str | None], None]) -> None:
        """Load the model again; `done` gets the reason if that failed."""
        del model
        done("This server has no supervisor, which loads models.")

    def unload(self, model: str, done: Callable[[str | None], None]) -> None:
        self.load(model, done)

    def metrics(self, own: list[str], done: Callable[[str], None]) -> None:
        """The metrics of all processes as text."""
        from syncline.serving.server.metrics import merged

        done(merged([own]))


class App:
    """Answers requests of one process."""

    def __init__(
        self, registry: Registry, metrics: ServerMetrics, access: Access, limits: Limits, manager: Manager | None = None
    ) -> None:
        self.registry, self.metrics, self.access, self.limits = registry, metrics, access, limits
        self.manager = manager or Manager()
        self.in_flight = 0
        self.connections = 0
        self.is_stopping = False
        self._routes: dict[bytes, Route] = {}
        self._actions: dict[tuple[bytes, str], Callable[[HttpRequest, Route, Respond], None]] = {
            (b"POST", "infer"): self._infer,
            (b"POST", "predict"): self._predict,
            (b"POST", "feedback"): self._feedback,
            (b"GET", "live"): lambda _, __, respond: respond(_json({"live": True})),
            (b"GET", "ready"): self._ready,
            (b"GET", "server"): lambda _, __, respond: respond(_json(_SERVER)),
            (b"GET", "model"): self._model,
            (b"GET", "model-ready"): self._model_ready,
            (b"POST", "index"): self._index,
            (b"POST", "load"): self._load,
            (b"POST", "unload"): self._load,
            (b"GET", "metrics"): self._metrics,
            (b"GET", "openapi"): lambda _, __, respond: respond(_json(openapi(self.registry))),
            (b"GET", "page"): self._page,
        }

    @property
    def is_ready(self) -> bool:
        return self.registry.is_ready and not self.is_stopping

    def check_head(self, request: HttpRequest) -> None:
        """Refuse a request by its head, before its body is read."""
        route = self._route(request.target)
        if route.action not in ("live", "ready"):
            self.access.check(request.headers, request.target if route.action == "page" else b"")
        if (request.method, route.action) not in self._actions:
            allowed = next((m for m, action in self._actions if action == route.action), b"GET")
            raise RequestRefused(
                f"{_text(request.method)} is not a method of this address; {_text(allowed)} is.",
                status=405, code="wrong-method", allowed=_text(allowed),
            )  # fmt: skip
        if request.headers.get(b"content-encoding", b"identity") != b"identity":
            raise RequestRefused("Compressed requests are not supported.", status=415, code="compressed")

    def handle(self, request: HttpRequest, respond: Respond) -> None:
        """Answer a request that passed `check_head`; never raises."""
        try:
            route = self._route(request.target)
            self._actions[request.method, route.action](request, route, respond)
        except RequestRefused as refusal:
            respond(refused(refusal))

    def infer(self, version: LoadedVersion, tensors: dict[str, np.ndarray], done: Callable[[Any], None]) -> None:
        """Run the model of an admitted request; `done` gets the outputs or an exception. Common to all protocols."""
        self.in_flight += 1
        start = time.perf_counter()

        def finish(result: Outputs | BaseException) -> None:
            self.in_flight -= 1
            if version.is_compared and self.registry.is_watched(version) and not isinstance(result, BaseException):
                result = _checked(result)
            # A refusal says nothing about the version, and what fails in its engine does.
            is_error = isinstance(result, BaseException) and not _is_clients(result)
            self.registry.answered(version, time.perf_counter() - start, is_error=is_error)
            done(result)
            shadow = self.registry.shadow_of(version) if version.is_compared else None
            if shadow is not None:
                shadow.batcher.submit(tensors, lambda other: self.registry.compare(shadow, result, other))

        version.batcher.submit(tensors, finish)

    def admit(self, version: LoadedVersion) -> None:
        """Refuse a request that would wait too long: a quick no is worth more than a late answer."""
        if self.in_flight < self.limits.requests and version.batcher.admits(self.limits.wait_s):
            return
        self.metrics.count("syncline_refused_total", model=version.served.model)
        raise RequestRefused(
            f"The server is busy: {self.in_flight} requests are in flight.",
            status=503, code="busy", in_flight=self.in_flight,
        )  # fmt: skip

    def _infer(self, request: HttpRequest, route: Route, respond: Respond) -> None:
        version = self.registry.pick(route.model, route.version)
        self.admit(version)  # before its tensors are read: refusing must be cheap
        if request.headers.get(b"content-type", b"").startswith(b"image/"):
            raise RequestRefused(
                f"Send images to /v2/models/{route.model}/predict.", status=415, code="wrong-content-type"
            )
        asked = parse_request(request.body, _json_size(request.headers), version.signature, version.plans)

        def done(result: Outputs | BaseException) -> None:
            respond(_answer(asked, version, result))

        self.infer(version, asked.tensors, done)

    def _predict(self, request: HttpRequest, route: Route, respond: Respond) -> None:
        version = self.registry.pick(route.model, route.version)
        self.admit(version)
        kind = request.headers.get(b"content-type", b"")
        tensors = friendly.tensors_of(request.body, kind.decode("latin-1"), version)

        def done(result: Outputs | BaseException) -> None:
            served = version.served
            if isinstance(result, BaseException):
                respond(failed(result, version))
            else:
                respond(_json(friendly.described(version, result))._replace(model=served.model, version=served.version))

        self.infer(version, tensors, done)

    def _feedback(self, request: HttpRequest, route: Route, respond: Respond) -> None:
        version = self.registry.find(route.model, route.version)
        outcomes = feedback.outcomes_in(request.body)
        self.registry.labeled(version, outcomes)
        respond(_json({"counted": len(outcomes), "right": sum(outcomes)}))

    def _ready(self, request: HttpRequest, route: Route, respond: Respond) -> None:
        del request, route
        respond(_json({"ready": self.is_ready}, 200 if self.is_ready else 503))

    def _model(self, request: HttpRequest, route: Route, respond: Respond) -> None:
        del request
        version = self.registry.find(route.model, route.version)
        respond(_json(version.as_json(self.registry.versions_of(route.model))))

    def _model_ready(self, request: HttpRequest, route: Route, respond: Respond) -> None:
        del request
        self.registry.find(route.model, route.version)
        respond(_json({"name": route.model, "ready": self.is_ready}, 200 if self.is_ready else 503))

    def _index(self, request: HttpRequest, route: Route, respond: Respond) -> None:
        del route
        try:
            asked = msgspec.json.decode(request.body or b"{}", type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise RequestRefused(f"The request is not valid: {error}.", code="malformed") from error
        respond(_json(index_of(self.registry, only_ready=bool(asked.get("ready")))))

    def _load(self, request: HttpRequest, route: Route, respond: Respond) -> None:
        del request
        catalog = self.registry.catalog
        known = {v.model for v in catalog.versions} | {v.model for v in catalog.withdrawn}
        if route.model not in known:
            raise RequestRefused(
                f"There is no model {route.model!r}. Models are named when the server starts.",
                status=404, code="unknown-model", model=route.model, known=sorted(known),
            )  # fmt: skip

        def done(reason: str | None) -> None:
            respond(_json({}) if reason is None else _json({"error": reason}, 400))

        (self.manager.load if route.action == "load" else self.manager.unload)(route.model, done)

    def _metrics(self, request: HttpRequest, route: Route, respond: Respond) -> None:
        del request, route
        kind = b"text/plain; version=0.0.4; charset=utf-8"
        self.manager.metrics(self.metric_lines(), lambda text: respond(Response(200, text.encode(), kind)))

    def metric_lines(self) -> list[str]:
        gauges: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {
            ("syncline_connections", ()): self.connections,
            ("syncline_requests_in_flight", ()): self.in_flight,
        }
        for served in self.registry.catalog.versions:
            labels = (("model", served.model), ("version", served.version), ("role", served.role))
            gauges["syncline_model_info", labels] = 1
        return self.metrics.lines(gauges)

    def _page(self, request: HttpRequest, route: Route, respond: Respond) -> None:
        del request, route
        headers = ((b"Referrer-Policy", b"no-referrer"), (b"X-Frame-Options", b"DENY"))
        respond(Response(200, try_page(self.registry).encode(), b"text/html; charset=utf-8", headers))

    def _route(self, target: bytes) -> Route:
        found = self._routes.get(target)
        if found is None:
            found = route_of(target)
            if len(self._routes) < _MOST_KNOWN_PATHS:
                self._routes[target] = found
        return found


def index_of(registry: Registry, *, only_ready: bool) -> list[dict[str, str]]:
    """The protocol's index of the repository."""
    catalog = registry.catalog
    found = [{"name": v.model, "version": v.version, "state": "READY", "reason": ""} for v in catalog.versions]
    if not only_ready:
        found += [
            {"name": v.model, "version": v.version, "state": "UNAVAILABLE", "reason": v.reason}
            for v in catalog.withdrawn
        ]
    return found


def refused(refusal: RequestRefused) -> Response:
    headers: list[tuple[bytes, bytes]] = []
    if refusal.status == 503:
        headers.append((b"Retry-After", b"1"))
    if refusal.status == 401:
        headers.append((b"WWW-Authenticate", b"Bearer"))
    if refusal.status == 405:
        headers.append((b"Allow", refusal.facts["allowed"].encode()))
    return Response(refusal.status, _encode({"error": str(refusal)}), JSON, tuple(headers))


def failed(error: BaseException, version: LoadedVersion) -> Response:
    """The response if a model raised."""
    response = refused(error) if isinstance(error, RequestRefused) else refused(engine_error(error))
    return response._replace(model=version.served.model, version=version.served.version)


def _answer(asked: InferRequest, version: LoadedVersion, result: Outputs | BaseException) -> Response:
    served = version.served
    if isinstance(result, BaseException):
        return failed(result, version)
    try:
        body, json_size = encode_response(asked, served.model, served.version, result)
    except RequestRefused as refusal:
        return failed(refusal, version)
    if json_size is None:
        return Response(200, body, JSON, (), served.model, served.version)
    header = ((b"Inference-Header-Content-Length", b"%d" % json_size),)
    return Response(200, body, b"application/octet-stream", header, served.model, served.version)


def engine_error(error: BaseException) -> RequestRefused:
    """The refusal for what a model raised."""
    if _is_clients(error):
        return RequestRefused(f"The model refused the input: {_first_line(error)}", code="input-refused")
    return RequestRefused(f"The model failed: {_first_line(error)}", status=500, code="model-failed")


def _is_clients(error: BaseException) -> bool:
    """Whether the request is to blame: ONNX Runtime refuses what its operators cannot take as an invalid argument."""
    if isinstance(error, RequestRefused):
        return error.status != 500
    return type(error).__name__ == "InvalidArgument"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:500]


def _checked(outputs: Outputs) -> Outputs | RequestRefused:
    """While versions are compared, an answer that is not finite counts as an error."""
    for name, array in outputs.items():
        if array.dtype.kind == "f" and not bool(np.isfinite(array).all()):
            return RequestRefused(f"Output {name!r} is not finite.", status=500, code="non-finite-output", output=name)
    return outputs


def _json_size(headers: dict[bytes, bytes]) -> int | None:
    given = headers.get(b"inference-header-content-length")
    if given is None:
        return None
    if not given.isdigit() or len(given) > 12:
        raise RequestRefused("Inference-Header-Content-Length is not a number.", code="wrong-header")
    return int(given)


def _json(value: Any, status: int = 200) -> Response:
    return Response(status, _encode(value))


def _text(value: bytes) -> str:
    return value.decode("latin-1")


_SERVER = {"name": "syncline", "version": __version__, "extensions": list(EXTENSIONS)}
