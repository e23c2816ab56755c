"""Opening a worker's connections to the other members of a View: shared memory, torch.distributed, parameter servers.

Here: which of them is opened, and with what. Not here: how they work (`comms/`), and how long they are kept
(`session.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncline.comms.collective import Collective, Solo
from syncline.comms.control import ViewOf
from syncline.comms.segment import Segment
from syncline.comms.shared_memory import SharedMemory
from syncline.compute.device import device_here
from syncline.errors import PeerFailed
from syncline.layouts.grid import WorkerPlace
from syncline.planning.plan import Plan
from syncline.workers.link import Link

if TYPE_CHECKING:
    from syncline.comms.parameter_server.client import ParameterServers


def open_collective(plan: Plan, link: Link, view: ViewOf, rank: int) -> Collective:
    """The collective of a View's members; `PeerFailed` if the coordinator has replaced the View in the meantime."""
    if plan.size == 1:
        return Solo()
    if view.control_segment is None:
        return open_process_group(plan, link, view.number, rank)
    try:
        control = Segment.attach(view.control_segment)
    except OSError as error:
        raise PeerFailed(f"The shared memory of View {view.number} was removed: {error}.") from None
    return SharedMemory(
        control,
        rank=rank,
        size=plan.size,
        timeout_s=plan.exchange_timeout_s,
        limit_bytes=plan.shared_memory_bytes,
    )


def open_process_group(plan: Plan, link: Link, view: int, rank: int) -> Collective:
    # Imported here: torch.distributed takes a while to load, and most runs never use it.
    from syncline.comms.process_group import ProcessGroup
    from syncline.comms.store import connect_store

    address = link.request_store()
    store = connect_store(
        address.host,
        address.port,
        f"view-{view}",
        plan.exchange_timeout_s,
        bytes.fromhex(link.welcome.secret),
        should_stop=lambda: link.is_outdated(view),
    )
    return ProcessGroup(
        store,
        rank=rank,
        size=plan.size,
        device=device_here(plan.workers[rank].device),
        timeout_s=plan.exchange_timeout_s,
        host=link.host,
        should_stop=lambda: link.is_outdated(view),
        memory_bytes=plan.shared_memory_bytes if plan.shares_memory_on_hosts else 0,
    )


def open_servers(plan: Plan, link: Link, view: int, place: WorkerPlace) -> ParameterServers:
    """For the servers a replica is one worker; its other workers may only ask which steps were applied."""
    from syncline.comms.parameter_server.client import ParameterServers

    addresses = link.request_servers(view)
    return ParameterServers(
        addresses,
        bytes.fromhex(link.welcome.secret),
        rank=place.replica if place.is_leader else 0,
        size=place.grid.replicas,
        view=view,
        only_asks=not place.is_leader,
        timeout_s=plan.exchange_timeout_s,
        share_memory=all(a.rpartition(":")[0].strip("[]") == link.host for a in addresses),
        should_stop=lambda: link.is_outdated(view),
    )
