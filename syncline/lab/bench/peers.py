"""Training throughput beside other frameworks, each in its own virtual environment.

Here: the installed peers, Syncline itself and plain DDP, all through the same protocol: one script per framework trains
LeNet-5 on random images and prints JSON lines. They take turns, round after round. A peer that is not installed is
skipped, with the command that installs it. Not here: adapters and environments (`peer_recipes.py`,
`benchmarks/peers`).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from syncline.errors import SynclineError
from syncline.lab.bench.harness import BenchSettings, Contender, Suite
from syncline.lab.bench.peer_recipes import (
    PeerFramework,
    adapters_folder,
    all_peers,
    environment_of,
    environments_folder,
)
from syncline.lab.bench.processes import free_port, last_lines, output_of

_BASELINE = "syncline-train"
_LIMIT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class PeerWorkload:
    """The workload of every adapter."""

    workers: int = 2
    batch: int = 64
    """Images per worker and step."""
    warm_up: int = 50
    steps: int = 300


def suites(settings: BenchSettings) -> Generator[Suite, None, None]:
    """One suite, with the installed peers."""
    adapters, environments = adapters_folder(), environments_folder(settings.peers_dir)
    with tempfile.TemporaryDirectory(prefix="syncline-peers-") as scratch:
        work = PeerWorkload(steps=150) if settings.quick else PeerWorkload()
        yield suite_for(all_peers(adapters), environments, work, Path(scratch), settings.say)


def suite_for(
    peers: list[PeerFramework],
    environments: Path,
    work: PeerWorkload,
    scratch: Path,
    say: Callable[[str], None],
    limit_s: float = _LIMIT_S,
) -> Suite:
    """The installed ones of `peers` beside Syncline."""
    contenders, missing, baseline = [], [], None
    for peer in sorted(peers, key=lambda p: p.key != _BASELINE):  # the baseline comes first
        python = peer.interpreter(environments)
        if python is None:
            missing.append(peer.name)
            say(f"{peer.name} is skipped, not installed: syncline bench peers --install {peer.key}")
            continue
        measure = _measured(peer, python, work, scratch, limit_s)
        contenders.append(Contender(name=peer.name, measure=measure, what=peer.what))
        if peer.key == _BASELINE:
            baseline = peer.name
    if baseline is None:
        raise SynclineError(f"The adapter {_BASELINE} is missing, which is the baseline.")
    skipped = f" Not installed: {', '.join(missing)}." if missing else ""
    return Suite(
        name="peers",
        measures=f"Images per second of LeNet-5 (61,706 parameters), over {work.steps} steps after "
        f"{work.warm_up} warm-up steps: {work.workers} workers x batch {work.batch}, one thread each, random images "
        f"in memory, SGD with momentum.{skipped}",
        unit="images/s",
        contenders=tuple(contenders),
        baseline=baseline,
    )


def images_per_s(output: str) -> float:
    """The measurement of an adapter: its last line `{"event": "measured", "images_per_s": ...}`."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if event.get("event") == "measured":
                return float(event["images_per_s"])
    raise SynclineError(f"The adapter printed no measurement. Its last output:\n{last_lines(output)}")


def _measured(
    peer: PeerFramework, python: Path, work: PeerWorkload, scratch: Path, limit_s: float
) -> Callable[[], float]:
    def measure() -> float:
        output = output_of(
            _command(peer, python, work, scratch),
            environment=environment_of(peer, python),
            folder=scratch,  # empty, so that nothing is imported from it by mistake
            timeout_s=limit_s,
        )
        return images_per_s(output)

    return measure


def _command(peer: PeerFramework, python: Path, work: PeerWorkload, scratch: Path) -> list[str]:
    values = {
        "python": python,
        "bin": python.parent,
        "adapter": peer.folder / "adapter.py",
        "workers": work.workers,
        "batch": work.batch,
        "warm_up": work.warm_up,
        "steps": work.steps,
        "port": free_port(),
        "scratch": scratch / "runs",
    }
    return [part.format_map(values) for part in peer.start]
