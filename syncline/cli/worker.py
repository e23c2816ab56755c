"""`syncline worker --join HOST:PORT`: give a run a place for workers on this machine.

Here: what the command does. Not here: what happens at that place (`engines/outposts/outpost.py`).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping

from syncline.errors import ConfigError

__all__ = ["join", "seat_from"]

_SEATS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
"""In which environment variables torchrun, Slurm and MPI tell a process which of all it is."""


def join(address: str, *, reached_at: str | None, patience_s: float) -> str:
    """Keep a place until the run at `address` is over, and say why it ended."""
    from syncline.engines.attach import SECRET
    from syncline.engines.outposts.messages import Invitation
    from syncline.engines.outposts.outpost import keep_outpost

    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"{address!r} is no address: write --join HOST:PORT, as the run shows it.")
    secret = os.environ.get(SECRET)
    if not secret:
        raise ConfigError(f"{SECRET} is not set: without the run's secret nobody joins it. The run shows it.")
    left = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: left.set())
    return keep_outpost(
        Invitation(address=address, secret=secret),
        seat=seat_from(os.environ),
        address=reached_at,
        patience_s=patience_s,
        should_leave=left.is_set,
    )


def seat_from(environment: Mapping[str, str]) -> int | None:
    """Which of several processes this one is, if whoever started it says so.

    >>> seat_from({"SLURM_PROCID": "3", "HOME": "/"})
    3
    """
    found = next((environment[name] for name in _SEATS if environment.get(name, "").isdigit()), None)
    return None if found is None else int(found)
