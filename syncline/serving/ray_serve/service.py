"""`RayService`: serves models as a deployment of Ray Serve, until it is asked to stop.

Here: the connection to Ray, the files of the models, the deployment and its end. Not here: answering requests
(`replica.py`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from syncline.engines.ray import read_name
from syncline.engines.ray_connection import RayConnection, first_line, import_ray
from syncline.errors import ConfigError, SynclineError
from syncline.serving.ray_serve.replica import Replica, ReplicaSettings, VersionFiles
from syncline.serving.server.catalog import Catalog, ServedVersion
from syncline.serving.server.engine import load_engine
from syncline.serving.server.limits import Limits
from syncline.serving.server.sources import ModelSource, snapshot
from syncline.serving.server.versions import replaced

if TYPE_CHECKING:
    from syncline.serving.server.options import ServeOptions

__all__ = ["RayService"]

_POLL_S = 0.25
_HEALTH = "/v2/health/ready"


class RayService:
    """Made from the options of `syncline serve --engine ray`. `run` serves until a signal or `stop`."""

    grpc_port: int | None = None

    def __init__(
        self, options: ServeOptions, sources: Sequence[ModelSource], limits: Limits, say: Callable[[str], None]
    ) -> None:
        _check(options)
        self._request = read_name(options.engine)
        self._options, self._sources, self._limits, self._say = options, sources, limits, say
        self._ray, self._serve = import_ray(), _import_serve()
        self._connection = RayConnection(self._ray, self._request.address)
        self.port: int = options.port or _free_port(options.host)
        self._name = "syncline-" + "-".join(dict.fromkeys(source.model for source in sources))
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Make `run` return; from a signal handler, or another thread."""
        self._stopping.set()

    def when_closed(self, descriptor: int) -> None:
        """Stop when the other end of this pipe is closed: with the program that started us."""

        def look() -> None:
            while os.read(descriptor, 4096):
                pass
            self.stop()

        threading.Thread(target=look, name="syncline-parent", daemon=True).start()

    def run(self, on_ready: Callable[[], None]) -> None:
        """Serve until SIGTERM or SIGINT; `on_ready` is called once the deployment answers."""
        try:
            with _interrupted_by_sigterm():
                versions = self._versions()
                self._connection.open(cpus=math.ceil(self._options.processes * self._request.bundle["CPU"]))
                self._check_room()
                self._deploy(versions)
                self._wait_until_it_answers()
            with self._stopped_by_signals():
                on_ready()
                while not self._stopping.wait(_POLL_S):
                    pass
        finally:
            self._close()

    def _versions(self) -> list[VersionFiles]:
        """A file of every source, numbered as by our own server."""
        catalog, found = Catalog(), list[VersionFiles]()
        with tempfile.TemporaryDirectory(prefix="syncline-serve-") as scratch:
            for k, source in enumerate(self._sources):
                path, step = self._file_of(source, Path(scratch) / str(k))
                load_engine(path, 1)  # here, once, where an error is reported best
                catalog = replaced(catalog, None, _served(source, path.name, step), "")
                files = {file.name: file.read_bytes() for file in path.parent.iterdir() if file.is_file()}
                found.append(VersionFiles(served=catalog.versions[-1], files=files))
        return found

    def _file_of(self, source: ModelSource, folder: Path) -> tuple[Path, int | None]:
        if source.is_file:
            return snapshot(Path(source.what), folder), None
        from syncline.serving.server.reweigh import RunExporter

        folder.mkdir()
        exporter = RunExporter(source.what)
        path = exporter.export(folder)
        if exporter.note:
            self._say(exporter.note)
        return path, exporter.last_step

    def _deploy(self, versions: Sequence[VersionFiles]) -> None:
        """Start the replicas, or replace those of a deployment of the same name, without a pause."""
        options, limits, serve = self._options, self._limits, self._serve
        cores = max(1, int(self._request.bundle["CPU"]))
        settings = ReplicaSettings(limits=limits, token=options.token, cores=cores, max_batch=options.max_batch)
        with _quietly():
            serve.start(
                proxy_location="HeadOnly" if self._connection.is_own_cluster else "EveryNode",
                http_options={"host": options.host, "port": self.port},
                logging_config={"log_level": "ERROR", "enable_access_log": False},
            )
            deployment = serve.deployment(
                Replica, name="Replica", num_replicas=options.processes,
                # What is too much is refused by the replica, which knows how long a request would wait.
                max_ongoing_requests=2 * limits.requests, max_queued_requests=2 * limits.requests,
                ray_actor_options={"num_cpus": self._request.bundle["CPU"], "num_gpus": self._request.gpus},
                graceful_shutdown_timeout_s=limits.stop_s, logging_config={"log_level": "ERROR"},
            )  # fmt: skip
            references = [self._ray.put(one) for one in versions]
            try:
                serve.run(deployment.bind(references, settings), name=self._name, route_prefix="/")
            except (RuntimeError, ValueError, self._ray.exceptions.RayError) as error:
                raise SynclineError(
                    f"Ray Serve cannot serve {self._name}: {first_line(error)}", code="ray-serve", name=self._name
                ) from error

    def _check_room(self) -> None:
        """Ray Serve would wait without an end."""
        total, free, wanted = self._ray.cluster_resources(), self._ray.available_resources(), self._options.processes
        if self._request.lacks(wanted, total):
            raise ConfigError(
                f"The replicas do not fit. {self._request.describe(wanted, total, free)} Use fewer --processes, or "
                "request less for each (cpus=, gpus=).",
                code="no-room", workers=wanted,
            )  # fmt: skip

    def _wait_until_it_answers(self) -> None:
        """`ConfigError` if the proxy is not at our port: a Ray Serve that ran before has its own."""
        url = f"http://{'127.0.0.1' if self._options.host == '0.0.0.0' else self._options.host}:{self.port}{_HEALTH}"
        until = time.monotonic() + 30
        while time.monotonic() < until:
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as response:
                if response.status == 200:
                    return
            time.sleep(_POLL_S)
        raise ConfigError(
            f"Nothing answers at {url}. If Ray Serve ran on this cluster before, its proxies keep their port: use that "
            "one with --port, or end Ray Serve with 'serve shutdown'.",
            code="ray-serve-port", port=self.port,
        )  # fmt: skip

    @contextlib.contextmanager
    def _stopped_by_signals(self) -> Iterator[None]:
        def on_stop(number: int, frame: FrameType | None) -> None:
            del number, frame
            self.stop()

        before: dict[int, Any] = {n: signal.signal(n, on_stop) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _close(self) -> None:
        """End the deployment after its requests in flight, and our own cluster with it."""
        with _quietly(), contextlib.suppress(Exception):  # Ray may be gone already
            if self._ray.is_initialized():
                self._serve.delete(self._name)
                if self._connection.is_own_cluster:
                    self._serve.shutdown()
        self._connection.leave()


def _import_serve() -> Any:
    try:
        from ray import serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Ray Serve is not installed ({error.name} is missing): pip install 'syncline[serve,ray-serve]'",
            code="not-installed", package="ray[serve]",
        ) from None  # fmt: skip
    return serve


def _check(options: ServeOptions) -> None:
    """Refuse what only our own server does."""
    given = {
        "--follow": options.follow, "--canary": options.canary is not None, "--shadow": options.shadow,
        "--tls-cert": options.tls_cert is not None, "--access-log": options.access_log is not None,
        "--grpc-port": options.grpc_port is not None,
    }  # fmt: skip
    wrong = [name for name, is_given in given.items() if is_given]
    if wrong:
        raise ConfigError(
            f"{' and '.join(wrong)} cannot be used with --engine {options.engine}: the replicas of Ray Serve know "
            "nothing of one another. Leave it out, or serve without --engine.",
            code="not-on-ray", options=wrong, engine=options.engine,
        )  # fmt: skip


def _served(source: ModelSource, path: str, step: int | None) -> ServedVersion:
    return ServedVersion(model=source.model, version="", path=path, role=source.role, source=source.what, step=step)


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """While the deployment starts, SIGTERM ends it as Ctrl-C does: whatever was started is ended, too."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Ray Serve reports its progress in the log of this process, which is the user's terminal."""
    logger = logging.getLogger("ray.serve")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
