"""What went wrong in a run, and which of it is the root cause. Pure.

Here: `FailureRecord`. Not here: what follows from a failure (`supervision.py`), and the message (`root_cause.py`).
"""

from __future__ import annotations

from syncline import errors
from syncline.comms.control import Failed
from syncline.engines.engine import Exit

Failure = Failed | Exit
"""An exception that a worker reported, or the end of a process that reported nothing."""


class FailureRecord:
    """The failures of all processes, in order."""

    def __init__(self) -> None:
        self.exceptions: list[Failed] = []
        self.crashes: list[Exit] = []
        """Processes that ended without a message and were not killed by the coordinator's own decision to end."""
        self.hung: dict[int, str] = {}
        """Why the coordinator killed a process, unless the run continued without it."""
        self.fatal: Failure | None = None
        """The failure that ended the run."""
        self.too_many = False
        """Whether the run was stopped because of the number of failures."""

    def root_cause(self) -> Failure | None:
        """The failure that ended the run; one that is only the consequence of another counts last."""
        if self.fatal is not None and not (isinstance(self.fatal, Failed) and self.fatal.consequence):
            return self.fatal
        causes = [e for e in self.exceptions if not e.consequence]
        if causes:
            return causes[-1]
        if self.crashes:
            return self.crashes[-1]
        return self.fatal or (self.exceptions[-1] if self.exceptions else None)

    def earlier_same(self, cause: Failure) -> list[Failed]:
        """The same exception at the same step, in another worker or an earlier life."""
        if not isinstance(cause, Failed):
            return []
        return [e for e in self.exceptions if e is not cause and (e.kind, e.step) == (cause.kind, cause.step)]

    def would_repeat(self, cause: Failure) -> bool:
        """Whether a replacement would fail in the same way, so that the run should end."""
        if not isinstance(cause, Failed):
            return False
        is_ours = own_error(cause) is not None
        return is_ours or cause.is_first_step or (bool(self.earlier_same(cause)) and not cause.consequence)


def own_error(cause: Failed) -> type[errors.SynclineError] | None:
    """The type of Syncline's own that this exception has, unless it is only a consequence."""
    found = getattr(errors, cause.kind, None)
    is_ours = isinstance(found, type) and issubclass(found, errors.SynclineError) and found is not errors.PeerFailed
    return found if is_ours else None
