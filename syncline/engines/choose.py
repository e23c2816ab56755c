"""From what the user writes after --engine to an engine.

Here: the names. An engine that needs a package which is not installed says what to install; no such package is loaded
before its engine is chosen.
"""

from __future__ import annotations

from collections.abc import Callable

from syncline.engines.engine import Engine
from syncline.engines.local import LocalEngine
from syncline.engines.network import LOOPBACK, Network
from syncline.errors import ConfigError, nearest

__all__ = ["engine_for"]


def engine_for(name: str, network: Network | None = None) -> Engine:
    """The engine of this name, getting ready. `network` is where the local one puts its workers."""
    scheme = name.partition("://")[0].partition("[")[0]
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


_ENGINES: dict[str, Callable[[str], Engine]] = {"local": _local, "attach": _attach}
_FORMS = ("local", "attach://HOST:PORT")
