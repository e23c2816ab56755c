"""Runs commands in forks of one process that has imported torch and syncline already.

The tests run some two hundred commands, and each would spend two to three seconds of processor time on imports: in the
driver and again in the zygote. Here: `WarmProcess`, which starts that process; its program, which forks a process for
each command; and the client, which runs in the command's place and passes on its arguments, folder, environment,
standard streams, signals and exit code. The zygote of a run is forked from the command in the same way. Not here: tests
of starting itself (start-up, the wheel, killed drivers), which use real processes.

    test or shell --> client (waits)        warm process --> command --> zygote --> workers
"""

from __future__ import annotations

import array
import atexit
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import zygote_maker

CLIENT = """
import array, json, os, signal, socket, sys
there = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
there.connect(sys.argv[1])
order = json.dumps({"arguments": sys.argv[2:], "folder": os.getcwd(), "env": dict(os.environ)}).encode()
fds = array.array("i", [0, 1, 2])
there.sendmsg([len(order).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
there.sendall(order)
answers = there.makefile()
command = int(answers.readline())
if "SYNCLINE_TEST_PID" in os.environ:
    open(os.environ["SYNCLINE_TEST_PID"], "w").write(f"{command}\\n")
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(command, number))
code = int(answers.readline() or -9)
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@functools.cache
def warm_process() -> WarmProcess:
    """The one of this test session; it ends with the session."""
    return WarmProcess(Path(tempfile.mkdtemp(prefix="warm-", dir=os.environ["XDG_CACHE_HOME"])))


def warm_processes() -> set[int]:
    """The id of that process, if it has been started; it stays for the next test."""
    return {warm_process().process.pid} if warm_process.cache_info().currsize else set()


class WarmProcess:
    """The process that commands are forked from."""

    def __init__(self, folder: Path) -> None:
        self._address = str(folder / "socket")
        self._client = folder / "client.py"
        self._client.write_text(CLIENT)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(self._address)
        listening.listen(16)
        root = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        with listening:
            self.process = subprocess.Popen(  # ends when its standard input is closed
                [sys.executable, __file__, str(listening.fileno())],
                pass_fds=[listening.fileno()], stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip

    def words(self, *arguments: str) -> list[str]:
        """The words that stand for `python ARGUMENTS`: a script, or `-m syncline.cli.main`, and its arguments."""
        return [sys.executable, "-S", "-E", str(self._client), self._address, *arguments]


class WarmCommand(subprocess.Popen[str]):
    """`python ARGUMENTS` as a fork of the warm process, with pipes; it is sent signals itself, also SIGSTOP."""

    def __init__(self, *arguments: str, cwd: Path, env: dict[str, str], stderr: int = subprocess.PIPE) -> None:
        with tempfile.NamedTemporaryFile("r", prefix="pid-", dir=os.environ["XDG_CACHE_HOME"]) as noted:
            super().__init__(
                warm_process().words(*arguments), cwd=cwd, env={**env, "SYNCLINE_TEST_PID": noted.name},
                text=True, stdout=subprocess.PIPE, stderr=stderr,
            )  # fmt: skip
            deadline = time.monotonic() + 60
            while not (line := Path(noted.name).read_text()).endswith("\n"):
                assert self.poll() is None, "the command did not start"
                assert time.monotonic() < deadline, "the command did not start in time"
                time.sleep(0.005)
        self.command_pid = int(line)

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.command_pid, sig)


# The process that forks


def main() -> None:
    import syncline.cli.main
    import syncline.driver
    import syncline.engines.local  # noqa: F401
    from syncline.workers import entry  # noqa: F401
    from syncline.workers.quick_start import without_compiler

    without_compiler()
    import torchmetrics  # noqa: F401  # what `syncline list` and evaluations spend two seconds on

    _read_command_line_ahead()
    gc.freeze()  # commands do not collect what they have inherited, nor copy its memory by doing so
    listening = socket.socket(fileno=int(sys.argv[1]))
    while _is_wanted(listening):
        client, _ = listening.accept()
        if os.fork() == 0:  # it waits for the command, so that this process can serve the next one meanwhile
            os.setsid()
            listening.close()
            _serve(client)
        client.close()
        while _reap():
            pass


def _read_command_line_ahead() -> None:
    """Build the commands and parse a line, with all that this imports: a third of a second for each command."""
    import typer.main

    import syncline.cli.main
    import syncline.cli.tasks
    import syncline.data.audit
    import syncline.data.digits
    import syncline.observe.terminal.live_view
    import syncline.observe.terminal.plain

    zygote_maker.import_what_workers_import()
    typer.main.get_command = functools.cache(typer.main.get_command)
    commands = typer.main.get_command(syncline.cli.main.app).commands
    commands["audit"].make_context("audit", ["runs/any"])


def _is_wanted(listening: socket.socket) -> bool:
    """Wait for a client; false when the owner has closed the standard input."""
    ready, _, _ = select.select([listening, 0], [], [])
    return 0 not in ready


def _reap() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _serve(client: socket.socket) -> NoReturn:
    try:
        order, streams = _receive(client)
        command = os.fork()
        if command == 0:
            client.close()
            _become_command(order, streams)
        for fd in streams:
            os.close(fd)
        client.sendall(f"{command}\n".encode())
        ended = os.pidfd_open(command)
        if client in select.select([client, ended], [], [])[0]:  # the client was killed, or has given up
            signal.pidfd_send_signal(ended, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
        client.sendall(f"{code}\n".encode())
    finally:
        os._exit(0)


def _receive(client: socket.socket) -> tuple[dict[str, object], list[int]]:
    fds = array.array("i")
    head, extra, *_ = client.recvmsg(4, socket.CMSG_SPACE(3 * fds.itemsize))
    fds.frombytes(extra[0][2])
    wanted, body = int.from_bytes(head, "big"), b""
    while len(body) < wanted:
        body += client.recv(wanted - len(body))
    return json.loads(body), list(fds)


def _become_command(order: dict[str, object], streams: list[int]) -> NoReturn:
    code = 1
    try:
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
            os.close(fd)
        os.environ.clear()
        os.environ.update(order["env"])
        os.chdir(order["folder"])
        tempfile.tempdir = None
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _fork_zygotes_from_here()
        code = _run(order["arguments"])
    except KeyboardInterrupt:
        code = 130
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _fork_zygotes_from_here() -> None:
    import syncline.engines.local

    zygote_maker.use_a_fork_of_this_process()
    stand_in = SimpleNamespace(**vars(subprocess) | {"Popen": zygote_maker.ForkedZygote})
    syncline.engines.local.subprocess = stand_in


def _run(arguments: list[str]) -> int:
    """Do what `python SCRIPT ...` and `python -m syncline.cli.main ...` do."""
    is_module = arguments[0] == "-m"
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = os.getcwd() if is_module else str(Path(arguments[0]).resolve().parent)
    sys.path[:] = [first, *given, *(path for path in sys.path[1:] if path not in given)]
    try:
        if is_module:
            from syncline.cli import main as command

            assert arguments[1] == command.__name__
            sys.argv = [str(command.__file__), *arguments[2:]]
            command.main()
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
