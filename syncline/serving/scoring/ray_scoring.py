"""Scoring on a Ray cluster: actors, each with one piece at a time.

Here: `RayScoring`, which gives out pieces and replaces actors that died. Not here: the connection to Ray
(`engines/ray_connection.py`), and scoring a piece (`piece_scorer.py`). Rows do not pass through Ray: actors read and
write files themselves.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from syncline.engines.ray import read_name
from syncline.engines.ray_connection import RayConnection, first_line, import_ray
from syncline.errors import ConfigError
from syncline.serving.scoring.engines import MOST_DEATHS, OnDone, check_shared, died
from syncline.serving.scoring.piece_scorer import PieceScorer, Setup
from syncline.serving.scoring.pieces import ScoringPiece
from syncline.serving.scoring.places import place_for

_LOOK_EVERY_S = 1.0


class RayScoring:
    """A `ScoringEngine` on Ray."""

    is_remote = True

    def __init__(self, name: str, workers: int | None) -> None:
        self._request = read_name(name)
        self._ray = import_ray()
        self._connection = RayConnection(self._ray, self._request.address)
        each = self._request.bundle["CPU"]
        self.threads = max(1, int(each))
        try:
            wanted = workers or max(1, int(len(os.sched_getaffinity(0)) / each))
            self._connection.open(cpus=math.ceil(wanted * each))
            self._total = self._ray.cluster_resources()
            self.slots = workers or max(1, int(self._total.get("CPU", 1.0) / each))
        except BaseException:
            self.close()
            raise

    def score_all(self, setup: Setup, pieces: Sequence[ScoringPiece], on_done: OnDone) -> None:
        _RayPool(self._ray, self._request, setup, pieces, self._total).run(self.slots, on_done)

    def close(self) -> None:
        self._connection.leave()


class _RayPool:
    """The actors of one job, and the pieces that they have."""

    def __init__(
        self, ray: Any, request: Any, setup: Setup, pieces: Sequence[ScoringPiece], total: dict[str, float]
    ) -> None:
        self._ray, self._request, self._total = ray, request, total
        self._setup = ray.put(setup)  # once per node
        self._place = place_for(setup.out)
        self._left = deque(pieces)
        self._deaths: Counter[ScoringPiece | None] = Counter()
        self._busy: dict[Any, tuple[Any, ScoringPiece | None]] = {}
        """By future: its actor and its piece; no piece while the actor starts."""

    def run(self, slots: int, on_done: OnDone) -> None:
        try:
            for _ in range(min(slots, len(self._left))):
                self._start()
            self._wait_for_the_first()
            while self._busy:
                ended, _ = self._ray.wait(list(self._busy), num_returns=1, timeout=_LOOK_EVERY_S)
                for future in ended:
                    self._take(future, on_done)
                if not self._left and all(piece is None for _, piece in self._busy.values()):
                    return  # actors for which there was no room are not needed any more
        finally:
            for actor, _ in self._busy.values():
                self._end(actor)

    def _start(self) -> None:
        remote = self._ray.remote(
            num_cpus=self._request.bundle["CPU"], num_gpus=self._request.gpus, max_restarts=0, max_task_retries=0
        )(_ScoringActor)
        actor = remote.remote()
        self._busy[actor.open.remote(self._setup)] = (actor, None)

    def _wait_for_the_first(self) -> None:
        """`ConfigError` if the cluster has room for no actor."""
        began = time.monotonic()
        while not self._ray.wait(list(self._busy), num_returns=1, timeout=_LOOK_EVERY_S)[0]:
            if time.monotonic() - began > self._request.wait_s:
                raise ConfigError(
                    f"Ray has not started a process within {self._request.wait_s:g} s. "
                    f"{self._request.describe(len(self._busy), self._total, self._ray.available_resources())} Wait "
                    "until resources are free, or request less per worker (cpus=, gpus=).",
                    code="no-room", workers=len(self._busy),
                )  # fmt: skip

    def _take(self, future: Any, on_done: OnDone) -> None:
        actor, piece = self._busy.pop(future)
        try:
            error = self._ray.get(future)
        except self._ray.exceptions.RayError as gone:
            self._end(actor)
            self._replace(piece, first_line(gone))
            return
        if error is not None:
            self._end(actor)
            raise error
        if piece is not None:
            check_shared(self._place, piece)
            on_done(piece)
        if self._left:
            following = self._left.popleft()
            self._busy[actor.score.remote(following)] = (actor, following)
        else:
            self._end(actor)

    def _replace(self, piece: ScoringPiece | None, reason: str) -> None:
        self._deaths[piece] += 1
        if self._deaths[piece] >= MOST_DEATHS:
            raise died(piece, reason)
        if piece is not None:
            self._left.appendleft(piece)
        self._start()

    def _end(self, actor: Any) -> None:
        with contextlib.suppress(Exception):  # Ray may be gone already
            self._ray.kill(actor, no_restart=True)


class _ScoringActor:
    """The Ray actor. Errors are returned, so that they keep their type."""

    def open(self, setup: Setup) -> Exception | None:
        try:
            self._scorer = PieceScorer(setup)
        except Exception as error:
            return error
        return None

    def score(self, piece: ScoringPiece) -> Exception | None:
        try:
            self._scorer.score(piece)
        except Exception as error:
            return error
        return None
