"""Several processes that score pieces, each one piece at a time.

Here: starting them, giving out pieces, and replacing one that died: its piece is given out again. Processes end with
the one that started them. Not here: what a process does (`worker.py`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait

from syncline.errors import SynclineError
from syncline.serving.scoring.piece_scorer import Setup
from syncline.serving.scoring.pieces import ScoringPiece

_MOST_DEATHS = 3
"""How many processes may die over one piece."""
_END_S = 10.0


def score_all(
    setup: Setup, pieces: Sequence[ScoringPiece], processes: int, on_done: Callable[[ScoringPiece], None]
) -> None:
    """Score all pieces; the first error of a process is raised here."""
    run_to_the_end(_ScoringPool(setup, pieces), on_done, min(processes, len(pieces)))


def run_to_the_end(pool: _ScoringPool, on_done: Callable[[ScoringPiece], None], processes: int = 1) -> None:
    """Start the processes of a pool, and wait until its pieces are done; afterwards none is left."""
    try:
        for _ in range(processes):
            pool.start()
        while pool.members:
            for done in pool.step():
                on_done(done)
    finally:
        pool.stop()


class _ScoringProcess:
    """A process and the piece that it has."""

    def __init__(self, process: subprocess.Popen[bytes], connection: Connection) -> None:
        self.process, self.connection = process, connection
        self.piece: ScoringPiece | None = None


class _ScoringPool:
    def __init__(self, setup: Setup, pieces: Sequence[ScoringPiece]) -> None:
        self._setup, self._left = setup, deque(pieces)
        self._deaths: Counter[ScoringPiece] = Counter()
        self.members: list[_ScoringProcess] = []

    def start(self) -> None:
        # Not with multiprocessing: its processes import the user's script again, which would score again.
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            command = [sys.executable, "-m", "syncline.serving.scoring.worker", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        with contextlib.suppress(ConnectionError):  # noticed when news are read
            ours.send(self._setup)
        self.members.append(_ScoringProcess(process, ours))

    def step(self) -> list[ScoringPiece]:
        """Wait for news from any process; the pieces that are done."""
        by_connection = {member.connection: member for member in self.members}
        done = []
        for ready in wait(list(by_connection)):
            member = by_connection[ready]  # type: ignore[index]  # only connections were given
            try:
                news = member.connection.recv()
            except (EOFError, ConnectionError):
                self._bury(member)
                continue
            if isinstance(news, BaseException):
                raise news
            if member.piece is not None:
                done.append(member.piece)
            self._give(member)
        return done

    def stop(self) -> None:
        for member in self.members:
            member.connection.close()
            member.process.kill()
            _wait_for(member.process)
        self.members.clear()

    def _give(self, member: _ScoringProcess) -> None:
        """The next piece, or leave to end."""
        member.piece = self._left.popleft() if self._left else None
        try:
            member.connection.send(member.piece)
        except (BrokenPipeError, ConnectionError):
            self._bury(member)
            return
        if member.piece is None:
            self._remove(member)

    def _bury(self, member: _ScoringProcess) -> None:
        """Give the piece of a dead process out again, to a new one."""
        piece, member.piece = member.piece, None
        self._remove(member)
        if piece is None:
            raise _died(member, None)
        self._deaths[piece] += 1
        if self._deaths[piece] >= _MOST_DEATHS:
            raise _died(member, piece)
        self._left.appendleft(piece)
        self.start()

    def _remove(self, member: _ScoringProcess) -> None:
        self.members.remove(member)
        member.connection.close()
        _wait_for(member.process)


def _wait_for(process: subprocess.Popen[bytes]) -> None:
    """Until it has ended; one that does not is killed."""
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _died(member: _ScoringProcess, piece: ScoringPiece | None) -> SynclineError:
    code = member.process.returncode
    how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    what = f"while scoring {piece.name}, {_MOST_DEATHS} times" if piece is not None else "before its first piece"
    return SynclineError(
        f"A scoring process died ({how}) {what}. If it was out of memory (SIGKILL), use fewer --workers. What is "
        "scored is kept: the same command continues.",
        code="scoring-process-died", exit_code=code, piece=piece.name if piece is not None else None,
    )  # fmt: skip
