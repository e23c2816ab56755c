"""Training speed beside other frameworks, each in an environment of its own.

Here: those peers that are installed, and Syncline itself and plain DDP through the same protocol: a script, one for
each framework, that trains LeNet-5 on random images and prints JSON lines. All take turns, round after round. Who is
not installed is left out, with a line that says how to get it. Not here: adapters and environments (`peer_recipes.py`
and `benchmarks/peers`).
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from syncline.bench.harness import Contender, Settings, Suite
from syncline.bench.peer_recipes import Peer, adapters_folder, all_peers, environments_folder
from syncline.bench.processes import last_lines, output_of
from syncline.errors import SynclineError

__all__ = ["Work", "images_per_s", "suite_for", "suites"]

_BASELINE = "syncline-train"
_LIMIT_S = 300.0
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables that are about this Python and would lead another one astray."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every adapter is asked to do."""

    workers: int = 2
    batch: int = 64
    """Images per worker and step."""
    warm_up: int = 50
    steps: int = 300


def suites(settings: Settings) -> Generator[Suite, None, None]:
    """One suite, of those that are installed."""
    adapters, environments = adapters_folder(), environments_folder(settings.peers_dir)
    with tempfile.TemporaryDirectory(prefix="syncline-peers-") as scratch:
        work = Work(steps=150) if settings.quick else Work()
        yield suite_for(all_peers(adapters), environments, work, Path(scratch), settings.say)


def suite_for(
    peers: list[Peer],
    environments: Path,
    work: Work,
    scratch: Path,
    say: Callable[[str], None],
    limit_s: float = _LIMIT_S,
) -> Suite:
    """Those of `peers` that are installed, compared with Syncline."""
    contenders, missing, baseline = [], [], None
    for peer in sorted(peers, key=lambda p: p.key != _BASELINE):  # who all are compared with comes first
        python = peer.interpreter(environments)
        if python is None:
            missing.append(peer.name)
            say(f"{peer.name} is left out, for it is not installed: syncline bench peers --install {peer.key}")
            continue
        measure = _measured(peer, python, work, scratch, limit_s)
        contenders.append(Contender(name=peer.name, measure=measure, what=peer.what))
        if peer.key == _BASELINE:
            baseline = peer.name
    if baseline is None:
        raise SynclineError(f"Among the adapters there is none called {_BASELINE}, with which the others are compared.")
    left_out = f" Not installed here: {', '.join(missing)}." if missing else ""
    return Suite(
        name="peers",
        measures=f"Images a second of LeNet-5 (61,706 parameters), over {work.steps} steps after {work.warm_up} to "
        f"warm up: {work.workers} workers x batch {work.batch}, one thread each, random images in memory, SGD with "
        f"momentum.{left_out}",
        unit="images/s",
        contenders=tuple(contenders),
        baseline=baseline,
    )


def images_per_s(output: str) -> float:
    """What an adapter says that it measured: the last `{"event": "measured", "images_per_s": ...}` among its lines."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if event.get("event") == "measured":
                return float(event["images_per_s"])
    raise SynclineError(f"The adapter printed no line with what it measured. Its last words:\n{last_lines(output)}")


def _measured(peer: Peer, python: Path, work: Work, scratch: Path, limit_s: float) -> Callable[[], float]:
    def measure() -> float:
        output = output_of(
            _command(peer, python, work, scratch),
            environment=_environment(peer, python),
            folder=scratch,  # empty, so that nothing in it is imported by mistake
            timeout_s=limit_s,
        )
        return images_per_s(output)

    return measure


def _command(peer: Peer, python: Path, work: Work, scratch: Path) -> list[str]:
    values = {
        "python": python,
        "bin": python.parent,
        "adapter": peer.folder / "adapter.py",
        "workers": work.workers,
        "batch": work.batch,
        "warm_up": work.warm_up,
        "steps": work.steps,
        "port": _free_port(),
        "scratch": scratch / "runs",
    }
    return [part.format_map(values) for part in peer.start]


def _environment(peer: Peer, python: Path) -> dict[str, str]:
    """The same for all: one thread, loopback, what adapters share, and the peer's own programs first."""
    shared = [str(peer.folder.parent / "protocol")]
    inherited = dict(os.environ)
    if peer.has_own_environment:
        inherited = {name: value for name, value in inherited.items() if name not in _OURS}
    else:
        shared += [str(Path(__file__).parents[2]), *filter(None, [inherited.get("PYTHONPATH")])]
    return {
        **inherited,
        "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(shared),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **peer.environment,
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
