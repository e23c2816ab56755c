"""`Rollout`: how all processes come to serve the same catalog. Pure: messages in, messages out.

A change has two phases. First every process loads the new versions while it serves the old ones; if one cannot, the
change ends and nothing has happened. Then every process switches. The client that asked for it gets its answer when
all have switched. A process that was replaced in between starts with the newest catalog. Not here: sockets and
processes (`supervisor.py`), and which catalog comes next (`versions.py`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from syncline.serving.server.catalog import Catalog
from syncline.serving.server.control import Apply, Message, Prepare, Prepared, ProcessReady

__all__ = ["Rollout"]

Edit = Callable[[Catalog], Catalog]
"""Makes the next catalog from the one that is served when its turn comes."""
Finished = Callable[[str | None], None]


@dataclass
class _Change:
    edit: Edit
    finished: Finished
    catalog: Catalog = field(default_factory=Catalog)
    waiting: set[int] = field(default_factory=set)
    is_applying: bool = False


class Rollout:
    """The catalog of a server and the change that is under way. `send` delivers a message to a process."""

    def __init__(self, catalog: Catalog, send: Callable[[int, Message], None]) -> None:
        self.catalog = catalog
        self._send = send
        self._processes: set[int] = set()
        self._queue: deque[_Change] = deque()
        self._current: _Change | None = None
        self._generations = itertools.count(catalog.generation + 1)
        # A change that failed uses up its number: a late message about it must not count for the next one.

    @property
    def ready(self) -> frozenset[int]:
        """The processes that serve."""
        return frozenset(self._processes)

    def change(self, edit: Edit, finished: Finished) -> None:
        """Queue a change; `finished` gets None when all processes serve it, or the reason why not."""
        self._queue.append(_Change(edit, finished))
        self._next()

    def on_ready(self, process: int, generation: int) -> None:
        """A process serves this generation: it is new, or it has switched."""
        is_new = process not in self._processes
        self._processes.add(process)
        current = self._current
        if is_new and generation != self.catalog.generation:
            self._send(process, Apply(self.catalog))
        if current is None:
            return
        if is_new and not current.is_applying:
            current.waiting.add(process)
            self._send(process, Prepare(current.catalog))
        elif current.is_applying and generation == current.catalog.generation:
            current.waiting.discard(process)
            self._check()

    def on_prepared(self, process: int, message: Prepared) -> None:
        current = self._current
        if current is None or message.generation != current.catalog.generation:
            return
        if message.error is not None and not current.is_applying:
            self._end(message.error)
            return
        if not current.is_applying:
            current.waiting.discard(process)
            self._check()

    def on_gone(self, process: int) -> None:
        """A process has ended; its replacement reports by itself."""
        self._processes.discard(process)
        if self._current is not None:
            self._current.waiting.discard(process)
            self._check()

    def on_message(self, process: int, message: ProcessReady | Prepared) -> None:
        if isinstance(message, ProcessReady):
            self.on_ready(process, message.generation)
        else:
            self.on_prepared(process, message)

    def _next(self) -> None:
        if self._current is not None or not self._queue:
            return
        current = self._current = self._queue.popleft()
        wanted = current.edit(self.catalog)
        if (wanted.versions, wanted.withdrawn) == (self.catalog.versions, self.catalog.withdrawn):
            self._end(None)
            return
        current.catalog = _numbered(wanted, next(self._generations))
        current.waiting = set(self._processes)
        self._tell(current.waiting, Prepare(current.catalog))
        self._check()

    def _check(self) -> None:
        """Enter the next phase if no process is waited for."""
        current = self._current
        if current is None or current.waiting:
            return
        if current.is_applying:
            self._end(None)
            return
        current.is_applying = True
        self.catalog = current.catalog
        current.waiting = set(self._processes)
        self._tell(current.waiting, Apply(current.catalog))
        if not current.waiting:
            self._end(None)

    def _end(self, error: str | None) -> None:
        current, self._current = self._current, None
        assert current is not None
        current.finished(error)
        self._next()

    def _tell(self, processes: Iterable[int], message: Message) -> None:
        for process in list(processes):
            self._send(process, message)


def _numbered(catalog: Catalog, generation: int) -> Catalog:
    return Catalog(generation=generation, versions=catalog.versions, withdrawn=catalog.withdrawn)
