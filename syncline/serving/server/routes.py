"""`route_of`: what the addresses of the server mean. Pure. Not here: answering (`app.py`)."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from syncline.serving.server.refusal import RequestRefused

__all__ = ["Route", "route_of"]


class Route(NamedTuple):
    """What a path means."""

    action: str
    model: str = ""
    version: str | None = None


def route_of(target: bytes) -> Route:
    """What this address means; 404 if nothing.

    >>> route_of(b"/v2/models/digits/versions/2/infer")
    Route(action='infer', model='digits', version='2')
    """
    try:
        path = urlsplit(target.decode("ascii")).path
        parts = [unquote(part, errors="strict") for part in path.strip("/").split("/")]
    except ValueError as error:
        raise RequestRefused("This is not an address.", code="malformed") from error
    match parts:
        case [""]:
            return Route("page")
        case ["metrics"]:
            return Route("metrics")
        case ["v2"]:
            return Route("server")
        case ["v2", "openapi.json"]:
            return Route("openapi")
        case ["v2", "health", ("live" | "ready") as action]:
            return Route(action)
        case ["v2", "models", model]:
            return Route("model", model)
        case ["v2", "models", model, "versions", version]:
            return Route("model", model, version)
        case ["v2", "models", model, ("infer" | "predict") as action]:
            return Route(action, model)
        case ["v2", "models", model, "versions", version, ("infer" | "predict") as action]:
            return Route(action, model, version)
        case ["v2", "models", model, "versions", version, "feedback"]:
            return Route("feedback", model, version)
        case ["v2", "models", model, "ready"]:
            return Route("model-ready", model)
        case ["v2", "models", model, "versions", version, "ready"]:
            return Route("model-ready", model, version)
        case ["v2", "repository", "index"]:
            return Route("index")
        case ["v2", "repository", "models", model, ("load" | "unload") as action]:
            return Route(action, model)
    raise RequestRefused(f"There is nothing at {path[:200]}.", status=404, code="unknown-address")
