"""A real Spark standalone cluster for tests: a master and workers as processes of their own, on loopback only."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyspark

LIMIT_S = 90.0
ENVIRONMENT = {
    "SPARK_LOCAL_IP": "127.0.0.1",
    "PYSPARK_PYTHON": sys.executable,
    "SPARK_DAEMON_MEMORY": "256m",
    # Small machines: five Java processes side by side.
    "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
}
"""What makes a session small and quiet."""


def wait_until(is_so: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> float:
    """Wait until something is so, but not for ever; how long it took, in seconds."""
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < limit_s, f"{what} did not happen within {limit_s:g} s"
        threading.Event().wait(0.05)
    return time.monotonic() - began


@dataclass
class Cluster:
    """A running cluster."""

    url: str
    folder: Path
    processes: dict[int, int] = field(default_factory=dict)
    """The ids of the master's and the workers' processes, and a descriptor of each."""

    @contextlib.contextmanager
    def more_room(self, cores: int) -> Iterator[None]:
        """One worker more, for as long as it is wanted."""
        before = set(self.executors())
        pid = _start_worker(self, "worker-more", cores)
        try:
            yield
        finally:
            started = set(self.executors()) - before
            _end([self.processes.pop(pid)])
            # An executor notices later that its worker is gone; until then Spark gives tasks to it.
            wait_until(lambda: not any(_command(p) for p in started), "the end of the additional executors")

    def executors(self) -> list[int]:
        """The Java processes in which tasks run."""
        return [p for p in self._descendants() if "CoarseGrainedExecutorBackend" in _command(p)]

    def agents(self) -> list[int]:
        """The Python processes in which Spark runs node agents."""
        return [_parent(p) for p in self.zygotes()]

    def zygotes(self) -> list[int]:
        """Where the workers are forked from, without the workers."""
        ours = [p for p in self._descendants() if "syncline.engines.zygote" in _command(p)]
        return [p for p in ours if _parent(p) not in ours]

    def left(self) -> list[str]:
        """Python processes of the cluster that belong to a run."""
        return [_command(p) for p in self._descendants() if "syncline.engines.zygote" in _command(p)]

    def _descendants(self) -> list[int]:
        parents = {int(p): _parent(int(p)) for p in os.listdir("/proc") if p.isdigit()}
        found, frontier = set[int](), set(self.processes)
        while frontier:
            frontier = {pid for pid, parent in parents.items() if parent in frontier} - found
            found |= frontier
        return sorted(found)


@contextlib.contextmanager
def cluster(folder: Path, workers: int = 2, cores: int = 1) -> Iterator[Cluster]:
    """Start a cluster, and end it by the ids of its processes."""
    made = Cluster("", folder)
    try:
        master = _start(made, "master", "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", "0")
        pattern = re.compile(r"Starting Spark master at (spark://\S+)")
        wait_until(lambda: pattern.search(_read(master)) is not None, "the start of Spark's master")
        found = pattern.search(_read(master))
        assert found is not None
        made.url = found[1]
        for k in range(workers):
            _start_worker(made, f"worker-{k}", cores)
        wait_until(lambda: _read(master).count("Registering worker") >= workers, "the arrival of Spark's workers")
        yield made
    finally:
        _end(list(made.processes.values()))


def _start_worker(made: Cluster, name: str, cores: int) -> int:
    before = set(made.processes)
    _start(
        made, name, "org.apache.spark.deploy.worker.Worker", "--host", "127.0.0.1", "--cores", str(cores),
        "--memory", "1g", "--work-dir", str(made.folder / name), made.url,
    )  # fmt: skip
    (pid,) = set(made.processes) - before
    return pid


def _end(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
    for descriptor in descriptors:
        if not select.select([descriptor], [], [], 20)[0]:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.close(descriptor)


def _start(made: Cluster, name: str, *arguments: str) -> Path:
    log = made.folder / f"{name}.log"
    program = str(Path(pyspark.__path__[0], "bin", "spark-class"))
    # They are not children of this process: what a test leaves behind is looked for among those, and executors come
    # and go as Spark likes. The shell says the process's id, and is gone.
    with log.open("wb") as file:
        pid = int(
            subprocess.run(
                ["sh", "-c", '"$@" >&2 & echo $!', "sh", program, arguments[0], "--webui-port", "0", *arguments[1:]],
                env={**os.environ, **ENVIRONMENT, "SPARK_LOCAL_DIRS": str(made.folder / "local")},
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file, start_new_session=True, check=True,
            ).stdout
        )  # fmt: skip
    made.processes[pid] = os.pidfd_open(pid)
    return log


def _read(path: Path) -> str:
    return path.read_text(errors="replace")


def _command(pid: int) -> str:
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _parent(pid: int) -> int:
    try:
        return int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0
