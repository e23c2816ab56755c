"""Other frameworks to compare Syncline with: their adapters and virtual environments.

Here: `PeerFramework`, read from `benchmarks/peers/<key>/peer.toml`; finding and creating its virtual environment. An
adapter is a script that trains LeNet-5 with one framework and prints its measurements; `benchmarks/peers/README.md` has
the protocol. Not here: running them (`peers.py`).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from syncline.data.download import cache_dir
from syncline.errors import ConfigError, SynclineError, UnknownName

_KEYS = {"name", "what", "note", "start", "environment", "install", "path"}
_INSTALL_KEYS = {"python", "packages", "by_hand"}
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables of this Python that would mislead another one."""
_VERSION = re.compile(r"[23]\.\d+")


@dataclass(frozen=True, kw_only=True)
class PeerFramework:
    """One framework, and how it is installed and started."""

    key: str
    """The name of its folder, and of its environment."""
    folder: Path
    name: str
    what: str
    start: tuple[str, ...]
    """The command, with {python}, {bin}, {adapter}, {workers}, {batch}, {warm_up}, {steps}, {port} and {scratch};
    that of a server with {python}, {bin}, {adapter}, {folder}, {model}, {port} and {scratch}."""
    path: str = ""
    """Where a server takes requests, with {model}; empty for the address of the Open Inference Protocol."""
    note: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str | None = None
    """The version of Python that it needs; None for those that run where Syncline runs."""
    packages: tuple[str, ...] = ()
    by_hand: str = ""
    """Commands that pip cannot run; such an environment is not created automatically."""

    @property
    def has_own_environment(self) -> bool:
        """Whether it runs in another Python than this one."""
        return self.python is not None

    def interpreter(self, environments: Path) -> Path | None:
        """The Python that runs it; None if it is not installed."""
        if not self.has_own_environment:
            return Path(sys.executable)
        found = environments / self.key / "bin" / "python"
        return found if found.exists() else None


def adapters_folder(kind: Literal["peers", "servers"] = "peers") -> Path:
    """`benchmarks/peers`, or that of servers, of the checkout that this Syncline runs from."""
    folder = Path(__file__).parents[3] / "benchmarks" / kind
    if not folder.is_dir():
        raise SynclineError(
            f"The peer adapters are not part of an installed Syncline: {folder} does not exist. Run "
            "'syncline bench' from a checkout of the repository: make setup, then .venv/bin/syncline bench peers."
        )
    return folder


def environments_folder(given: Path | None) -> Path:
    """The folder with virtual environments: `given`, else `$SYNCLINE_PEERS`, else `syncline/peers` in the cache."""
    if given is not None:
        return given
    named = os.environ.get("SYNCLINE_PEERS", "")
    return Path(named).expanduser() if named else cache_dir().parent / "peers"


def all_peers(adapters: Path) -> list[PeerFramework]:
    """All peers: those without an environment first, then by name."""
    found = [_read(path) for path in adapters.glob("*/peer.toml")]
    return sorted(found, key=lambda p: (p.has_own_environment, p.name.lower()))


def peers_named(keys: list[str], adapters: Path) -> list[PeerFramework]:
    """The installable peers with these keys."""
    known = {p.key: p for p in all_peers(adapters) if p.has_own_environment}
    for key in keys:
        if key not in known:
            raise UnknownName.among("peer to install", key, known)
    return [known[key] for key in keys]


def install_commands(peer: PeerFramework, environments: Path, python: str | None = None) -> list[list[str]]:
    """The commands that create its environment: `python -m venv`, then pip."""
    place = environments / peer.key
    return [
        [python or f"python{peer.python}", "-m", "venv", str(place)],
        [str(place / "bin" / "python"), "-m", "pip", "install", "--prefer-binary", *peer.packages],
    ]


def install(
    peer: PeerFramework,
    environments: Path,
    say: Callable[[str], None],
    run: Callable[[list[str]], int] = subprocess.call,
) -> None:
    """Create its environment; remove it again if that fails."""
    place = environments / peer.key
    if peer.by_hand:
        commands = "\n".join(shlex.join(c) for c in install_commands(peer, environments))
        raise SynclineError(
            f"{peer.name} has to be built by hand. {peer.note}\n{commands}\n"
            f"Then, with its own pip:\n{peer.by_hand.strip()}"
        )
    if place.exists():
        raise ConfigError(f"{place} already exists. Remove it to install {peer.name} again.")
    environments.mkdir(parents=True, exist_ok=True)
    try:
        for command in install_commands(peer, environments, _python(peer)):
            say(shlex.join(command))
            code = run(command)
            if code != 0:
                raise SynclineError(f"Cannot install {peer.name}: the last command exited with code {code}.")
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise


def environment_of(peer: PeerFramework, python: Path) -> dict[str, str]:
    """The same for all: one thread, loopback, the shared protocol, and the peer's own programs first in PATH."""
    shared = [str(peer.folder.parent / "protocol")]
    inherited = dict(os.environ)
    if peer.has_own_environment:
        inherited = {name: value for name, value in inherited.items() if name not in _OURS}
    else:
        shared += [str(Path(__file__).parents[3]), *filter(None, [inherited.get("PYTHONPATH")])]
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


def _python(peer: PeerFramework) -> str:
    if peer.python == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    found = shutil.which(f"python{peer.python}")
    if found is None:
        pyenv = sorted(Path.home().glob(f".pyenv/versions/{peer.python}.*/bin/python"))
        found = str(pyenv[-1]) if pyenv else None
    if found is None:
        raise SynclineError(
            f"{peer.name} needs Python {peer.python}, but python{peer.python} is not installed. Install it, for "
            f"example with: pyenv install {peer.python}"
        )
    return found


def _read(path: Path) -> PeerFramework:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error
    install = data.get("install", {})
    _check(path, data, _KEYS, required=("name", "what", "start"))
    _check(path, install, _INSTALL_KEYS, required=("python", "packages") if install else ())
    if install and not _VERSION.fullmatch(install["python"]):
        raise ConfigError(f"{path}: install.python is {install['python']!r}, but must be like '3.11'.")
    return PeerFramework(
        key=path.parent.name,
        folder=path.parent,
        name=data["name"],
        what=data["what"],
        start=tuple(data["start"]),
        note=" ".join(data.get("note", "").split()),
        environment=data.get("environment", {}),
        python=install.get("python"),
        packages=tuple(install.get("packages", ())),
        by_hand=install.get("by_hand", ""),
        path=data.get("path", ""),
    )


def _check(path: Path, data: Mapping[str, Any], known: set[str], required: tuple[str, ...]) -> None:
    for key in data:
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key!r}. Known keys: {', '.join(sorted(known))}.")
    for key in required:
        if key not in data:
            raise ConfigError(f"{path} has no {key!r}.")
