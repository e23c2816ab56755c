"""A process that keeps parameters for the workers: what it does from joining the run to leaving it.

Not here: the server itself (`comms/parameter_server/`), and how the process came to be (`engines/`).
"""

from __future__ import annotations

import torch

from syncline.comms.control import ServerReady
from syncline.comms.parameter_server.server import serve
from syncline.errors import PeerLost
from syncline.plan.plan import Plan
from syncline.workers.link import Link

__all__ = ["run_server"]


def run_server(link: Link, plan: Plan) -> None:
    """Serve until every worker has said goodbye."""
    torch.set_num_threads(1)  # its recorder says from the start that it waits, which is what a server does
    serve(
        link.host,
        bytes.fromhex(link.welcome.secret),
        shard_index=link.rank - plan.size,
        shards=plan.servers,
        size=plan.size,
        on_ready=lambda address: link.send(ServerReady(link.rank, address, link.life)),
        should_stop=lambda: link.is_aborted or link.is_released,
    )
    if link.is_aborted:
        raise PeerLost("The run has failed elsewhere.")
