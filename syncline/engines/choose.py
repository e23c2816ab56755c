"""From what the user writes after --engine to an engine.

Here: the names. An engine that needs a package which is not installed says what to install; no such package is loaded
before its engine is chosen.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from syncline.engines.engine import Engine
from syncline.engines.local import LocalEngine
from syncline.engines.network import LOOPBACK, Network
from syncline.errors import ConfigError, nearest

__all__ = ["engine_for"]


def engine_for(name: str, network: Network | None = None) -> Engine:
    """The engine of this name, getting ready. `network` is where the local one puts its workers."""
    scheme = re.split(r"[:\[?]", name, maxsplit=1)[0]
    make = _ENGINES.get(scheme)
    if make is None:
        close = nearest(scheme, list(_ENGINES))
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"There is no engine {name!r}.{hint} There are: {', '.join(_FORMS)}.")
    if network is not None and make is not _local:
        raise ConfigError(f"Network namespaces are for the local engine, and this is {name!r}.")
    return LocalEngine(network) if network is not None else make(name)


def _local(name: str) -> Engine:
    if name != "local":
        raise ConfigError(f"The local engine has no address: write 'local' instead of {name!r}.")
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


def _cluster(name: str) -> Engine:
    from syncline.testing.cluster import link_socket, opened
    from syncline.testing.faults import LINKS

    which = name.partition(":")[2] or "default"
    before = os.environ.get(LINKS)
    with opened(which) as network:
        os.environ[LINKS] = str(link_socket(which))  # where its workers have their links cut, if a script says so
        try:
            return LocalEngine(network)
        finally:
            os.environ.pop(LINKS)
            if before is not None:
                os.environ[LINKS] = before


_ENGINES: dict[str, Callable[[str], Engine]] = {
    "local": _local,
    "attach": _attach,
    "ray": _ray,
    "spark": _spark,
    "spark-local": _spark,
    "cluster": _cluster,
}
_FORMS = (
    "local", "ray", "ray://HOST:PORT", "spark", "spark://HOST:PORT", "spark-local[N]", "attach://HOST:PORT", "cluster",
)  # fmt: skip
