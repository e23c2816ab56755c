"""Workers inside the executors of a Spark application.

Here: `SparkEngine`. Its outposts are long-running tasks of one Spark job without barriers, so that Spark retries the
one that died and leaves the others alone; the retry comes back to the same seat. Not here: what an outpost does
(`outposts/outpost.py`), Java (`java.py`), and training on a DataFrame (`syncline/spark/`).

A barrier job would start all tasks at once, which is what a run wants, but it also ends all of them with the first that
dies. So the tasks find each other through the driver instead, and whoever is missing is waited for in `gather`.
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
from syncline.engines.outposts.engine import OutpostEngine
from syncline.engines.outposts.messages import Invitation
from syncline.errors import ConfigError, SynclineError

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

__all__ = ["SparkEngine", "essence", "needs_pyspark"]

_MOST_FAILURES = 1000
"""How often one task may die before Spark ends the job, where this engine makes the session. Spark's default is 4."""
_FAREWELL_S = 10.0
_PAUSE_S = 1.0
_NAMES = "spark, spark://HOST:PORT or spark-local[N]"


def needs_pyspark() -> None:
    """`ConfigError` if PySpark is not installed."""
    try:
        import pyspark  # noqa: F401
    except ImportError:
        raise ConfigError("PySpark is not installed: pip install 'syncline[spark]'") from None


class SparkEngine(OutpostEngine):
    """An `Engine` in the executors of `session`, or of the one that `name` asks for.

    'spark' is the session that this process has already, else one with the user's usual configuration;
    'spark://HOST:PORT' is a standalone cluster, and 'spark-local[N]' is N threads of this process's own Spark.
    """

    def __init__(self, name: str = "spark", *, session: SparkSession | None = None, limit_s: float = 300.0) -> None:
        """Slots for all workers must be free within `limit_s`."""
        needs_pyspark()
        self._owned: SparkSession | None = None
        if session is None:
            session, is_new = _session_for(name)
            self._owned = session if is_new else None
        self._context = _context_of(session)
        self._group = f"syncline-{secrets.token_hex(8)}"
        self._thread_of_job: threading.Thread | None = None
        self._problem: str | None = None
        self._is_dismissed = threading.Event()
        try:
            super().__init__(_address_of(self._context), limit_s=limit_s)
        except BaseException:
            self._stop_own_session()
            raise

    def _summon(self, count: int) -> None:
        from pyspark import InheritableThread

        slots = _local_slots(self._context.master or "")
        if slots is not None and slots < count:
            raise ConfigError(
                f"Spark runs here as {self._context.master}, which has {slots} task slots, and there are {count} "
                f"workers, each of which needs one for itself. Use local[{count}] or more, or fewer --workers."
            )
        # It inherits what the caller has set for its jobs, such as the scheduler's pool.
        self._thread_of_job = InheritableThread(
            functools.partial(self._keep_job, count), name="syncline-spark", daemon=True
        )
        self._thread_of_job.start()

    def _trouble(self) -> str | None:
        if self._problem is not None:
            return f"Spark could not run the tasks that keep places for workers: {self._problem}"
        # A cluster is alike throughout: who is refused once is refused again.
        return self._refusals[-1] if self._refusals else None

    def _told_waiting(self, have: int, want: int) -> str:
        return f"Waiting until Spark has free task slots for {want - have} of {want} workers."

    def _dismiss(self) -> None:
        self._is_dismissed.set()
        if self._thread_of_job is not None:
            # Outposts that were told to leave have left, so the job is over in a moment; others are ended.
            with contextlib.suppress(Exception):  # the session may have been stopped under us
                if self._network is None:
                    self._context.cancelJobGroup(self._group)
                self._thread_of_job.join(_FAREWELL_S)
                if self._thread_of_job.is_alive():
                    self._context.cancelJobGroup(self._group)
            self._thread_of_job.join(_FAREWELL_S)
        self._stop_own_session()

    def _stop_own_session(self) -> None:
        if self._owned is not None:
            self._owned.stop()
            self._owned = None

    def _keep_job(self, count: int) -> None:
        """Have a job with one task for each place, and another one should Spark give it up."""
        while not self._is_dismissed.is_set():
            try:
                self._context.setJobGroup(self._group, "Syncline: places for workers", interruptOnCancel=True)
                places = self._context.parallelize(range(count), count)
                places.mapPartitionsWithIndex(functools.partial(_keep_place, self.invitation)).collect()
            except Exception as error:  # whatever Spark's Java side says
                if self._network is None:
                    self._problem = essence(error)
                    return
            self._is_dismissed.wait(_PAUSE_S)


def _keep_place(invitation: Invitation, seat: int, _: Iterable[int]) -> Iterator[str]:
    """The task. It runs in an executor's Python process."""
    from syncline.engines.outposts.outpost import keep_outpost

    yield keep_outpost(invitation, seat=seat)


def _session_for(name: str) -> tuple[SparkSession, bool]:
    """The session that `name` asks for, and whether it was made for that."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    master = _master_of(name)
    running: SparkContext | None = SparkContext._active_spark_context
    if running is not None:
        if master is not None and running.master != master:
            raise ConfigError(
                f"This process has a Spark session already, with {running.master}, and can have only one. "
                f"Use the engine 'spark' instead of {name!r}, or stop that session first."
            )
        return SparkSession.builder.getOrCreate(), False
    builder = SparkSession.builder.appName("syncline")
    if master is not None:
        builder = builder.master(master)
    builder = builder.config("spark.task.maxFailures", _MOST_FAILURES)
    builder = builder.config("spark.ui.showConsoleProgress", "false")  # it would draw into the view of the run
    with _java_and_python(), _own_ctrl_c():
        try:
            return builder.getOrCreate(), True
        except Exception as error:  # whatever Spark's Java side says
            where = master or "its usual settings"
            raise SynclineError(f"Spark could not be started with {where}: {essence(error)}") from error


def _master_of(name: str) -> str | None:
    """What Spark calls the place that `name` means; None if that is for Spark's own settings to say.

    >>> _master_of("spark"), _master_of("spark://10.0.0.5:7077"), _master_of("spark-local[4]")
    (None, 'spark://10.0.0.5:7077', 'local[4,1000]')
    """
    if name == "spark":
        return None
    if re.fullmatch(r"spark://\S+:\d+", name):
        return name
    if found := re.fullmatch(r"spark-local\[(\d+|\*)\]", name):
        return f"local[{found[1]},{_MOST_FAILURES}]"  # without the second number, a task that dies is not retried
    raise ConfigError(f"{name!r} is no Spark engine: write {_NAMES}.")


@contextlib.contextmanager
def _java_and_python() -> Iterator[None]:
    """Spark finds a Java that suits it, and runs the Python that runs this."""
    wanted = {"PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable)}
    problem = java_problem()
    if problem is not None:
        home = borrowed_java_home()
        if home is None:
            raise ConfigError(problem)
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
    """PySpark answers Ctrl-C by ending all jobs; a run wants to save its work first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _context_of(session: Any) -> SparkContext:
    try:
        context: SparkContext = session.sparkContext
    except Exception:  # what Spark Connect raises has changed between versions
        raise ConfigError(
            "This Spark session is one of Spark Connect, which cannot run tasks of a program's own. Use a session "
            "with a master instead: SparkSession.builder.master(...), or spark-submit."
        ) from None
    return context


def _address_of(context: SparkContext) -> str:
    """Where executors reach this process."""
    host = context.getConf().get("spark.driver.host") or socket.gethostname()
    host = host.strip("[]")
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"spark.driver.host is {host!r}, which this machine cannot look up ({error.strerror}). Set it to an "
            "address of this machine that the executors can reach."
        ) from None
    return str(found[0][4][0])


def _local_slots(master: str) -> int | None:
    """How many tasks run at once where Spark is part of this process; None if it is not.

    >>> _local_slots("local[4,1000]"), _local_slots("local"), _local_slots("yarn"), _local_slots("local-cluster[2,1,1]")
    (4, 1, None, None)
    """
    found = re.fullmatch(r"local(?:\[(\d+|\*)(?:, *\d+)?\])?", master)
    if found is None:
        return None
    return (os.cpu_count() or 1) if found[1] == "*" else int(found[1] or 1)


def essence(error: Exception) -> str:
    """The part of Spark's many lines that says what happened.

    >>> essence(Exception("Job aborted.\\n  File x\\nsyncline.errors.DataError: No rows.\\n at org.apache.spark.Java"))
    'No rows.'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception): ", line)]
    # Within a Python traceback the last line says it; what follows is Java's.
    chosen = next((line for line in errors if "org.apache.spark" not in line), None)
    said = (chosen or (errors or lines or [type(error).__name__])[-1])[:500].removeprefix("syncline.errors.DataError: ")
    if said.startswith("ModuleNotFoundError: "):
        # The classic trap: without this variable Spark takes whichever python3 comes first on its PATH.
        said += (
            ". Spark's Python is not this program's: before the session is made, set PYSPARK_PYTHON to one that has "
            f"the package, such as {sys.executable}"
        )
    return said
