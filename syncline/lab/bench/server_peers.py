"""Other servers beside ours, each in its own virtual environment: CPU time per request with the same model.

Here: starting an adapter of `benchmarks/servers` and counting the CPU time of all its processes. A server that is not
installed becomes a row that says how to install it. Not here: the suite and its requests (`serve.py`), environments
(`peer_recipes.py`).
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from syncline.errors import SynclineError
from syncline.lab.bench.peer_recipes import (
    PeerFramework,
    adapters_folder,
    all_peers,
    environment_of,
    environments_folder,
)
from syncline.lab.bench.processes import MARK, end_all, free_port, last_lines, marked

__all__ = ["PeerServer", "cpu_s", "found_servers", "started"]

_START_S = 120.0
_INFER = "/v2/models/{model}/infer"


@dataclass(frozen=True, kw_only=True)
class PeerServer:
    """A server that answers."""

    port: int
    path: str
    pids: Callable[[], list[int]]
    """Its processes: those that its adapter started, too."""


def found_servers(environments: Path | None) -> tuple[list[tuple[PeerFramework, Path]], dict[str, str]]:
    """The installed servers with their Python, and why the others are missing, by name."""
    place, found, missing = environments_folder(environments), [], {}
    for peer in all_peers(adapters_folder("servers")):
        python = peer.interpreter(place)
        if python is None:
            missing[peer.name] = f"not installed: syncline bench serve --install {peer.key}"
        else:
            found.append((peer, python))
    return found, missing


@contextlib.contextmanager
def started(peer: PeerFramework, python: Path, model: Path, body: bytes, core: int) -> Iterator[PeerServer]:
    """The server with this model, pinned to one core; it has answered `body` once, and ends with the block."""
    port, mark = free_port(), uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="syncline-server-") as scratch, tempfile.TemporaryFile("w+") as output:
        values = {"python": python, "bin": python.parent, "adapter": peer.folder / "adapter.py", "folder": peer.folder,
                  "model": model, "port": port, "scratch": scratch}  # fmt: skip
        environment = {name: value.format_map(values) for name, value in environment_of(peer, python).items()
                       if name in peer.environment}  # fmt: skip
        process = subprocess.Popen(
            ["taskset", "--cpu-list", str(core), *[part.format_map(values) for part in peer.start]],
            env={**environment_of(peer, python), **environment, MARK: mark}, cwd=scratch,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        path = (peer.path or _INFER).format(model=model.stem)
        try:
            if not _answers(process, f"http://127.0.0.1:{port}{path}", body):
                output.seek(0)
                raise SynclineError(
                    f"{peer.name} did not answer within {_START_S:g} s. Its last output:\n{last_lines(output.read())}",
                    code="server-peer", peer=peer.key,
                )  # fmt: skip
            yield PeerServer(port=port, path=path, pids=lambda: marked(mark))
        finally:
            end_all(process, mark)


def cpu_s(pids: list[int]) -> float:
    """The CPU time of all threads of these processes, in nanosecond steps."""
    stats = [file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(file.read_text().split()[0]) for file in stats) / 1e9


def _answers(process: subprocess.Popen[str], url: str, body: bytes) -> bool:
    until = time.monotonic() + _START_S
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return bool(response.status == 200)
        except OSError:  # it does not listen yet, or the model is not loaded yet
            time.sleep(0.2)
    return False
