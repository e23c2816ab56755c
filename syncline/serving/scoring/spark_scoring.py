"""Scoring in the executors of a Spark application: one job, with one task per piece.

Here: `SparkScoring` and its task. Spark gives out the tasks, and repeats one whose process died. Not here: the session
(`engines/spark.py`), and scoring a piece (`piece_scorer.py`). Rows do not pass through the driver.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pyspark import AccumulatorParam, InheritableThread, TaskContext

from syncline.engines.spark import context_of, essence, session_for
from syncline.errors import SynclineError
from syncline.serving.scoring.engines import MOST_DEATHS, OnDone, check_shared, died
from syncline.serving.scoring.piece_scorer import PieceScorer, Setup
from syncline.serving.scoring.pieces import ScoringPiece
from syncline.serving.scoring.places import place_for

if TYPE_CHECKING:
    from pyspark import Accumulator, Broadcast

_LOOK_EVERY_S = 0.2
_END_S = 10.0

_Report = tuple[ScoringPiece, Exception | None]


class SparkScoring:
    """A `ScoringEngine` on Spark."""

    is_remote = True

    def __init__(self, name: str, workers: int | None) -> None:
        """`workers` is the number of pieces that are scored at once, as far as Spark has slots for them."""
        session, is_new = session_for(name)
        self._owned = session if is_new else None
        try:
            self._context = context_of(session)
            self.slots = workers or max(1, int(self._context.defaultParallelism))
            self.threads = max(1, int(self._context.getConf().get("spark.task.cpus") or 1))
        except BaseException:
            self.close()
            raise

    def score_all(self, setup: Setup, pieces: Sequence[ScoringPiece], on_done: OnDone) -> None:
        place, reports = place_for(setup.out), self._context.accumulator([], _Reports())
        job = _SparkJob(self._context, setup, pieces, reports, self.slots)
        taken = 0
        try:
            is_over = False
            while not is_over:
                is_over = job.wait(_LOOK_EVERY_S)
                news = reports.value[taken:]
                taken += len(news)
                for piece, error in news:
                    if error is not None:
                        raise error
                    check_shared(place, piece)
                    on_done(piece)
        finally:
            job.end()
        if taken < len(pieces):
            raise SynclineError(
                f"Spark could not score all pieces: {job.problem or 'its job ended early'}. What is scored is kept: "
                "the same command continues.",
                code="spark-job", reason=job.problem, left=len(pieces) - taken,
            )  # fmt: skip

    def close(self) -> None:
        if self._owned is not None:
            self._owned.stop()
            self._owned = None


class _SparkJob:
    """The job, which runs in a thread of its own, since Spark's call returns at its end."""

    def __init__(
        self, context: Any, setup: Setup, pieces: Sequence[ScoringPiece], reports: Accumulator[Any], slots: int
    ) -> None:
        self.problem: str | None = None
        self._context, self._group = context, f"syncline-{secrets.token_hex(8)}"
        self._setup = context.broadcast(setup)  # once per executor
        task = functools.partial(_score, self._group, self._setup, reports)
        # Spark runs as many tasks at once as it has slots for. With fewer workers, each task has several pieces.
        parts = len(pieces) if slots >= int(context.defaultParallelism) else min(slots, len(pieces))
        self._thread = InheritableThread(functools.partial(self._run, pieces, parts, task), name="syncline-spark")
        self._thread.start()

    def wait(self, limit_s: float) -> bool:
        """Whether it has ended."""
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def end(self) -> None:
        if self._thread.is_alive():
            self._context.cancelJobGroup(self._group)
            self._thread.join(_END_S)
        self._setup.unpersist()

    def _run(self, pieces: Sequence[ScoringPiece], parts: int, task: Any) -> None:
        try:
            self._context.setJobGroup(self._group, "Syncline scoring", interruptOnCancel=True)
            self._context.parallelize(pieces, parts).foreachPartition(task)
        except Exception as error:  # Spark's Java side raises many types
            self.problem = essence(error)


class _Reports(AccumulatorParam[Any]):
    """A list to which tasks add; Spark delivers what a task has added once, when it has ended well."""

    def zero(self, value: Any) -> list[_Report]:  # noqa: ARG002  # Spark passes it
        return []

    def addInPlace(self, value1: list[_Report], value2: list[_Report]) -> list[_Report]:
        return value1 + value2


def _score(job: str, setup: Broadcast[Setup], reports: Accumulator[Any], pieces: Iterable[ScoringPiece]) -> None:
    """The task, in an executor's Python process. It reports errors, since Spark would repeat a task that failed."""
    context = TaskContext.get()
    for piece in pieces:
        try:
            if context is not None and context.attemptNumber() >= MOST_DEATHS:
                raise died(piece, "see the logs of the executors")
            _scorer(job, setup).score(piece)
            reports.add([(piece, None)])
        except Exception as error:
            reports.add([(piece, error)])
            return


_scorers: dict[str, PieceScorer] = {}


def _scorer(job: str, setup: Broadcast[Setup]) -> PieceScorer:
    """The scorer of this process, loaded once for all tasks of a job."""
    if job not in _scorers:
        _scorers.clear()
        _scorers[job] = PieceScorer(setup.value)
    return _scorers[job]
