"""`Batcher`: runs queued requests of one model version, together where that is allowed, without waiting for more.

While a batch runs, requests queue up; the next batch takes those that are there. A request alone runs at once. Short
runs happen on the event loop itself, because handing one to a thread costs more than LeNet takes; longer ones, and
those of many rows, on a thread, so that the loop stays responsive. Not here: whether batches are allowed (`tuning.py`),
whether a request is queued at all (`admission.py`), and versions (`registry.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from syncline.serving.server.admission import Admission
from syncline.serving.server.refusal import RequestRefused
from syncline.serving.server.tuning import Tuned

__all__ = ["Batcher", "InferenceJob", "take_batch"]

ON_LOOP_S = 0.002
"""Runs up to this long happen on the event loop."""
TURN_S = 0.0005
"""Short runs follow one another for this long before their responses are written. A run leaves the processor's caches
full of weights, so that what follows it is slow: better once for several responses than after each run."""

Outputs = dict[str, np.ndarray]
Done = Callable[[Outputs | BaseException], None]


@dataclass(slots=True)
class InferenceJob:
    """One request's tensors, and what to call with the outputs."""

    tensors: Mapping[str, np.ndarray]
    rows: int
    """The size of the batch dimension; 0 if it must run alone."""
    shapes: tuple[tuple[int, ...], ...]
    """The other dimensions of each input. Only requests with equal ones run together."""
    done: Done
    since_s: float
    size: int = 1
    """Its rows, also if it must run alone; 1 if the model has none."""


def take_batch(queue: deque[InferenceJob], max_rows: int) -> list[InferenceJob]:
    """Remove from the queue the jobs that run next: its first, and those right behind it that fit.

    Order is kept: a job is never overtaken, so none waits forever.
    """
    first = queue.popleft()
    taken, rows = [first], first.rows
    while queue and first.rows and queue[0].rows and queue[0].shapes == first.shapes:
        if rows + queue[0].rows > max_rows:
            break
        taken.append(queue.popleft())
        rows += taken[-1].rows
    return taken


class Batcher:
    """The queue in front of one engine."""

    def __init__(self, tuned: Tuned, loop: asyncio.AbstractEventLoop, thread: ThreadPoolExecutor) -> None:
        self._tuned, self._loop, self._thread = tuned, loop, thread
        self._queue: deque[InferenceJob] = deque()
        self._running: list[InferenceJob] = []
        """What a thread runs."""
        self._began_s = 0.0
        self._is_running = False
        self._names = tuned.engine.signature.output_names
        self._inputs = tuple(tuned.engine.signature.by_name)
        has_rows = tuned.engine.shares_batch_dimension and bool(self._inputs)
        self._sized_by = self._inputs[0] if has_rows else None
        """The input whose first dimension is the size of a request."""
        is_short = 0 < tuned.batch_s <= ON_LOOP_S
        self._most_rows_on_loop = int(ON_LOOP_S * tuned.max_batch / tuned.batch_s) if is_short else 0
        self._queued_rows = 0
        self._admission = Admission(tuned.run_s)
        self.longest_wait_s = 0.0
        """Jobs that waited longer are refused instead of run; 0 for no limit."""

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def is_idle(self) -> bool:
        return not self._queue and not self._is_running

    def admits(self, longest_wait_s: float) -> bool:
        """Whether a request may be queued now."""
        now, row_s = time.perf_counter(), self._admission.row_s
        wait_s, rows = self._queued_rows * row_s, self._queued_rows
        if self._running:
            running = _rows_of(self._running)
            wait_s += max(0.0, running * row_s - (now - self._began_s))
            rows += running
        return self._admission.admits(now, wait_s, longest_wait_s, rows)

    def submit(self, tensors: Mapping[str, np.ndarray], done: Done) -> None:
        """Queue a request; `done` is called on the loop with its outputs, or with what went wrong."""
        job = self._job(tensors, done)
        self._queue.append(job)
        self._queued_rows += job.size
        if not self._is_running:
            self._is_running = True
            # At the end of this turn of the loop, so that requests which are already here run together.
            self._loop.call_soon(self._run_next)

    def _job(self, tensors: Mapping[str, np.ndarray], done: Done) -> InferenceJob:
        now = time.perf_counter()
        size = len(tensors[self._sized_by]) if self._sized_by is not None else 1
        if self._tuned.max_batch == 1:
            return InferenceJob(tensors, 0, (), done, now, size)
        shapes = [tensors[name].shape for name in self._inputs]
        rows = {shape[0] for shape in shapes}
        # Rows that differ between inputs are an error of this request alone, so that it must fail alone.
        count = rows.pop() if len(rows) == 1 else 0
        return InferenceJob(tensors, count, tuple([shape[1:] for shape in shapes]), done, now, size)

    def _run_next(self) -> None:
        now = time.perf_counter()
        self._refuse_stale(now)
        if self._queue:
            self._admission.on_run(now, now - self._queue[0].since_s)
        if not self._queue:
            self._rest()
        elif self._queue[0].size <= self._most_rows_on_loop:
            self._run_turn(now)
        else:
            self._running, self._began_s = self._take(), now
            self._thread.submit(self._run_on_thread, self._running)

    def _take(self) -> list[InferenceJob]:
        jobs = take_batch(self._queue, self._tuned.max_batch)
        self._queued_rows -= _rows_of(jobs)
        return jobs

    def _run_turn(self, now: float) -> None:
        """Run what is queued, for about `TURN_S`, then answer."""
        ran: list[tuple[InferenceJob, Outputs | BaseException]] = []
        began, end = now, now + TURN_S
        while self._queue and now < end and self._queue[0].size <= self._most_rows_on_loop:
            jobs = self._take()
            ran += zip(jobs, run_together(self._tuned.engine.run, self._names, jobs), strict=True)
            now = time.perf_counter()
        self._admission.on_ran(now - began, len(ran), _rows_of([job for job, _ in ran]))
        for job, result in ran:
            job.done(result)
        self._go_on()

    def _run_on_thread(self, jobs: list[InferenceJob]) -> None:
        results = run_together(self._tuned.engine.run, self._names, jobs)
        self._loop.call_soon_threadsafe(self._finish, jobs, results)

    def _finish(self, jobs: list[InferenceJob], results: Sequence[Outputs | BaseException]) -> None:
        self._running = []
        self._admission.on_ran(time.perf_counter() - self._began_s, len(jobs), _rows_of(jobs))
        for job, result in zip(jobs, results, strict=True):
            job.done(result)
        self._go_on()

    def _go_on(self) -> None:
        if self._queue:
            self._loop.call_soon(self._run_next)
        else:
            self._rest()

    def _rest(self) -> None:
        self._is_running = False
        self._admission.on_idle()

    def _refuse_stale(self, now: float) -> None:
        oldest = now - self.longest_wait_s
        while self.longest_wait_s and self._queue and self._queue[0].since_s < oldest:
            job = self._queue.popleft()
            self._queued_rows -= job.size
            job.done(RequestRefused("The request waited too long for its turn.", status=503, code="waited-too-long"))


def _rows_of(jobs: Sequence[InferenceJob]) -> int:
    """At least 1: a request may have no rows."""
    return max(1, sum([job.size for job in jobs]))


def run_together(
    run: Callable[[Mapping[str, np.ndarray]], list[np.ndarray]], names: Sequence[str], jobs: Sequence[InferenceJob]
) -> Sequence[Outputs | BaseException]:
    """The outputs of each job, or its own error: if a batch fails, each job runs alone."""
    try:
        if len(jobs) == 1:
            return [dict(zip(names, run(jobs[0].tensors), strict=True))]
        joined = {name: np.concatenate([job.tensors[name] for job in jobs]) for name in jobs[0].tensors}
        return _split(run(joined), names, [job.rows for job in jobs])
    except Exception as error:
        if len(jobs) == 1:
            return [error]
        return [run_together(run, names, [job])[0] for job in jobs]


def _split(outputs: Sequence[np.ndarray], names: Sequence[str], rows: Sequence[int]) -> list[Outputs]:
    """The rows of each job, after a check that there are exactly as many as went in."""
    total = sum(rows)
    if any(len(output) != total for output in outputs):
        raise ValueError(f"A batch of {total} rows gave outputs of {[len(output) for output in outputs]} rows.")
    found: list[Outputs] = []
    start = 0
    for count in rows:
        found.append({name: output[start : start + count] for name, output in zip(names, outputs, strict=True)})
        start += count
    return found
