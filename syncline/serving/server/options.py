"""`ServeOptions`: what a user may say about a server, and the server that follows from it.

Not here: the command (`cli/serve.py`), the server in Python (`serving/serve.py`).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from syncline.config.owned_files import read_owned
from syncline.errors import ConfigError
from syncline.models.zoo import pretrained
from syncline.serving.metadata import require
from syncline.serving.server.access import LOOPBACK
from syncline.serving.server.limits import Limits
from syncline.serving.server.sources import ModelSource, sources_of
from syncline.telemetry.run_dir import RunDir

if TYPE_CHECKING:
    from syncline.serving.server.supervisor import Supervisor

__all__ = ["LOCAL", "ServeOptions", "Server", "make_server", "token_of"]

_FEWEST_TOKEN_CHARACTERS = 16
LOCAL = "local"


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Each is an option of `syncline serve`."""

    what: tuple[str, ...]
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    """None for an open server, which is allowed on loopback only."""
    processes: int = 1
    canary: float | None = None
    shadow: bool = False
    follow: bool = False
    max_batch: int = 8
    max_requests: int = Limits.requests
    max_wait_s: float = Limits.wait_s
    max_body_bytes: int = Limits.body_bytes
    timeout_s: float = Limits.receive_s
    tls_cert: str | None = None
    tls_key: str | None = None
    access_log: str | None = None
    grpc_port: int | None = None
    """None for HTTP only; 0 for a free one."""
    engine: str = LOCAL
    """`local`, or the name of a Ray engine as for training: `ray`, `ray://HOST:PORT`."""


class Server(Protocol):
    """What serves: our own supervisor, or a deployment of Ray Serve."""

    port: int
    grpc_port: int | None

    def run(self, on_ready: Callable[[], None]) -> None:
        """Serve until SIGTERM or SIGINT; `on_ready` is called once all processes answer."""

    def when_closed(self, descriptor: int) -> None:
        """Stop when the other end of this pipe is closed: with the program that started us."""


def make_server(options: ServeOptions, say: Callable[[str], None]) -> Server:
    """Check the options, and return what `run` serves with."""
    for package in ("onnxruntime", "uvloop", "httptools"):
        require(package, "Serving a model")
    sources = sources_of(options.what, name=options.name, canary=options.canary, shadow=options.shadow)
    _check(options, sources)
    limits = Limits(
        requests=options.max_requests, wait_s=options.max_wait_s, body_bytes=options.max_body_bytes,
        receive_s=options.timeout_s,
    )  # fmt: skip
    if options.engine == LOCAL:
        return _make_supervisor(options, sources, limits, say)
    from syncline.serving.ray_serve.service import RayService

    return RayService(options, sources, limits, say)


def _make_supervisor(
    options: ServeOptions, sources: list[ModelSource], limits: Limits, say: Callable[[str], None]
) -> Supervisor:
    """Take the port, and return what starts processes."""
    for package in () if options.grpc_port is None else ("grpc", "open_inference"):
        require(package, "Serving a model")
    from syncline.serving.server.process import ProcessSettings
    from syncline.serving.server.supervisor import Supervisor, SupervisorSettings

    process = ProcessSettings(
        limits=limits,
        token=options.token,
        cores=max(1, len(os.sched_getaffinity(0)) // options.processes),
        max_batch=options.max_batch,
        tls=_tls_files(options),
        log_descriptor=_log_descriptor(options.access_log),
    )
    return Supervisor(
        SupervisorSettings(
            sources=sources, process=process, host=options.host, port=options.port, processes=options.processes,
            follow=options.follow, say=say, grpc_port=options.grpc_port,
        )
    )  # fmt: skip


def token_of(path: Path | None) -> str:
    """The token in a file that only this user can change, or a new one."""
    if path is None:
        return secrets.token_urlsafe(24)
    try:
        token = read_owned(path).decode("ascii").strip()
    except OSError as error:
        raise ConfigError(
            f"Cannot read the token in {path}: {error.strerror}.", code="no-token", path=str(path)
        ) from error
    except UnicodeDecodeError:
        token = ""
    if len(token) < _FEWEST_TOKEN_CHARACTERS or not token.isprintable() or " " in token:
        raise ConfigError(
            f"The token in {path} must be one word of at least {_FEWEST_TOKEN_CHARACTERS} ASCII characters.",
            code="bad-token", path=str(path),
        )  # fmt: skip
    return token


def _check(options: ServeOptions, sources: list[ModelSource]) -> None:
    for setting in ("processes", "max_batch"):
        if (value := getattr(options, setting)) < 1:
            raise ConfigError.for_setting(setting, value, "1 or more")
    if options.token is None and options.host not in LOOPBACK:
        raise ConfigError(
            f"A server without a token answers to this machine only, but the host is {options.host}. Leave out "
            "--no-token, or use --host 127.0.0.1.",
            code="open-to-others", host=options.host,
        )  # fmt: skip
    files = [source.what for source in sources if source.is_file]
    if options.follow and len(files) == len(sources):
        raise ConfigError(
            f"Only a run can be followed, and {files[0]} is a file. Name the run's directory.",
            code="nothing-to-follow", sources=files,
        )  # fmt: skip
    for source in sources:
        if not source.is_file:
            _check_run(source.what)


def _check_run(what: str) -> None:
    """Refuse what is no run before torch is imported to export it."""
    if Path(what).suffix == ".onnx":
        raise ConfigError(f"There is no file {what}.", code="no-model-file", path=what)
    if Path(what).is_dir():
        RunDir.owned(Path(what))
    else:
        pretrained.find(what)


def _tls_files(options: ServeOptions) -> tuple[str, str] | None:
    if (options.tls_cert is None) != (options.tls_key is None):
        raise ConfigError("TLS needs both files: --tls-cert and --tls-key.", code="half-tls")
    if options.tls_cert is None or options.tls_key is None:
        return None
    import ssl

    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(options.tls_cert, options.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"The TLS files {options.tls_cert} and {options.tls_key} cannot be used: {error}.",
            code="bad-tls", certificate=options.tls_cert, key=options.tls_key,
        ) from error  # fmt: skip
    return options.tls_cert, options.tls_key


def _log_descriptor(path: str | None) -> int | None:
    if path is None:
        return None
    if path == "-":
        return os.dup(1)
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(
            f"Cannot write the access log {path}: {error.strerror}.", code="access-log", path=path
        ) from error
