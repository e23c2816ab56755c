"""Workers in the executors of a Spark application.

Here: `SparkEngine`. Its node agents are long-running tasks of one Spark job without barriers, so that Spark retries a
task that died and leaves the others alone; the retry gets the same slot. Not here: what an agent does
(`remote/agent.py`), Java (`java.py`), and training on a DataFrame (`syncline/spark/`).

A barrier job would start all tasks at once, as a run needs, but it also ends all of them when one dies. So the tasks
connect to the driver instead, and `reserve` waits until all have.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from syncline.engines.java import borrowed_java_home, java_problem
from syncline.engines.remote.engine import RemoteEngine
from syncline.engines.remote.messages import Invitation
from syncline.errors import ConfigError, SynclineError, plural

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

_MOST_FAILURES = 1000
"""How often a task may die before Spark fails the job, if this engine creates the session. Spark's default is 4."""
_SHUTDOWN_S = 10.0
_PAUSE_S = 1.0
_NAMES = "spark, spark://HOST:PORT or spark-local[N]"


def needs_pyspark() -> None:
    """`ConfigError` if PySpark is not installed."""
    try:
        import pyspark  # noqa: F401
    except ImportError:
        raise ConfigError("PySpark is not installed: pip install 'syncline[spark]'", code="not-installed") from None


class SparkEngine(RemoteEngine):
    """An `Engine` in the executors of `session`, or of the session for `name`.

    'spark' is the active session of this process, else a new one with the user's configuration;
    'spark://HOST:PORT' is a standalone cluster, and 'spark-local[N]' is N threads of this process's own Spark.
    """

    def __init__(self, name: str = "spark", *, session: SparkSession | None = None, limit_s: float = 300.0) -> None:
        """Slots for all workers must be free within `limit_s`."""
        needs_pyspark()
        self._owned: SparkSession | None = None
        if session is None:
            session, is_new = session_for(name)
            self._owned = session if is_new else None
        self._context = context_of(session)
        self._group = f"syncline-{secrets.token_hex(8)}"
        self._thread_of_job: threading.Thread | None = None
        self._problem: str | None = None
        self._is_stopping = threading.Event()
        try:
            super().__init__(_address_of(self._context), limit_s=limit_s)
        except BaseException:
            self._stop_own_session()
            raise

    def _start_agents(self, count: int) -> None:
        from pyspark import InheritableThread

        slots = local_slots(self._context.master or "")
        if slots is not None and slots < count:
            raise ConfigError(
                f"Spark runs as {self._context.master} with {plural(slots, 'task slot')}, but {count} workers need one "
                f"each. Use local[{count}] or more, or fewer --workers.",
                code="too-few-slots",
                slots=slots,
                workers=count,
            )
        # It inherits the caller's job settings, such as the scheduler pool.
        self._thread_of_job = InheritableThread(
            functools.partial(self._run_job, count), name="syncline-spark", daemon=True
        )
        self._thread_of_job.start()

    def _startup_problem(self) -> str | None:
        if self._problem is not None:
            return f"Spark could not run the tasks for the workers: {self._problem}"
        # All nodes of a cluster are set up alike: a retry would be rejected as well.
        return self._pool.rejections[-1] if self._pool.rejections else None

    def _waiting_message(self, have: int, want: int) -> str:
        return f"Waiting for free Spark task slots for {want - have} of {want} workers."

    def _stop_agents(self) -> None:
        self._is_stopping.set()
        if self._thread_of_job is not None:
            # The agents have shut down, so the job ends in a moment; tasks that never connected are cancelled.
            with contextlib.suppress(Exception):  # the user may have stopped the session
                if self._network is None:
                    self._context.cancelJobGroup(self._group)
                self._thread_of_job.join(_SHUTDOWN_S)
                if self._thread_of_job.is_alive():
                    self._context.cancelJobGroup(self._group)
            self._thread_of_job.join(_SHUTDOWN_S)
        self._stop_own_session()

    def _stop_own_session(self) -> None:
        if self._owned is not None:
            self._owned.stop()
            self._owned = None

    def _run_job(self, count: int) -> None:
        """Run a job with one task per slot, and another one if Spark fails it."""
        while not self._is_stopping.is_set():
            try:
                self._context.setJobGroup(self._group, "Syncline workers", interruptOnCancel=True)
                slots = self._context.parallelize(range(count), count)
                slots.mapPartitionsWithIndex(functools.partial(_run_agent, self.invitation)).collect()
            except Exception as error:  # Spark's Java side raises many types
                if self._network is None:
                    self._problem = essence(error)
                    return
            self._is_stopping.wait(_PAUSE_S)


def _run_agent(invitation: Invitation, slot: int, _: Iterable[int]) -> Iterator[str]:
    """The task. It runs in an executor's Python process."""
    from syncline.engines.remote.agent import run_node_agent

    yield run_node_agent(invitation, slot=slot)


def session_for(name: str) -> tuple[SparkSession, bool]:
    """The session for `name`, and whether it is new."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    master = _master_of(name)
    running: SparkContext | None = SparkContext._active_spark_context
    if running is not None:
        if master is not None and running.master != master:
            raise ConfigError(
                f"This process already has a Spark session, with {running.master}, and can have only one. "
                f"Use the engine 'spark' instead of {name!r}, or stop that session first.",
                code="other-session",
                setting="engine",
                value=name,
                master=running.master,
            )
        return SparkSession.builder.getOrCreate(), False
    builder = SparkSession.builder.appName("syncline")
    if master is not None:
        builder = builder.master(master)
    builder = builder.config("spark.task.maxFailures", _MOST_FAILURES)
    builder = builder.config(
        "spark.ui.showConsoleProgress", "false"
    )  # its progress bar would garble the output of the run
    with _java_and_python(), _own_ctrl_c():
        try:
            return builder.getOrCreate(), True
        except Exception as error:  # Spark's Java side raises many types
            where = master or "its default configuration"
            raise SynclineError(f"Cannot start Spark with {where}: {essence(error)}", code="no-spark") from error


def _master_of(name: str) -> str | None:
    """Spark's master for `name`; None if Spark's own configuration decides.

    >>> _master_of("spark"), _master_of("spark://10.0.0.5:7077"), _master_of("spark-local[4]")
    (None, 'spark://10.0.0.5:7077', 'local[4,1000]')
    """
    if name == "spark":
        return None
    if re.fullmatch(r"spark://\S+:\d+", name):
        return name
    if found := re.fullmatch(r"spark-local\[(\d+|\*)\]", name):
        return f"local[{found[1]},{_MOST_FAILURES}]"  # without the second number, a task that dies is not retried
    raise ConfigError(
        f"The engine {name!r} is not valid. Use {_NAMES}.", code="invalid-engine", setting="engine", value=name
    )


@contextlib.contextmanager
def _java_and_python() -> Iterator[None]:
    """Let Spark find a suitable Java, and run this Python in its executors."""
    wanted = {"PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable)}
    problem = java_problem()
    if problem is not None:
        home = borrowed_java_home()
        if home is None:
            raise ConfigError(problem, code="no-java")
        wanted["JAVA_HOME"] = str(home)
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _own_ctrl_c() -> Iterator[None]:
    """Restore the handler of Ctrl-C: PySpark's cancels all jobs, but a run saves its work first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def context_of(session: Any) -> SparkContext:
    try:
        context: SparkContext = session.sparkContext
    except Exception:  # what Spark Connect raises has changed between versions
        raise ConfigError(
            "This is a Spark Connect session, which cannot run a program's own tasks. Use a session with a master "
            "instead: SparkSession.builder.master(...), or spark-submit.",
            code="spark-connect",
        ) from None
    return context


def _address_of(context: SparkContext) -> str:
    """The address at which executors reach this process."""
    host = context.getConf().get("spark.driver.host") or socket.gethostname()
    host = host.strip("[]")
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"spark.driver.host is {host!r}, which this machine cannot resolve ({error.strerror}). Set it to an "
            "address of this machine that the executors can reach.",
            code="invalid-setting",
            setting="spark.driver.host",
            value=host,
        ) from None
    return str(found[0][4][0])


def local_slots(master: str) -> int | None:
    """How many tasks a local-mode Spark runs at once; None for a cluster.

    >>> local_slots("local[4,1000]"), local_slots("local"), local_slots("yarn"), local_slots("local-cluster[2,1,1]")
    (4, 1, None, None)
    """
    found = re.fullmatch(r"local(?:\[(\d+|\*)(?:, *\d+)?\])?", master)
    if found is None:
        return None
    return (os.cpu_count() or 1) if found[1] == "*" else int(found[1] or 1)


def essence(error: Exception) -> str:
    """The line of a Spark error that says what happened.

    >>> essence(Exception("Job aborted.\\n  File x\\nsyncline.errors.DataError: No rows.\\n at org.apache.spark.Java"))
    'No rows.'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception): ", line)]
    # The last line of a Python traceback; what follows is Java's.
    chosen = next((line for line in errors if "org.apache.spark" not in line), None)
    said = (chosen or (errors or lines or [type(error).__name__])[-1])[:500].removeprefix("syncline.errors.DataError: ")
    if said.startswith("ModuleNotFoundError: "):
        # A common mistake: without this variable Spark runs the first python3 on its PATH.
        said += (
            ". Spark's executors run another Python than this program: before you create the session, set "
            f"PYSPARK_PYTHON to one that has the package, such as {sys.executable}"
        )
    return said
