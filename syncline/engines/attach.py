"""Workers in processes that the user starts: by torchrun, srun, mpirun, or by hand over ssh.

Here: `AttachEngine`, which waits at an address until enough of them have joined. Each of them runs
`syncline worker --join HOST:PORT` (`cli/worker.py`), and both ends know the same secret, from SYNCLINE_SECRET.
"""

from __future__ import annotations

import os

from syncline.engines.outposts.engine import OutpostEngine
from syncline.errors import ConfigError

__all__ = ["SECRET", "AttachEngine"]

SECRET = "SYNCLINE_SECRET"
"""The environment variable in which both ends find what lets them in."""


class AttachEngine(OutpostEngine):
    """An `Engine` at `attach://HOST:PORT`."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("attach://").rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(
                f"{url!r} is no place to wait for workers: write attach://HOST:PORT, with this machine's address as "
                "the others reach it, such as attach://10.0.0.5:7077."
            )
        given = os.environ.get(SECRET)
        if given is not None and len(given) < 16:
            raise ConfigError(f"{SECRET} is too short to keep anybody out: use 16 characters or more.")
        super().__init__(host.strip("[]"), port=int(port), secret=given)
        self._is_known = given is not None

    def _told_waiting(self, have: int, want: int) -> str:
        secret = "" if self._is_known else f"{SECRET}={self.invitation.secret} "
        return (
            f"Waiting for {want - have} of {want} workers. Start each with: "
            f"{secret}syncline worker --join {self.invitation.address}"
        )
