"""`syncline survey add`: checks the adapter of another framework by running it, and keeps it.

What an adapter must do is in `benchmarks/peers/README.md`; `check_event` is the same as code. Here: the checks. Not
here: what measurements then make of it (`probes/`).
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from syncline.errors import ConfigError, SynclineError
from syncline.lab.bench.peer_recipes import PeerFramework, adapters_folder, all_peers
from syncline.lab.survey.catalog import CATALOG
from syncline.lab.survey.frameworks import added_folder
from syncline.lab.survey.probes.parts import count_parts
from syncline.lab.survey.probes.probe import Bench, Work, run_adapter

PARAMETERS = 61706
"""Of LeNet-5."""
_SHORT, _LONG = Work(workers=2, batch=8, warm_up=2, steps=20), Work(workers=2, batch=8, warm_up=2, steps=60)


def add(folder: Path, environments: Path, say: Callable[[str], None], limit_s: float = 300.0) -> Path:
    """Check the adapter in `folder` by two short trainings, and copy it beside the environments; returns the copy."""
    peer = _read(folder)
    place = added_folder(environments) / peer.key
    if (adapters_folder() / peer.key).exists():
        raise ConfigError(f"Syncline has an adapter {peer.key} itself. Rename the folder {folder}.", code="name-taken")
    python = peer.interpreter(environments)
    if python is None:
        raise ConfigError(
            f"{peer.name} is not installed. Create its environment, with the packages of [install] in peer.toml, in "
            f"{environments / peer.key}, and run this command again.",
            code="not-installed",
        )
    with tempfile.TemporaryDirectory(prefix="syncline-adapter-") as scratch:
        bench = Bench(
            entry=CATALOG[0], peer=peer, python=python, environments=environments, is_quick=True, scratch=Path(scratch),
            limit_s=limit_s,
        )  # fmt: skip
        for work in (_SHORT, _LONG):
            say(f"{peer.name}: training {work.steps} steps, {work.workers} workers, batch {work.batch}.")
            check_event(run_adapter(bench, work), work)
        if (peer.folder / "parts.py").is_file():
            say(f"{peer.name}: counting its parts.")
            count_parts(bench)
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(peer.folder, place, ignore=shutil.ignore_patterns("__pycache__"))
    return place


def check_event(event: Mapping[str, Any], work: Work) -> None:
    """Whether the event `measured` fits what was asked for; `ConfigError` says what does not."""
    for field in ("steps", "seconds", "images_per_s"):
        value = event.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise _refused(f"{field!r} is {value!r}, but must be a positive number")
    if not isinstance(event.get("version"), str) or not event["version"]:
        raise _refused(f"'version' is {event.get('version')!r}, but must be the framework's version as a text")
    if event["steps"] != work.steps:
        raise _refused(f"it timed {event['steps']} steps, but --steps was {work.steps}")
    if event.get("parameters") != PARAMETERS:
        raise _refused(
            f"'parameters' is {event.get('parameters')!r}, but LeNet-5 has {PARAMETERS}: count those of the model that "
            "was trained"
        )
    images, rate = work.workers * work.batch * work.steps, float(event["images_per_s"])
    if not math.isclose(rate, images / float(event["seconds"]), rel_tol=0.01):
        raise _refused(
            f"it says {rate:g} images/s, but {images} images ({work.workers} workers x batch {work.batch} x "
            f"{work.steps} steps) in {event['seconds']:g} s are {images / float(event['seconds']):g}; a framework that "
            "runs one process trains the batches of all workers in it"
        )


def _refused(problem: str) -> SynclineError:
    return ConfigError(f"The adapter does not follow the protocol: in its event 'measured', {problem}.", code="adapter")


def _read(folder: Path) -> PeerFramework:
    try:
        folder = folder.resolve()
        is_one = (folder / "peer.toml").is_file() and (folder / "adapter.py").is_file()
    except OSError as error:
        raise ConfigError(f"Cannot read {folder}: {error.strerror}. Give the folder of an adapter.") from error
    if not is_one:
        raise ConfigError(f"{folder} needs two files: peer.toml and adapter.py. docs/survey.md shows both.")
    return next(peer for peer in all_peers(folder.parent) if peer.key == folder.name)
