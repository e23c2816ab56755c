"""Scripts written for torchrun, run unchanged: they call torch.distributed themselves, or a library does for them.

Here: what such a script finds in its process: torchrun's environment variables, a rendezvous that works, and shared
memory in gloo's place (`comms/torch_backend.py`); and how it ends. Not here: what happens when one of its workers fails
(`coordinator/membership.py`: all restart, each in a new process), and scripts that call `syncline.worker()`
(`own_loop/`).

torch's own store accepts commands from any process that reaches its port. So MASTER_PORT is the port of the
coordinator's store, which authenticates its clients (`comms/store_host.py`), and torch's function that connects to a
store is replaced. Each start of the script has keys of its own there.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import re
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from syncline.comms import torch_backend
from syncline.comms.control import GroupCreated, StoreAddress
from syncline.comms.store import RunStore, connect_store
from syncline.comms.torch_group import interface_of
from syncline.errors import PeerFailed
from syncline.layouts.loop_optimizer import refusal
from syncline.planning.plan import Plan
from syncline.telemetry.events import WorkerReady
from syncline.workers.link import Link
from syncline.workers.session import Session

_PEER_ENDED = re.compile(r"Connection (closed|reset) by peer|Broken pipe|Socket closed|has left the process group")
_GLOO = ("gloo", "undefined", "cpu:gloo")
"""What a script asks for when it wants gloo between CPUs; `undefined` is torch's word for no choice."""


class ScriptStopped(BaseException):
    """Raised inside a script that gets a SIGTERM, unless it handles that signal itself."""


def variables(plan: Plan, rank: int, address: StoreAddress, *, restarts: int) -> dict[str, str]:
    """The environment variables that torchrun sets for the worker with this rank."""
    hosts = [worker.host for worker in plan.workers]
    here, names = hosts[rank], list(dict.fromkeys(hosts))
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(plan.size),
        "LOCAL_RANK": str(hosts[:rank].count(here)),
        "LOCAL_WORLD_SIZE": str(hosts.count(here)),
        "GROUP_RANK": str(names.index(here)),
        "GROUP_WORLD_SIZE": str(len(names)),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(plan.size),
        "MASTER_ADDR": address.host,
        "MASTER_PORT": str(address.port),
        "TORCHELASTIC_RUN_ID": plan.run_id or "none",
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(0 if plan.on_worker_failure == "stop" else plan.max_failures),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


class TorchrunScript:
    """A script in this process, which may create process groups of torch.distributed."""

    def __init__(self, session: Session, link: Link) -> None:
        self._session, self._link = session, link
        # A script of a user's own joins a View later, when it prepares its loop; the first one is known.
        self._view = session.view or (link.welcome.view.number if link.welcome.view is not None else 0)
        self._address = link.request_store()
        self._stores: list[RunStore] = []  # torch keeps only the C++ half of a store alive
        self._ours = signal.getsignal(signal.SIGTERM)
        if (interface := interface_of(link.host)) is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        found = variables(session.plan, session.rank, self._address, restarts=max(0, self._view - 1))
        os.environ.update(found)
        session.launch_variables = list(found)
        torch_backend.register()
        _forget_exit_handlers()
        with contextlib.suppress(PermissionError):  # it has one already
            # As torchrun does. A script that ends its process group must not end the other workers; and where the
            # kernel divides the processors among sessions, each worker gets the share of one.
            os.setsid()
        rendezvous: Any = sys.modules["torch.distributed.rendezvous"]
        rendezvous._create_c10d_store = self._create_store
        distributed_c10d._new_process_group_helper = _without_gloo  # type: ignore[assignment]

    @property
    def has_group(self) -> bool:
        """Whether the script has begun to create a process group."""
        return self._session.has_own_group

    def run(self, execute: Callable[[], bool]) -> bool:
        """Execute the script. True if it was stopped early."""
        try:
            stopped_early = self._execute(execute)
        except BaseException:
            if self.has_group:
                self._session.after_report.callback(_leave)
            raise
        if self.has_group:
            _leave()
        if self.has_group and self._link.is_aborted:
            raise PeerFailed("The run has failed on another worker.", code="run-failed")
        return stopped_early or (self.has_group and self._link.stop_requested)

    def _execute(self, execute: Callable[[], bool]) -> bool:
        try:
            return execute()
        except BaseException as error:
            if not self.has_group:
                raise
            return self._on_end_by(error)

    def _on_end_by(self, error: BaseException) -> bool:
        """What it means that the script has raised this: True if it was asked to stop."""
        if self._link.is_aborted or self._link.is_driver_gone:
            return True
        if self._link.stop_requested:
            has_exited = isinstance(error.__context__, SystemExit)  # as Lightning does when it is interrupted
            if not has_exited and not isinstance(error, KeyboardInterrupt | SystemExit | ScriptStopped):
                traceback.print_exc()  # in the log: the script may have failed while it saved its work
            return True
        if isinstance(error, RuntimeError) and _PEER_ENDED.search(str(error)):
            raise PeerFailed(f"{type(error).__name__}: {error}") from error
        if isinstance(error, ScriptStopped | KeyboardInterrupt):
            raise RuntimeError("The worker got a signal that asked it to end.") from error
        raise error

    def summary(self) -> dict[str, Any]:
        """What the driver shows at the end: of the script's steps and samples nothing is known."""
        peak = {str(self._session.worker_id): self._session.peak_memory.read()}
        return {
            "metrics": {}, "steps": 0, "epochs": 0.0, "samples": 0, "seconds": 0.0, "peak_memory_bytes": peak,
            "has_steps": False, "workers": self._session.plan.size,
        }  # fmt: skip

    def _create_store(
        self, hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True
    ) -> Any:
        """In place of torch's function of that name."""
        if (hostname, port) != (self._address.host, self._address.port):
            return _originals.create_store(hostname, port, rank, world_size, timeout, use_libuv)
        self._on_group()
        prefix = f"script-{self._view}-{len(self._stores)}"
        secret = bytes.fromhex(self._link.welcome.secret)
        store = connect_store(hostname, port, prefix, timeout.total_seconds(), secret)
        self._stores.append(store)
        return store

    def _on_group(self) -> None:
        if self.has_group:
            return
        if self._session.layout.divides_updates:
            raise refusal("the script trains with torch.distributed, which holds a model on each worker", "own-group")
        self._session.has_own_group = True
        session, link = self._session, self._link
        link.send(GroupCreated(session.worker_id, link.life, self._view))
        session.recorder.emit(
            WorkerReady(worker_id=session.worker_id, pid=os.getpid(), parameters=0, collective="torch.distributed")
        )
        with contextlib.suppress(ValueError):  # not in the main thread, where signals are handled
            _handle_unless_script_does(signal.SIGINT, signal.SIG_IGN, signal.default_int_handler)
            _handle_unless_script_does(signal.SIGTERM, self._ours, _stop_script)
        link.on_stop = _signal_this_process
        if link.stop_requested or link.is_aborted:
            raise ScriptStopped


def _leave_groups() -> None:
    """The other workers shall not wait for this one."""
    for group in list(distributed_c10d._world.pg_map):
        if isinstance(group, torch_backend.SynclineGroup):
            group.leave()


def _leave() -> None:
    _leave_groups()
    _run_exit_handlers()


def _run_exit_handlers() -> None:
    """Those that the script and its libraries have registered: a worker's process ends without running any."""
    with contextlib.suppress(Exception):  # they have printed why
        atexit._run_exitfuncs()


def _forget_exit_handlers() -> None:
    """Those of the process that this one was forked from; but end the processes that the script starts."""
    atexit._clear()
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]  # it is not documented


def _handle_unless_script_does(number: int, ours: Any, handler: Any) -> None:
    if signal.getsignal(number) == ours:
        signal.signal(number, handler)


def _stop_script(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise ScriptStopped


def _signal_this_process(name: str) -> None:
    """The run stops: as torchrun does, pass on the signal that asked for it."""
    os.kill(os.getpid(), signal.SIGINT if name == "SIGINT" else signal.SIGTERM)


class _Originals:
    """torch's own functions, before they are replaced."""

    def __init__(self) -> None:
        rendezvous: Any = sys.modules["torch.distributed.rendezvous"]
        self.create_store = rendezvous._create_c10d_store
        self.new_group = distributed_c10d._new_process_group_helper


_originals = _Originals()
_kept: deque[Any] = deque(maxlen=16)
"""The latest groups, so that they live to the end of the process: scripts with plain gloo groups sometimes hung after
their last line, when these were dropped. The cause was not found; with the groups kept, it was not seen again."""


def _without_gloo(
    group_size: int, group_rank: int, ranks: list[int], backend: Any, store: Any, *more: Any, **options: Any
) -> Any:
    """In place of torch's `_new_process_group_helper`: where it would make a gloo group, make one of ours.

    To the script its name stays gloo, because some code, also in torch, asks for that name and does what gloo needs.
    """
    wanted = str(backend).lower()
    is_gloo = wanted in _GLOO and (wanted != "undefined" or distributed_c10d.is_gloo_available())
    chosen = dist.Backend(torch_backend.NAME) if is_gloo and not _has_accelerator(wanted) else backend
    group, prefix_store = _originals.new_group(group_size, group_rank, ranks, chosen, store, *more, **options)
    _kept.append(group)
    if chosen is not backend and isinstance(group, torch_backend.SynclineGroup):
        world = distributed_c10d._world
        world.pg_map[group] = (backend, world.pg_map[group][1])
        world.pg_backend_config[group] = str(distributed_c10d.BackendConfig(backend))
    return group, prefix_store


def _has_accelerator(wanted: str) -> bool:
    """Without a choice, torch makes another group for the accelerator."""
    return wanted == "undefined" and torch.accelerator.is_available()
