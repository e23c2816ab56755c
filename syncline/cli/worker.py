"""`syncline worker --join HOST:PORT`: run a node agent for a run elsewhere.

Here: the command. Not here: the agent (`engines/remote/agent.py`).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from typing import Annotated

import typer

from syncline.errors import ConfigError

_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
"""The environment variables in which torchrun, Slurm and MPI number their processes."""


def worker(
    join_address: Annotated[
        str, typer.Option("--join", metavar="HOST:PORT", help="Address of the run, as it prints it.")
    ],
    reached_at: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Address of this machine. Default: that of the interface that reaches the run."
        ),
    ] = None,
    patience: Annotated[float, typer.Option(min=1, help="Seconds to wait for the run to start.")] = 60.0,
) -> None:
    """Join this machine to a run on another one, as one worker.

    Starts with the run or before it, and exits when the run ends.

    SYNCLINE_SECRET=... syncline worker --join 10.0.0.5:7077
    SYNCLINE_SECRET=... torchrun --nproc-per-node 2 --no-python syncline worker --join 10.0.0.5:7077
    SYNCLINE_SECRET=... srun --ntasks 8 syncline worker --join 10.0.0.5:7077
    The run: SYNCLINE_SECRET=... syncline train lenet --data mnist --workers 8 --engine attach://10.0.0.5:7077
    """
    why = join(join_address, reached_at=reached_at, patience_s=patience)
    typer.echo(f"Left: {why}.")
    if why != "the run is over":
        raise typer.Exit(1)


def join(address: str, *, reached_at: str | None, patience_s: float) -> str:
    """Work for the run at `address` until it ends; returns why it ended."""
    from syncline.engines.attach import SECRET
    from syncline.engines.remote.agent import run_node_agent
    from syncline.engines.remote.messages import Invitation

    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError.for_setting("--join", address, "HOST:PORT, as printed by the run")
    secret = os.environ.get(SECRET)
    if not secret:
        raise ConfigError(
            f"{SECRET} is not set. Set it to the secret of the run, which the run prints.", code="no-secret"
        )
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return run_node_agent(
        Invitation(address=address, secret=secret),
        slot=slot_from(os.environ),
        address=reached_at,
        patience_s=patience_s,
        should_stop=stop.is_set,
    )


def slot_from(environment: Mapping[str, str]) -> int | None:
    """The rank that torchrun, Slurm or MPI gave this process, if any.

    >>> slot_from({"SLURM_PROCID": "3", "HOME": "/"})
    3
    """
    found = next((environment[name] for name in _RANK_VARIABLES if environment.get(name, "").isdigit()), None)
    return None if found is None else int(found)
