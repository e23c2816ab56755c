"""Runs whose node agents are started by other means: torchrun, a shell, another host."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
from real_runs import environment, final_state, relative_difference
from real_runs import syncline as command
from warm_process import WarmCommand

from syncline.engines.remote import agent_server, node_info
from syncline.engines.remote.agent import run_node_agent
from syncline.engines.remote.engine import RemoteEngine
from syncline.engines.remote.messages import Invitation
from syncline.errors import SynclineError
from syncline.lab.namespaces import Namespaces, why_not_possible
from syncline.telemetry.events import Progress, Recovered, WorkerFailure
from syncline.telemetry.run_dir import RunDir

LIMIT_S = 60.0
COMMAND = ("-m", "syncline.cli.main")
SECRET = {"SYNCLINE_SECRET": "only for these tests"}
RUN_FILE = """
model = "mlp"
data = "digits"
workers = 2
epochs = 2
batch = 64
seed = 5
name = "run"
"""
TASK = """
import threading, torch, syncline

class Slow(torch.nn.Module):
    '''Steps of a real size.'''

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(12, 3)

    def forward(self, x):
        if self.training:
            threading.Event().wait(0.02)
        return self.net(x)

task = syncline.Task(model=Slow(), data=(torch.randn(203, 12), torch.zeros(203, dtype=torch.long)),
                     optimizer=syncline.sgd(lr=0.01))
"""


@contextmanager
def started(*arguments: str, cwd: Path, python: tuple[str, ...] | None = None) -> Iterator:
    """A command that runs beside the test, and does not outlive it; with `python`, what that is to do, a real process.

    Its process is `pid_of(...)`.
    """
    if python is None:
        process = WarmCommand(
            "-m", "syncline.cli.main", *arguments, cwd=cwd, env=environment(SECRET), stderr=subprocess.STDOUT
        )
    else:
        process = subprocess.Popen(
            [sys.executable, *python, *arguments],
            cwd=cwd, env=environment(SECRET), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def pid_of(process: subprocess.Popen) -> int:
    return process.command_pid if isinstance(process, WarmCommand) else process.pid


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])


def until(what, limit_s: float = LIMIT_S):
    """Wait until it is true, and give what it is."""
    deadline = time.monotonic() + limit_s
    while not (found := what()):
        assert time.monotonic() < deadline, f"not within {limit_s:g} s"
        threading.Event().wait(0.05)
    return found


def events(folder: Path, kind: type) -> list:
    run_dir = RunDir(folder / "runs" / "run")
    return [e for e in run_dir.read_events() if isinstance(e, kind)] if run_dir.events.exists() else []


def is_clean(folder: Path) -> bool:
    audit = command("audit", "runs/run", cwd=folder)
    assert audit.code == 0, audit.out
    return "0 lost, 0 repeated" in audit.out


def test_one_run_file_gives_the_same_parameters_under_torchrun_as_on_this_machine(tmp_path):
    (tmp_path / "here").mkdir()
    for folder in (tmp_path, tmp_path / "here"):
        (folder / "run.toml").write_text(RUN_FILE)
    here = command("train", "run.toml", cwd=tmp_path / "here")
    assert here.code == 0, here.err
    address = f"127.0.0.1:{free_port()}"
    with started("train", "run.toml", "--engine", f"attach://{address}", cwd=tmp_path) as driver:
        torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", sys.executable)
        with started("-m", "syncline.cli.main", "worker", "--join", address, cwd=tmp_path, python=torchrun) as there:
            said, code = driver.communicate(timeout=LIMIT_S)[0], there.wait(LIMIT_S)
    assert driver.returncode == 0, said
    assert f"syncline worker --join {address}" in said, "what to type is shown"
    assert SECRET["SYNCLINE_SECRET"] not in said, "a secret that both ends know is not"
    assert code == 0, there.stdout
    a, b = (final_state(folder / "runs" / "run")["model"] for folder in (tmp_path, tmp_path / "here"))
    assert relative_difference(a, b) < 1e-5


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_when_an_agent_is_killed_or_stopped_the_run_continues_on_one_that_stands_by(tmp_path, number):
    (tmp_path / "task.py").write_text(TASK)
    address = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        driver = stack.enter_context(
            started("train", "task.py:task", "--workers", "2", "--batch", "10", "--epochs", "12", "--name", "run",
                    "--engine", f"attach://{address}", cwd=tmp_path)
        )  # fmt: skip
        agents = [stack.enter_context(started("worker", "--join", address, cwd=tmp_path)) for _ in range(3)]
        until(lambda: list(tmp_path.glob("runs/run/logs/worker-*.log")))
        keepers = until(lambda: [p for p in agents if _workers_of(pid_of(p))] if len(_all_workers(agents)) == 2 else [])
        until(lambda: events(tmp_path, Progress))
        keepers[0].send_signal(number)
        since = time.time()
        assert driver.wait(LIMIT_S) == 0, driver.stdout.read()
        lost, back = events(tmp_path, WorkerFailure), events(tmp_path, Recovered)
        assert "node agent" in lost[0].cause
        assert lost[0].time - since < 3.0
        assert keepers[0].wait(5) == -signal.SIGKILL, "a stopped one was killed, and its workers with it"
        # Without it at first, unless the one in its place was there before the other worker had noticed.
        assert [len(e.members) for e in back] in ([1, 2], [2])
        assert is_clean(tmp_path)


def _workers_of(pid: int) -> list[int]:
    """The workers of the agent in this process: the children of its zygote."""
    return [w for zygote in _children(pid) for w in _children(zygote)]


def _all_workers(agents: list) -> list[int]:
    return [w for p in agents for w in _workers_of(pid_of(p))]


def _children(pid: int) -> list[int]:
    try:
        lists = [tasks.read_text() for tasks in Path("/proc", str(pid), "task").glob("*/children")]
    except OSError:
        return []
    return [int(child) for text in lists for child in text.split()]


def test_when_the_driver_is_killed_the_agents_save_and_leave_and_the_run_can_be_resumed(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    address = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        driver = stack.enter_context(
            started("train", "task.py:task", "--workers", "2", "--batch", "10", "--epochs", "60", "--name", "run",
                    "--engine", f"attach://{address}", cwd=tmp_path)
        )  # fmt: skip
        agents = [stack.enter_context(started("worker", "--join", address, cwd=tmp_path)) for _ in range(2)]
        until(lambda: len(_all_workers(agents)) == 2 and events(tmp_path, Progress))
        driver.send_signal(signal.SIGKILL)
        for each in agents:
            assert each.wait(15) == 1
            assert "the driver is gone" in each.stdout.read()
    saved = final_state(tmp_path / "runs" / "run")["position"]["step"]
    assert 0 < saved < 60 * 21
    resumed = command("resume", "runs/run", "--epochs", str(saved // 21 + 2), "--engine", "local", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert is_clean(tmp_path)


@pytest.fixture
def engine() -> Iterator[RemoteEngine]:
    engine = RemoteEngine("127.0.0.1", limit_s=1.0)
    yield engine
    engine.close()


def test_without_the_secret_an_agent_is_not_accepted(engine):
    wrong = Invitation(address=engine.invitation.address, secret="something else")
    with pytest.raises(SynclineError, match="SYNCLINE_SECRET") as caught:
        run_node_agent(wrong, patience_s=1.0)
    assert caught.value.facts == {"address": engine.invitation.address}
    with pytest.raises(SynclineError, match="Only 0 of 1 ") as caught:
        engine.reserve(1, lambda _: None)
    assert (caught.value.code, caught.value.facts) == ("no-nodes", {"workers": 1, "nodes": 0})


def test_an_agent_with_other_versions_is_rejected_and_both_ends_say_which(engine, monkeypatch):
    real = node_info.node_info_here

    def with_old_torch(*arguments):
        here = real(*arguments)
        return msgspec.structs.replace(here, versions={**here.versions, "torch": "2.0.1"})

    monkeypatch.setattr("syncline.engines.remote.agent.node_info_here", with_old_torch)
    with pytest.raises(SynclineError, match=r"torch 2\.13\.0.*2\.0\.1.*same versions"):
        run_node_agent(engine.invitation, patience_s=20.0)
    reported: list[str] = []
    with pytest.raises(SynclineError, match=r"Rejected: .*2\.0\.1"):
        engine.reserve(1, reported.append)
    assert any("2.0.1" in line for line in reported)


def test_random_connections_to_the_liveness_port_change_nothing(engine):
    left: list[str] = []
    thread = threading.Thread(target=lambda: left.append(run_node_agent(engine.invitation)), daemon=True)
    thread.start()
    address = engine._pool._server._liveness.getsockname()
    with ExitStack() as strangers:
        for number in range(50):
            stranger = strangers.enter_context(socket.create_connection(address, timeout=5))
            stranger.sendall(os.urandom(number))
        engine._limit_s = LIMIT_S
        engine.reserve(1, lambda _: None)
    assert len(engine.network.hosts) == 1
    engine.close()
    thread.join(20)
    assert left == ["the run is over"]


def test_silent_connections_to_the_liveness_port_are_closed(engine, monkeypatch):
    monkeypatch.setattr(agent_server, "_UNNAMED_S", 0.0)
    monkeypatch.setattr(agent_server, "_MOST_UNNAMED", 3)
    server = engine._pool._server
    with ExitStack() as stack:
        address = server._liveness.getsockname()
        silent = [stack.enter_context(socket.create_connection(address, timeout=10)) for _ in range(8)]
        assert [each.recv(1) for each in silent] == [b""] * 8
    assert not server._unnamed


@pytest.mark.parametrize(("strategy", "code"), [("allreduce", 0), ("hogwild", 1)])
def test_on_two_hosts_that_share_no_memory_it_runs_through_the_network_or_is_refused(tmp_path, strategy, code):
    if (why := why_not_possible()) is not None:
        pytest.skip(why)
    (tmp_path / "run.toml").write_text(RUN_FILE)
    with Namespaces(2) as hosts, ExitStack() as stack:
        address = f"{hosts.network.driver}:{free_port(hosts.network.driver)}"
        arguments = ("train", "run.toml", "--engine", f"attach://{address}", "--strategy", strategy)
        driver = stack.enter_context(started(*arguments, cwd=tmp_path))
        for number in range(2):
            there = started("worker", "--join", address, cwd=tmp_path, python=COMMAND)
            hosts.inside(number, there.__enter__)  # what it starts is in that namespace
            stack.push(there.__exit__)
        said = driver.communicate(timeout=LIMIT_S)[0]
    assert driver.returncode == code, said
    if code:
        assert "--strategy h2o" in said
    else:
        plan = RunDir(tmp_path / "runs" / "run").read_plan()
        assert plan["collective"] == "process-group"
        assert len({worker["host"] for worker in plan["workers"]}) == 2
        assert is_clean(tmp_path)


@pytest.mark.parametrize("strategy", ["allreduce", "server-async"])
def test_hosts_without_the_drivers_file_system_receive_the_task_and_send_back_their_files(tmp_path, strategy):
    if (why := why_not_possible()) is not None:
        pytest.skip(why)
    (tmp_path / "task.py").write_text(TASK.replace("return self.net(x)", "print('of the user'); return self.net(x)"))
    address = f"127.0.0.1:{free_port()}"
    blind = tmp_path / "blind.sh"  # its own view of the file system: nothing of what the driver writes is there
    blind.write_text(f'mount -t tmpfs none {tmp_path}/runs && cd / && exec "$@"\n')
    (tmp_path / "runs").mkdir()
    unshare = ("-c", "import os, sys; os.execvp('unshare', sys.argv[1:])", "unshare", "--mount", "sh", str(blind))
    with ExitStack() as stack:
        driver = stack.enter_context(
            started("train", "task.py:task", "--workers", "2", "--batch", "10", "--epochs", "12", "--name", "run",
                    "--checkpoint-every-steps", "40", "--keep-checkpoints", "2", "--strategy", strategy,
                    "--engine", f"attach://{address}", cwd=tmp_path)
        )  # fmt: skip
        arguments = (sys.executable, "-m", "syncline.cli.main", "worker", "--join", address)
        agents = [stack.enter_context(started(*arguments, cwd=tmp_path, python=unshare)) for _ in range(3)]
        until(lambda: list(tmp_path.glob("runs/run/checkpoints/step-*.json")), LIMIT_S)
        keepers = [p for p in agents if _workers_of(pid_of(p))]
        keepers[0].send_signal(signal.SIGKILL)
        assert driver.wait(LIMIT_S) == 0, driver.stdout.read()
        for each in agents:
            assert each is keepers[0] or each.wait(20) == 0
    assert final_state(tmp_path / "runs" / "run")["position"]["step"] >= 12 * 21
    assert len(list(tmp_path.glob("runs/run/checkpoints/step-*.pt"))) <= 4, "old checkpoints are deleted there, too"
    assert "of the user" in (tmp_path / "runs" / "run" / "logs" / "worker-0.log").read_text()
    assert events(tmp_path, WorkerFailure)
    assert is_clean(tmp_path)
