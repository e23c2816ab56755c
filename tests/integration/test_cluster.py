"""`syncline cluster`: emulated hosts, slow and cut links, and runs on them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from real_runs import environment, final_state, relative_difference
from real_runs import syncline as command

from syncline.lab.namespaces import Namespaces, why_not_possible
from syncline.telemetry.events import Recovered, WorkerFailure
from syncline.telemetry.run_dir import RunDir

pytestmark = pytest.mark.xdist_group("network")  # one process, because these tests share the kernel's network

DELAY_S = 0.02


@pytest.fixture(scope="module", autouse=True)
def _only_where_it_is_possible() -> None:
    if (why := why_not_possible()) is not None:
        pytest.skip(why)


@pytest.fixture(autouse=True)
def _own_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run-time").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run-time"))


@contextmanager
def cluster(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A running cluster; the test takes it down, or its end does."""
    process = subprocess.Popen(
        [sys.executable, "-m", "syncline.cli.main", "cluster", "up", *arguments],
        cwd=folder, env=environment({"PYTHONUNBUFFERED": "1"}), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert "hosts" in process.stdout.readline()
        assert "--engine cluster" in process.stdout.readline()
        assert "Ctrl-C" in process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_run_on_slow_links_survives_a_cut_link_and_the_cluster_leaves_no_files(tmp_path):
    with cluster(tmp_path, "--hosts", "3", "--rate", "1gbit", "--delay", "1ms") as up:
        status = command("cluster", "status", cwd=tmp_path)
        assert status.out.startswith("3 hosts, 1gbit, 1ms; all links are up"), status.err
        ran = command(
            "train", "mlp", "--data", "digits", "--workers", "3", "--epochs", "6", "--engine", "cluster",
            "--name", "run", cwd=tmp_path, env={"SYNCLINE_FAULTS": "cut worker 1 at step 20 for 6s"},
        )  # fmt: skip
        assert ran.code == 0, ran.err
        run_dir = RunDir(tmp_path / "runs" / "run")
        assert len({worker["host"] for worker in run_dir.read_plan()["workers"]}) == 3
        lost = [e for e in run_dir.read_events() if isinstance(e, WorkerFailure)]
        assert [e.worker_id for e in lost] == [1]
        assert "network" in lost[0].cause
        assert any(isinstance(e, Recovered) for e in run_dir.read_events())
        audit = command("audit", "runs/run", cwd=tmp_path)
        assert audit.code == 0, audit.out
        assert command("cluster", "heal", "1", cwd=tmp_path).code == 0  # the run may have been quicker than its fault
        assert "cut off" not in command("cluster", "cut", "7", cwd=tmp_path).out
        assert command("cluster", "cut", "2", cwd=tmp_path).code == 0
        assert "cut off: 2" in command("cluster", "status", cwd=tmp_path).out
        assert command("cluster", "heal", "2", cwd=tmp_path).code == 0
        assert "all links are up" in command("cluster", "status", cwd=tmp_path).out
        assert command("cluster", "down", cwd=tmp_path).code == 0
        assert up.wait(20) == 0
    assert not [p for p in (tmp_path / "run-time").rglob("*") if not p.is_dir()]
    gone = command("train", "mlp", "--data", "digits", "--engine", "cluster", cwd=tmp_path)
    assert gone.code == 1
    assert "'default'" in gone.err
    assert "syncline cluster up" in gone.err


SPREAD = (
    "train", "mlp", "--data", "digits", "--workers", "4", "--max-steps", "12", "--layout", "pipeline(2)",
    "--strategy", "sparknet(tau=5)", "--on-worker-failure", "replace-only",
)  # fmt: skip


def test_replicas_that_are_spread_over_the_workers_of_a_host_exchange_across_hosts(tmp_path):
    with cluster(tmp_path, "--hosts", "2"):
        on_hosts = command(*SPREAD, "--engine", "cluster", "--name", "hosts", cwd=tmp_path)
        assert on_hosts.code == 0, on_hosts.err
    here = command(*SPREAD, "--name", "here", cwd=tmp_path)
    assert here.code == 0, here.err
    first, second, third, fourth = RunDir(tmp_path / "runs" / "hosts").read_plan()["workers"]
    assert first["host"] == second["host"] != third["host"] == fourth["host"]
    states = [final_state(tmp_path / "runs" / name)["model"] for name in ("here", "hosts")]
    assert relative_difference(*states) < 1e-5


def test_a_worker_of_a_replica_on_another_host_is_replaced(tmp_path):
    with cluster(tmp_path, "--hosts", "2"):
        faults = {"SYNCLINE_FAULTS": "kill worker 3 at step 7"}
        killed = command(*SPREAD, "--engine", "cluster", "--name", "killed", cwd=tmp_path, env=faults)
        assert killed.code == 0, killed.err
    events = RunDir(tmp_path / "runs" / "killed").read_events()
    assert [e.worker_id for e in events if isinstance(e, WorkerFailure)] == [3]
    assert command("audit", "runs/killed", cwd=tmp_path).code == 0


def test_ctrl_c_takes_it_down_and_a_second_of_the_same_name_is_rejected(tmp_path):
    with cluster(tmp_path, "--hosts", "1") as up:
        second = command("cluster", "up", "--hosts", "1", cwd=tmp_path)
        assert second.code == 1
        assert "'default'" in second.err
        assert "syncline cluster down" in second.err
        up.send_signal(signal.SIGINT)
        assert up.wait(20) == 0
        assert "shut down" in up.stdout.read()


def test_a_killed_cluster_does_not_prevent_the_next(tmp_path):
    with cluster(tmp_path, "--hosts", "1") as up:
        up.kill()
        up.wait()
        assert command("cluster", "status", cwd=tmp_path).code == 1
    with cluster(tmp_path, "--hosts", "1"):
        assert command("cluster", "status", cwd=tmp_path).code == 0


def test_links_have_the_given_delay_and_rate():
    with Namespaces(2, rate="80mbit", delay_s=DELAY_S) as hosts:
        address = hosts.network.hosts[0].address
        listener = hosts.inside(0, lambda: socket.create_server((address, 0)))
        size = 2_000_000

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(connection.recv(1))
                got = 0
                while got < size:
                    got += len(connection.recv(1 << 20))
                connection.sendall(b"!")

        thread = threading.Thread(target=answer, name="echo", daemon=True)
        thread.start()
        with hosts.inside(1, lambda: socket.create_connection(listener.getsockname(), timeout=20)) as connection:
            began = time.monotonic()
            connection.sendall(b"?")
            connection.recv(1)
            assert time.monotonic() - began >= 2 * DELAY_S
            began = time.monotonic()
            connection.sendall(bytes(size))
            assert connection.recv(1) == b"!"
            assert time.monotonic() - began >= size / 1e7, "80 Mbit are 10 MB a second"
        thread.join(20)
        listener.close()


def test_the_switch_process_ends_with_its_owner(tmp_path):
    code = (
        "import os, signal, json\n"
        "from syncline.lab.namespaces import Namespaces\n"
        "hosts = Namespaces(1, delay_s=0.001)\n"
        "print(json.dumps([hosts._slow[0][1].pid]), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == -signal.SIGKILL, done.stderr
    (switch,) = json.loads(done.stdout)
    deadline = time.monotonic() + 10
    while _is_running(switch):
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z" and os.path.exists(f"/proc/{pid}")
    except OSError:
        return False
