"""Engines by name, as given to --engine.

Optional packages such as Ray are imported only when their engine is chosen; if one is missing, the error says what to
install.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from syncline.engines.engine import Engine
from syncline.engines.local import LocalEngine
from syncline.engines.network import LOOPBACK, Network
from syncline.errors import ConfigError, UnknownName


def engine_for(name: str, network: Network | None = None) -> Engine:
    """Create the engine of this name; it starts to prepare. `network`: the hosts of the local engine."""
    scheme = re.split(r"[:\[?]", name, maxsplit=1)[0]
    make = _ENGINES.get(scheme)
    if make is None:
        forms = ", ".join([*_FORMS, *(each for each in _ENGINES if each not in _BUILT_IN)])
        raise UnknownName.among("engine", scheme, _ENGINES, more=f"Use one of: {forms}.")
    if network is not None and make is not _local:
        raise ConfigError(
            f"Network namespaces need the local engine, but the engine is {name!r}.", setting="engine", value=name
        )
    return LocalEngine(network) if network is not None else make(name)


def keep_together(engine: Engine, workers: int) -> None:
    """Let so many workers that follow each other be on the same host, before any is launched.

    Only the local engine, whose hosts are emulated, chooses a worker's host itself; the planner checks the others.
    """
    if type(engine) is LocalEngine:
        engine.network = replace(engine.network, together=workers)


def register_engine(scheme: str, make: Callable[[str], Engine]) -> None:
    """Register an engine: `--engine scheme` and `--engine scheme:...` use what `make` returns for that text."""
    _ENGINES[scheme] = make


def _local(name: str) -> Engine:
    if name != "local":
        raise ConfigError(
            f"The local engine takes no address: use 'local' instead of {name!r}.", setting="engine", value=name
        )
    return LocalEngine(LOOPBACK)


def _attach(name: str) -> Engine:
    from syncline.engines.attach import AttachEngine

    return AttachEngine(name)


def _ray(name: str) -> Engine:
    from syncline.engines.ray import RayEngine

    return RayEngine(name)


def _spark(name: str) -> Engine:
    from syncline.engines.spark import SparkEngine

    return SparkEngine(name)


_ENGINES: dict[str, Callable[[str], Engine]] = {
    "local": _local,
    "attach": _attach,
    "ray": _ray,
    "spark": _spark,
    "spark-local": _spark,
}
_BUILT_IN = frozenset(_ENGINES)
_FORMS = (
    "local", "ray", "ray://HOST:PORT", "spark", "spark://HOST:PORT", "spark-local[N]", "attach://HOST:PORT",
)  # fmt: skip
