"""Finding out where this process is, as an outpost tells it to the driver.

Here: `place_here`, and `not_alike`, which compares two. Pure but for reading this machine.
"""

from __future__ import annotations

import platform
import socket
from importlib import metadata

from syncline.comms.segment import machine_here
from syncline.engines.outposts.messages import Place
from syncline.plan.machine import Machine

__all__ = ["address_towards", "not_alike", "place_here"]

_ALIKE = ("syncline", "torch", "numpy", "msgspec", "cloudpickle")


def place_here(driver: str, address: str | None = None) -> Place:
    """This place, for somebody who is reached at `driver`; it is reached at `address`, if that is known."""
    machine = Machine.here()
    return Place(
        machine=machine_here(),
        host=machine.host,
        address=address or address_towards(driver),
        cores=machine.cores,
        memory_available_bytes=machine.memory_available_bytes,
        no_shared_memory_because=machine.no_shared_memory_because,
        versions={"python": ".".join(platform.python_version_tuple()[:2])} | {n: metadata.version(n) for n in _ALIKE},
    )


def address_towards(driver: str) -> str:
    """Which of this machine's addresses is the one on the way to `driver`. Nothing is sent."""
    family = socket.AF_INET6 if ":" in driver else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((driver, 9))
        return str(probe.getsockname()[0])


def not_alike(theirs: Place, ours: dict[str, str]) -> str | None:
    """What differs between an outpost and the driver that must be the same, in words.

    >>> here = place_here("127.0.0.1")
    >>> not_alike(here, here.versions) is None
    True
    """
    different = [
        f"{name} {theirs.versions.get(name, 'is missing')} instead of {version}"
        for name, version in ours.items()
        if theirs.versions.get(name) != version
    ]
    if not different:
        return None
    return f"{theirs.host} has {', '.join(different)}. Install the same versions there as on the driver."
