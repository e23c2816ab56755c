"""One driver per run: the locks in a run directory.

Here: `DriverLock`, which a driver holds for its life; `lock_as_worker`, for each of its workers; and `holder_of`, who
drives a run now. Not here: what a driver does when it loses its lock (`coordinator/run_guard.py`).

Both are `flock`s, which the kernel releases when a process ends, however it ends. On NFS, Linux turns them into locks
of the server, so that they also exclude drivers on other hosts. The workers' lock keeps a new driver from starting
while workers of a killed one still save their state.

A user can delete a lock file by hand. So the driver checks regularly that the file is still its own, and
the ledger names the session of every line, so that an audit notices two drivers at once (`data/audit.py`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from syncline.config.owned_files import file_mode
from syncline.errors import ConfigError

_RETRY_S = 0.1
_LOOK_S = 1.0
"""A process that only asks who holds a lock holds it for an instant. A driver therefore tries for this long."""
WORKERS_LEAVE_S = 20.0
"""How long the workers of a killed driver may take to save and leave; they are killed after 7 s."""
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Holder(msgspec.Struct, frozen=True):
    """The driver of a run."""

    pid: int
    host: str
    session: str
    since: float
    """When it started, in seconds since 1970."""

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {when}"


class _LockFile:
    """An open lock file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = _open(path)

    def try_lock(self, operation: int) -> bool:
        """Lock it if that is possible now, and if the file at the path is still this one."""
        try:
            fcntl.flock(self._descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            return True  # a file system without locks: better to train than to refuse
        if self.is_in_place():
            return True
        self.close()
        self._descriptor = _open(self.path)
        return False

    def is_in_place(self) -> bool:
        """Whether the path still leads to this file."""
        try:
            return os.path.samestat(os.lstat(self.path), os.fstat(self._descriptor))
        except OSError:
            return False

    def read(self) -> bytes:
        return os.pread(self._descriptor, 4096, 0)

    def write(self, data: bytes) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, data, 0)

    def close(self) -> None:
        os.close(self._descriptor)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, file_mode(path.parent))
    except OSError as error:
        raise ConfigError(
            f"Cannot lock the run: {path} cannot be opened ({error.strerror}). Only the owner of a run can drive it.",
            code="cannot-lock", path=str(path),
        ) from error  # fmt: skip


class DriverLock:
    """The right to drive the run in `run_dir`. `ConfigError` if another driver has it.

    `wait` is called with the holder if there is one; if it returns True, this waits until the holder is done.
    """

    def __init__(self, run_dir: Path, session: str, wait: Callable[[Holder | None], bool] = lambda _: False) -> None:
        self._run_dir = run_dir
        self._me = Holder(os.getpid(), socket.gethostname(), session, time.time())
        self._file = _LockFile(_path(run_dir))
        try:
            self._acquire(wait)
            self._await_workers()
        except BaseException:
            self._file.close()
            raise

    def _acquire(self, wait: Callable[[Holder | None], bool]) -> None:
        deadline, may_wait = time.monotonic() + _LOOK_S, False
        while not self._file.try_lock(fcntl.LOCK_EX):
            if not may_wait and time.monotonic() > deadline:
                holder = _decoded(self._file.read())
                may_wait = wait(holder)
                if not may_wait:
                    raise in_use(self._run_dir, holder)
            time.sleep(_RETRY_S)
        self._file.write(msgspec.json.encode(self._me))

    def _await_workers(self) -> None:
        """Wait until the workers of a driver that was killed have saved and left."""
        workers = _LockFile(_workers_path(self._run_dir))
        deadline = time.monotonic() + WORKERS_LEAVE_S
        with contextlib.closing(workers):
            while not workers.try_lock(fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"Workers of an earlier driver of {self._run_dir} are still running after "
                        f"{WORKERS_LEAVE_S:g} s. End them, then resume the run.",
                        code="workers-left", run_dir=str(self._run_dir),
                    )  # fmt: skip
                time.sleep(_RETRY_S)

    def lost_to(self) -> Holder | None:
        """The driver that has taken over since the lock file was deleted or replaced; None while this one drives.

        A deleted file is made again and locked again, which keeps later drivers out.
        """
        if self._file.is_in_place():
            return None
        again = _LockFile(_path(self._run_dir))
        if not again.try_lock(fcntl.LOCK_EX):
            holder = _decoded(again.read())
            again.close()
            return holder  # None: a process that only asks who drives; the next check decides
        again.write(msgspec.json.encode(self._me))
        self._file.close()
        self._file = again
        return None

    def close(self) -> None:
        """Let other drivers resume the run. The file stays: deleting it could break a lock that was just taken."""
        with contextlib.suppress(OSError):
            self._file.write(b"")
        self._file.close()


def lock_as_worker(run_dir: Path) -> None:
    """Keep new drivers out for the life of this process, so that a worker of a killed driver can save its state."""
    with contextlib.suppress(ConfigError):  # a host that does not share the driver's file system
        _LockFile(_workers_path(run_dir)).try_lock(fcntl.LOCK_SH)


def holder_of(run_dir: Path) -> Holder | None:
    """The driver of the run in this directory, if it has one now."""
    try:
        descriptor = os.open(_path(run_dir), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _decoded(os.pread(descriptor, 4096, 0)) or Holder(0, "unknown", "", time.time())
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None


def in_use(run_dir: Path, holder: Holder | None) -> ConfigError:
    """The error for a run that another driver is driving."""
    who = f" ({holder})" if holder is not None else ""
    return ConfigError(
        f"The run {run_dir} is in progress{who}. Watch it: syncline watch {run_dir}. To resume it when it has ended, "
        "add --wait.",
        code="in-progress", run_dir=str(run_dir), pid=holder.pid if holder else None,
        host=holder.host if holder else None,
    )  # fmt: skip


def _path(run_dir: Path) -> Path:
    return run_dir / "driver.lock"


def _workers_path(run_dir: Path) -> Path:
    return run_dir / "workers.lock"


def _decoded(data: bytes) -> Holder | None:
    try:
        return msgspec.json.decode(data, type=Holder)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
