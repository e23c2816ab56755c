"""Failure detection: which processes have stopped responding. Pure; time is passed in as a number.

Every process sends heartbeats several times a second, from a thread of its own. A heartbeat says how many steps its
main loop has done, and whether the loop is waiting for others. A process without heartbeats is stopped or unreachable;
one with heartbeats whose loop neither advances nor waits, while others wait, is stuck. The limits follow from what was
measured in this run, so there is nothing to configure.

Here: `HeartbeatMonitor`. Not here: what happens to such a process (`supervision.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from syncline.comms.control import Events

LEAST_SILENCE_S = 1.5
"""A silence shorter than this is never a failure."""
PATIENT_SILENCE_S = 30.0
"""The same for a script that trains with torch.distributed itself: all of its workers restart if one is killed."""
FIRST_HEARTBEAT_S = 120.0
"""How long a process may take to its first heartbeat: it may have much to load."""
LEAST_STUCK_S = 60.0
"""A loop that stands still for less than this is never called stuck."""
_TIMES_LONGEST = 3
_STEPS = 100
_OWN_DELAY_S = 0.3
"""If this process itself was held up for longer than this, perhaps the whole machine was."""


@dataclass
class _Heartbeats:
    life: int
    since: float
    last: float | None = None
    step: int = -1
    advanced: float = 0.0
    waits: bool = False


class HeartbeatMonitor:
    """The heartbeats of all processes."""

    def __init__(self) -> None:
        self._processes: dict[int, _Heartbeats] = {}
        self._longest_gap = 0.0
        self._times_hung: dict[int, int] = {}
        self._longest_step = 0.0
        self._checked_at: float | None = None
        self._least_silence_s = LEAST_SILENCE_S
        self.is_script = False
        """Whether workers run a user's script: between steps it may hold Python's lock for long, and is silent then."""

    def be_patient(self) -> None:
        """From now on, tolerate longer silences."""
        self._least_silence_s = PATIENT_SILENCE_S

    def on_start(self, worker_id: int, life: int, now: float) -> None:
        self._processes[worker_id] = _Heartbeats(life, now)

    def on_end(self, worker_id: int) -> None:
        self._processes.pop(worker_id, None)

    def on_heartbeat(self, message: Events, now: float) -> None:
        beats = self._processes.get(message.worker_id)
        if beats is None or message.life != beats.life:
            return
        if beats.last is not None and beats.step > 0:  # while a process loads, silence is normal
            self._longest_gap = max(self._longest_gap, min(now - beats.last, LEAST_SILENCE_S))
        if message.step != beats.step:
            if message.step == beats.step + 1:
                self._longest_step = max(self._longest_step, now - beats.advanced)
            beats.advanced = now
        if message.waits:
            beats.advanced = now
        beats.last, beats.step, beats.waits = now, message.step, message.waits

    def find_hung(self, now: float) -> dict[int, str]:
        """The processes that should be considered failed, and why."""
        delay = now - self._checked_at if self._checked_at is not None else 0.0
        self._checked_at = now
        if delay > _OWN_DELAY_S:
            for beats in self._processes.values():
                beats.since += delay
                beats.advanced += delay
                if beats.last is not None:
                    beats.last += delay
        return {i: why for i, beats in self._processes.items() if (why := self._why_hung(i, beats, now))}

    def on_killed(self, worker_id: int) -> None:
        """It was killed for its silence. If its work makes it silent, its replacement needs more time."""
        self._times_hung[worker_id] = self._times_hung.get(worker_id, 0) + 1

    def _why_hung(self, worker_id: int, beats: _Heartbeats, now: float) -> str | None:
        if beats.last is None:
            limit = FIRST_HEARTBEAT_S
            return f"sent no heartbeat within {limit:g} s of its start" if now - beats.since > limit else None
        least = PATIENT_SILENCE_S if self.is_script and beats.waits else self._least_silence_s
        silence = max(least, _TIMES_LONGEST * self._longest_gap) * 2 ** self._times_hung.get(worker_id, 0)
        if now - beats.last > silence:
            return f"sent no heartbeat for {now - beats.last:.1f} s"
        stuck = max(LEAST_STUCK_S, _STEPS * self._longest_step)
        others_wait = any(b.waits for b in self._processes.values())
        if beats.step >= 0 and not beats.waits and others_wait and now - beats.advanced > stuck:
            return f"made no progress for {now - beats.advanced:.0f} s while other workers waited for it"
        return None
