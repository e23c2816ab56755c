"""Which node agents have gone silent. Pure; time is passed in as a number.

An agent's process sends several heartbeats a second, from a thread of its own. If none arrives while its host still
acknowledges what it is sent, the process is stopped; if the host does not either, the network may only be interrupted,
and gets more time. As with workers (`coordinator/heartbeats.py`), the limit follows from what was measured in this run.

Here: `SilenceMonitor`. Not here: the connections (`agent_server.py`), and what happens to the agent (`agent_pool.py`).
"""

from __future__ import annotations

LEAST_SILENCE_S = 2.0
"""A silence shorter than this is never a failure."""
UNREACHABLE_S = 15.0
"""The same for an agent whose host does not respond either."""
_TIMES_LONGEST = 3
_OWN_DELAY_S = 0.6
"""If the driver's thread itself was held up for longer than this, perhaps the whole machine was."""


class SilenceMonitor:
    """The heartbeats of all connected agents."""

    def __init__(self) -> None:
        self._heard_at: dict[str, float] = {}
        self._longest_gap_s = 0.0
        self._checked_at: float | None = None

    def on_connected(self, agent: str, now: float) -> None:
        self._heard_at[agent] = now

    def on_heard(self, agent: str, now: float) -> None:
        """Anything has arrived from this agent."""
        if agent in self._heard_at:
            self._longest_gap_s = max(self._longest_gap_s, min(now - self._heard_at[agent], LEAST_SILENCE_S))
            self._heard_at[agent] = now

    def on_disconnected(self, agent: str) -> None:
        self._heard_at.pop(agent, None)

    def begin_check(self, now: float) -> None:
        """Called before the agents are checked, several times a second."""
        delay = now - self._checked_at if self._checked_at is not None else 0.0
        self._checked_at = now
        if delay > _OWN_DELAY_S:
            self._heard_at = {agent: at + delay for agent, at in self._heard_at.items()}

    def silent_for(self, agent: str, now: float, *, is_reachable: bool) -> float | None:
        """For how long this agent has been silent, if that is too long. `is_reachable`: its host responds."""
        silent_s = now - self._heard_at.get(agent, now)
        limit_s = max(LEAST_SILENCE_S, _TIMES_LONGEST * self._longest_gap_s) if is_reachable else UNREACHABLE_S
        return silent_s if silent_s > limit_s else None
