"""Where pieces are scored: in processes of this machine, on Ray, or on Spark.

Here: the protocol, the local engine, and the choice by the name that --engine takes. Not here: the others
(`ray_scoring.py`, `spark_scoring.py`), and what scores one piece (`piece_scorer.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Protocol

from syncline.engines.spark import needs_pyspark
from syncline.errors import ConfigError, SynclineError, UnknownName
from syncline.serving.scoring.piece_scorer import Setup
from syncline.serving.scoring.pieces import ScoringPiece
from syncline.serving.scoring.places import Place
from syncline.serving.scoring.processes import score_all

OnDone = Callable[[ScoringPiece], None]

MOST_DEATHS = 3
"""How many processes may die over one piece."""

_FORMS = "local, ray, ray://HOST:PORT, spark, spark://HOST:PORT, spark-local[N]"


class ScoringEngine(Protocol):
    """Runs a `PieceScorer` in several processes."""

    slots: int
    """How many pieces are scored at once."""
    threads: int
    """How many threads each of them may use."""
    is_remote: bool
    """Whether processes may be on other machines, which do not have the files of this one."""

    def score_all(self, setup: Setup, pieces: Sequence[ScoringPiece], on_done: OnDone) -> None:
        """Score all pieces; the first error of a process is raised here."""

    def close(self) -> None:
        """End what this engine started."""


def scoring_engine(name: str, workers: int | None) -> ScoringEngine:
    """The engine of this name; `workers`: the number of processes, by default all that there is room for."""
    scheme = re.split(r"[:\[?]", name, maxsplit=1)[0]
    if name == "local":
        return _LocalScoring(workers)
    if scheme == "ray":
        from syncline.serving.scoring.ray_scoring import RayScoring

        return RayScoring(name, workers)
    if scheme in ("spark", "spark-local"):
        needs_pyspark()
        from syncline.serving.scoring.spark_scoring import SparkScoring

        return SparkScoring(name, workers)
    raise UnknownName.among("engine for scoring", name, ("local", "ray", "spark"), more=f"Use one of: {_FORMS}.")


class _LocalScoring:
    is_remote = False

    def __init__(self, workers: int | None) -> None:
        cores = len(os.sched_getaffinity(0))
        self.slots = workers or cores
        self.threads = max(1, cores // self.slots)

    def score_all(self, setup: Setup, pieces: Sequence[ScoringPiece], on_done: OnDone) -> None:
        score_all(setup, pieces, self.slots, on_done)

    def close(self) -> None:
        """Its processes have ended with `score_all`."""


def check_shared(place: Place, piece: ScoringPiece) -> None:
    """`ConfigError` if a piece that another machine has written is not seen here."""
    if place.is_on_this_machine and not place.has(piece.name):
        raise ConfigError(
            f"A process of the cluster has written {piece.name} to {place.shown} on its own machine, and it is not "
            "here. Choose a folder that all machines share, or a URL such as s3://bucket/scores, with --out.",
            code="scoring-not-shared", path=place.shown, piece=piece.name,
        )  # fmt: skip


def died(piece: ScoringPiece | None, reason: str) -> SynclineError:
    """The error for a piece over which several processes have died."""
    what = f"over {piece.name}" if piece is not None else "before their first piece"
    return SynclineError(
        f"{MOST_DEATHS} processes of the cluster died {what}: {reason}. If they were out of memory, score smaller "
        "pieces (rows_per_piece=), or use fewer --workers. What is scored is kept: the same command continues.",
        code="scoring-process-died", reason=reason, piece=piece.name if piece is not None else None,
    )  # fmt: skip
