"""A vertex program being run by one worker, on its part of the graph.

Here: `VertexJob`: from one View to the next, dividing the graph over its members, continuing from the newest copy,
rounds until the end, stopping and saving between them. Not here: a round (`graphs/execution.py`), what the parts send
each other (`part_team.py`), copies (`graph_copies.py`).
"""

from __future__ import annotations

import struct
import time
from typing import Any

import numpy as np

from syncline.graphs.asynchronous import AsynchronousRun, conflicts
from syncline.graphs.cut import edge_routes, vertex_routes
from syncline.graphs.execution import Run
from syncline.graphs.part import Part, State, left_to_change
from syncline.graphs.partition import divide
from syncline.graphs.running import first_state
from syncline.graphs.work import VertexWork
from syncline.telemetry.events import MetricsLogged, Recovered
from syncline.workers.graph_copies import Copy, GraphCopies
from syncline.workers.part_team import PartTeam
from syncline.workers.session import Session
from syncline.workers.turn_team import TurnTeam

_REPORT = struct.Struct("<???dqq")
_REPORT_EVERY_S = 0.2


class VertexJob:
    """One worker's part in a run of `work`."""

    def __init__(self, work: VertexWork, session: Session) -> None:
        self._work, self._session = work, session
        self._copies = GraphCopies()
        self._divisions: dict[int, np.ndarray] = {}
        self._reached = 0
        """Up to which round this worker has computed in any View."""
        self._reported_at = 0.0
        self._recovering: tuple[int, int] | None = None
        self._sent_before = 0
        self._team: PartTeam | None = None
        self._is_stopped = False

    def run(self) -> tuple[bool, dict[str, Any]]:
        """Compute in the present View until the end; whether it was stopped early, and the summary."""
        session, work = self._session, self._work
        started = time.monotonic()
        collective = session.collective
        session.checkpoints.open()
        self._continue()
        owners = self._division()
        assert self._copies.newest is not None, "there is a copy to continue from"
        copy = self._copies.newest
        state, counters = copy.own_state(work.graph.size), copy.own_counters(collective.rank)
        self._sent_before += self._team.bytes_sent if self._team is not None else 0
        routes = vertex_routes(work.graph, owners, work.reads.directions)
        self._edge_owners = owners[work.graph.targets]
        self._owners = owners
        self._part = Part(work.graph, np.flatnonzero(owners == collective.rank))
        edges = edge_routes(work.graph, owners, work.reads.scatters)
        run: Run
        if work.asynchronous and collective.size > 1:
            has_token = conflicts(work.graph, owners, collective.size, work.program.consistency)
            turns = TurnTeam(collective, owners, routes, edges, self._end_round, has_token=has_token, first=state)
            self._team = turns
            run = AsynchronousRun(
                work.program, self._part, work.colors, state, turns, work.max_rounds, work.seed, counters, owners
            )
        else:
            self._team = PartTeam(collective, owners, routes, edges, self._end_round)
            run = Run(work.program, self._part, work.colors, state, self._team, work.max_rounds, work.seed, counters)
        converged = run.to_end()
        return self._finish(state, run.counters, converged=converged, started=started)

    def _continue(self) -> None:
        """Have the copy to continue from: the newest of any member, else a checkpoint's, else the first values."""
        session, work = self._session, self._work
        sent = self._copies.agree(session.collective)
        if self._copies.newest is None:
            saved = session.checkpoints.load_newest()
            if saved is not None:
                self._copies.newest = Copy.of(saved.model, saved.metrics)
            else:
                self._copies.newest = Copy(
                    first_state(work.program, work.graph), {"rounds": 0, "updates": 0, "edge_updates": 0}
                )
        if session.view > 1:
            self._recovering = (max(0, self._reached - self._copies.newest.rounds), sent)

    def _division(self) -> np.ndarray:
        """The rank of each vertex, decided by the first member for all."""
        collective, work = self._session.collective, self._work
        if collective.rank == 0 and collective.size not in self._divisions:
            self._divisions[collective.size] = divide(work.graph, collective.size, work.partition).vertices
        mine = self._divisions[collective.size].astype(np.int32).tobytes() if collective.rank == 0 else b""
        return np.frombuffer(collective.all_gather(mine)[0], np.int32).astype(np.int64)

    def _end_round(self, state: State, counters: dict[str, Any]) -> bool:
        """Report the round, make a copy if it is time, save if that is asked for. Whether the run continues."""
        session, rounds = self._session, int(counters["rounds"])
        self._reached = max(self._reached, rounds)
        session.recorder.last_step = rounds
        session.in_flight = (rounds, np.empty(0, np.int64))
        left = left_to_change(state, self._part.own)
        is_due = session.rank == 0 and self._copies.is_due()
        done = counters["updates"], counters["edge_updates"]
        mine = _REPORT.pack(session.stop_requested(), session.save_requested(), is_due, left, *done)
        reports = [_REPORT.unpack(part) for part in session.collective.all_gather(mine)]
        stop, save, copy = (any(report[place] for report in reports) for place in range(3))
        self._report_recovery(rounds)
        if session.rank == 0 and time.monotonic() - self._reported_at > _REPORT_EVERY_S:
            left, updates, edge_updates = (float(sum(report[place] for report in reports)) for place in (3, 4, 5))
            self._report(rounds, {"pending": left, "updates": updates, "edge_updates": edge_updates})
        if stop or save or copy:
            made = self._copies.make(session.collective, state, counters, self._owners, self._edge_owners)
            if save and not stop:
                session.checkpoints.save_arrays(rounds, made.tensors(), dict(made.counters), is_last=False)
        self._is_stopped = stop
        return not stop

    def _report(self, rounds: int, numbers: dict[str, float]) -> None:
        self._reported_at = time.monotonic()
        metrics = {"rounds": float(rounds), **numbers}
        self._session.recorder.emit(MetricsLogged(worker_id=self._session.worker_id, step=rounds, metrics=metrics))

    def _report_recovery(self, rounds: int) -> None:
        if self._recovering is not None and self._session.rank == 0:
            session, (repeated, sent) = self._session, self._recovering
            session.recorder.emit(
                Recovered(
                    view=session.view, members=session.members, step=rounds, repeated_steps=repeated,
                    seconds=time.monotonic() - session.interrupted_at, state_bytes=sent,
                )
            )  # fmt: skip
        self._recovering = None

    def _finish(
        self, state: State, counters: dict[str, Any], *, converged: bool, started: float
    ) -> tuple[bool, dict[str, Any]]:
        """Save the values of all, and say what it took."""
        session = self._session
        assert self._team is not None, "there was a round, or none was needed"
        made = self._copies.make(session.collective, state, counters, self._owners, self._edge_owners)
        sent = int(self._team.counts(np.array([self._sent_before + self._team.bytes_sent]))[0])
        stopped_early = self._is_stopped and not converged
        cut = int((self._owners[self._work.graph.sources] != self._edge_owners).sum())
        numbers = {
            **{name: float(value) for name, value in made.counters.items()}, "converged": float(converged),
            "sent_bytes": float(sent), "cut_edges": float(cut), "workers": float(session.collective.size),
        }  # fmt: skip
        session.expect_long_waits()
        session.checkpoints.save_arrays(made.rounds, made.tensors(), numbers, is_last=True)
        session.checkpoints.finish_writing()
        session.collective.barrier()
        return stopped_early, {
            "metrics": numbers, "steps": made.rounds, "epochs": 0.0, "samples": 0,
            "seconds": time.monotonic() - started, "peak_memory_bytes": session.gather_peak_memory(),
        }  # fmt: skip
