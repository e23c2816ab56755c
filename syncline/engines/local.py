"""Workers as processes on this machine: the default engine.

Here: `LocalEngine`, which forks workers from a zygote process (`zygote.py`). The zygote starts importing torch as soon
as the engine is created, while the driver still reads its configuration. If the zygote gets stuck, the engine starts
another one; the workers of the first one continue. If it is killed, its workers die with it, and the engine starts
another one as well. The hosts of this engine are network namespaces of this machine, if there are any (`network.py`).
Not here: one zygote and its workers (`zygote_process.py`), and when it counts as stuck (`zygote_monitor.py`).
"""

from __future__ import annotations

import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from syncline.comms.control import LaunchSpec, RunFiles
from syncline.config.owned_files import file_mode, make_directory
from syncline.engines.engine import Exit, signal_name
from syncline.engines.network import LOOPBACK, Network
from syncline.engines.zygote_process import Launch, ZygoteProcess, zygote_arguments, zygote_environment
from syncline.errors import SynclineError
from syncline.planning.machine import Machine

_CLOSE_TIMEOUT_S = 20.0
_ENDED_S = 5.0
"""How long a zygote that has closed its socket may take to be gone."""
_MOST_IN_VAIN = 3
"""How many zygotes in a row may be killed before they have started a worker; then the next one would be, too."""


class LocalEngine:
    """An `Engine` on this machine."""

    def __init__(
        self, network: Network = LOOPBACK, *, kills_at_once: bool = False, environment: Mapping[str, str] | None = None
    ) -> None:
        """`kills_at_once`: if this process is killed, so are its workers; otherwise they save their work first.

        `environment`: variables for the workers in addition to those of this process.
        """
        if sys.platform != "linux":
            raise SynclineError(
                f"Workers run on Linux only, and this is {sys.platform}. Use a Linux machine, a container or WSL 2.",
                code="unsupported-platform",
                platform=sys.platform,
            )
        self.network = network
        self._kills_at_once, self._environment = kills_at_once, environment or {}
        self._ready = select.epoll()
        self._retired: list[ZygoteProcess] = []  # their workers die with them, so they stay as long as these
        self._problems: list[str] = []
        self._canceled: list[Exit] = []
        self._folders: list[str] = []
        self._closed = self._has_launched = False
        self._times_stuck = self._killed_in_vain = 0
        self._zygote = self._start_zygote()

    def reserve(self, workers: int, report: Callable[[str], None]) -> None:
        """Nothing to wait for on this machine."""

    @property
    def machine(self) -> Machine:
        return Machine.here()

    def provide(self, files: RunFiles) -> None:
        """All processes on this machine see them."""

    def launch(self, spec: LaunchSpec, log: Path) -> None:
        self._has_launched = True
        make_directory(log.parent)
        host = self.network.host_of(spec.worker_id)
        sent = msgspec.to_builtins(msgspec.structs.replace(spec, host=host.address))
        order = {
            "do": "launch", "spec": sent, "log": str(log.resolve()), "log_mode": file_mode(log.parent),
            "namespace": host.namespace,
        }  # fmt: skip
        self._zygote.launch((spec.worker_id, spec.life), Launch(order))

    def scratch(self) -> Path:
        """A new folder that is deleted when this engine ends, even if this process is killed."""
        folder = tempfile.mkdtemp(prefix="syncline-agent-")
        self._has_launched = True  # the zygote must clean up at its end
        self._folders.append(folder)
        self._zygote.send({"do": "remove-at-exit", "folder": folder})
        return Path(folder)

    def poll(self) -> list[Exit]:
        """The workers that have ended."""
        now = time.monotonic()
        ended = {descriptor for descriptor, _ in self._ready.poll(0)}
        exits, self._canceled = self._canceled, []
        exits += self._zygote.poll(now, ended)
        if self._zygote.has_ended:
            self._replace(self._why_killed())
        elif (why := self._zygote.why_stuck(now)) is not None:
            self._times_stuck += 1
            self._replace(f"does not respond ({why})")
        for zygote in list(self._retired):
            exits += zygote.poll(now, ended)
            if not zygote.has_workers:
                self._retired.remove(zygote)
                zygote.wait(0)
        return exits

    def problems(self) -> list[str]:
        problems, self._problems = self._problems, []
        return problems

    def kill(self, worker_id: int | None = None) -> None:
        """Kill all workers now, or one."""
        for zygote in (*self._retired, self._zygote):
            zygote.kill(worker_id)

    def close(self) -> None:
        """End the workers and the zygote."""
        if self._closed:
            return
        self._closed = True
        zygotes = [*self._retired, self._zygote]
        for zygote in zygotes:
            zygote.end()
        if not self._has_launched:
            self._zygote.process.kill()  # it has no workers to wait for, and may be in the middle of a long import
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for zygote in zygotes:
            zygote.wait(max(0.0, deadline - time.monotonic()))
        self._ready.close()

    def fileno(self) -> int:
        """Readable when a worker has ended."""
        return self._ready.fileno()

    def _start_zygote(self) -> ZygoteProcess:
        ours, theirs = socket.socketpair()
        namespaces = [host.namespace for host in self.network.hosts if host.namespace is not None]
        predecessors = [zygote.descriptor for zygote in self._retired]
        with theirs:
            process = subprocess.Popen(
                zygote_arguments(self._kills_at_once, theirs.fileno(), predecessors, namespaces),
                pass_fds=[theirs.fileno(), *predecessors, *namespaces],
                env=zygote_environment(self._environment),
                stdin=subprocess.DEVNULL,
                # Ctrl-C in the terminal goes to the driver alone.
                start_new_session=True,
            )
        # If the machine is so slow that a zygote cannot answer in time, starting more of them must not make it slower.
        return ZygoteProcess(process, ours, self._ready, patience=2.0**self._times_stuck)

    def _replace(self, why: str) -> None:
        """Start another zygote in place of one that is stuck or gone, and give it what that one has not done."""
        self._problems.append(f"The process that starts workers {why}; starting another one.")
        launches = self._zygote.retire()
        self._retired.append(self._zygote)
        self._zygote = self._start_zygote()
        for folder in self._folders:
            self._zygote.send({"do": "remove-at-exit", "folder": folder})
        for (worker_id, life), launch in launches.items():
            if launch.is_killed:
                self._canceled.append(Exit(worker_id, 0, None, signal.SIGKILL, life))
            else:
                self._zygote.launch((worker_id, life), launch)

    def _why_killed(self) -> str:
        """What ended the zygote, if another one may do better; else it is an error for the user.

        SIGTERM is a request to end, and one that ends by itself has met an error that the next one would meet, too.
        """
        code = self._zygote.process.wait(timeout=_ENDED_S)
        self._killed_in_vain = 0 if self._zygote.has_forked else self._killed_in_vain + 1
        if code >= 0 or code == -signal.SIGTERM or self._killed_in_vain > _MOST_IN_VAIN:
            raise SynclineError(
                f"The process that starts workers ended with exit code {code}. Its last output is above; "
                "if there is none, it was killed, perhaps by the out-of-memory killer.",
                code="zygote-failed",
                exit_code=code,
            )
        with_workers = ", and its workers with it" if self._zygote.has_workers else ""
        return f"was killed by {signal_name(-code)}{with_workers}"
