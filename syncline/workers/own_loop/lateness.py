"""Where a worker stands in its run before its script has joined, and when the membership changes.

Here: questions to the connection with the coordinator; a script under plain python has none. Not here: joining
(`workers/session.py`).
"""

from __future__ import annotations

from syncline.workers.session import Session


def is_late(session: Session) -> bool:
    """Whether this worker was started after the run's first View, and has not joined any yet."""
    return session.link is not None and session.link.welcome.view is None and session.view == 0


def is_outdated(session: Session) -> bool:
    """Whether there is a newer View than this worker's."""
    return session.link is not None and session.link.is_outdated(session.view)


def is_aborted(session: Session) -> bool:
    """Whether the run has failed on another worker, or the driver is gone."""
    return session.link is not None and (session.link.is_aborted or session.link.is_orphaned)


def epoch_when_started(session: Session) -> int:
    """In which epoch the run was, at least, when this process was started."""
    return session.link.welcome.epoch if session.link is not None else 0
