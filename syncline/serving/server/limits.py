"""`Limits`: what one client, and all of them together, may ask of a server process."""

from __future__ import annotations

from dataclasses import dataclass

from syncline.errors import ConfigError

__all__ = ["Limits"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Each is of one process."""

    body_bytes: int = 64 * 2**20
    """The largest request."""
    requests: int = 128
    """Inference requests that are queued or running; more get 503."""
    wait_s: float = 1.0
    """A request that would wait longer for its turn gets 503."""
    receive_s: float = 30.0
    """A request must arrive, and its response be taken, within this time."""
    idle_s: float = 75.0
    """A connection without a request is closed after this time."""
    connections: int = 8192
    """Open connections; more are closed at once."""
    stop_s: float = 10.0
    """How long a stopping process waits for its requests in flight."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ConfigError.for_setting(name, value, "more than 0")
