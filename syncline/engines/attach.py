"""Workers in processes that the user starts: with torchrun, srun, mpirun, or ssh.

Here: `AttachEngine`, which waits at an address until enough of them have joined. Each runs
`syncline worker --join HOST:PORT` (`cli/worker.py`). Both ends authenticate with the secret in SYNCLINE_SECRET.
"""

from __future__ import annotations

import os

from syncline.engines.remote.engine import RemoteEngine
from syncline.errors import ConfigError

SECRET = "SYNCLINE_SECRET"
"""The environment variable with the secret that both ends share."""


class AttachEngine(RemoteEngine):
    """An `Engine` at `attach://HOST:PORT`."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("attach://").rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(
                f"The engine {url!r} is not valid. Use attach://HOST:PORT with the address at which the workers reach "
                "this machine, such as attach://10.0.0.5:7077.",
                code="invalid-engine",
                setting="engine",
                value=url,
            )
        given = os.environ.get(SECRET)
        if given is not None and len(given) < 16:
            raise ConfigError(f"{SECRET} is too short to be safe: use 16 characters or more.", code="short-secret")
        super().__init__(host.strip("[]"), port=int(port), secret=given)
        self._is_shared = given is not None

    def _waiting_message(self, have: int, want: int) -> str:
        secret = "" if self._is_shared else f"{SECRET}={self.invitation.secret} "
        return (
            f"Waiting for {want - have} of {want} workers. Start each with: "
            f"{secret}syncline worker --join {self.invitation.address}"
        )
