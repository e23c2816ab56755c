"""What an agent reports about its node.

Here: `node_info_here`, and `version_mismatch`, which compares a node with the driver.
"""

from __future__ import annotations

import os
import platform
import socket
from importlib import metadata

from syncline.comms.segment import machine_here
from syncline.engines.remote.messages import NodeInfo
from syncline.planning.machine import Machine, visible_gpus

_SAME_VERSION = ("syncline", "torch", "numpy", "msgspec", "cloudpickle")


def node_info_here(driver: str, address: str | None = None) -> NodeInfo:
    """This node, as seen from `driver`; `address` is where others reach it, if that is known."""
    machine = Machine.here()
    python = {"python": ".".join(platform.python_version_tuple()[:2])}
    return NodeInfo(
        machine=machine_here(),
        pid=os.getpid(),
        host=machine.host,
        address=address or address_towards(driver),
        cores=machine.cores,
        memory_available_bytes=machine.memory_available_bytes,
        no_shared_memory_because=machine.no_shared_memory_because,
        gpus=visible_gpus(),
        versions=python | {name: metadata.version(name) for name in _SAME_VERSION},
    )


def address_towards(driver: str) -> str:
    """The address of this machine on its route to `driver`. Nothing is sent."""
    family = socket.AF_INET6 if ":" in driver else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((driver, 9))
        return str(probe.getsockname()[0])


def version_mismatch(node: NodeInfo, ours: dict[str, str]) -> str | None:
    """Which versions on the node differ from the driver's, and what to do; None if none does.

    >>> here = node_info_here("127.0.0.1")
    >>> version_mismatch(here, here.versions) is None
    True
    """
    different = [
        f"{name} {version} on the driver and {node.versions.get(name, 'missing')} on the node"
        for name, version in ours.items()
        if node.versions.get(name) != version
    ]
    if not different:
        return None
    return f"Node {node.host} has other versions than the driver: {', '.join(different)}. Install the same versions."
