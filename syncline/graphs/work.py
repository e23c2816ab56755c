"""`VertexWork`: a vertex program and its graph, as they are sent to the workers of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from syncline.graphs.cut import Reads
from syncline.graphs.graph import Graph
from syncline.graphs.part import Progress
from syncline.graphs.program import VertexProgram
from syncline.graphs.result import GraphResult


@dataclass(frozen=True, kw_only=True)
class VertexWork:
    """Everything that workers need to compute together.

    Attributes:
        name: Of the program, for people.
        program: What to compute.
        graph: On what. Workers map its arrays from one file.
        colors: Vertices of the same color may be updated at the same time.
        reads: What the program reads of neighbors.
        partition: How the graph is divided over the workers.
        max_rounds: After how many rounds the run ends at the latest.
        seed: For the random numbers of the program.
        asynchronous: Whether workers do not wait for each other in every round.
    """

    name: str
    program: VertexProgram
    graph: Graph
    colors: np.ndarray
    reads: Reads
    partition: str
    max_rounds: int | None
    seed: int
    asynchronous: bool

    @property
    def fingerprint(self) -> str:
        """Of the graph and the settings that decide the result; the code of the program is not looked at."""
        graph, program = self.graph, self.program
        settings = (
            self.name, graph.size, graph.edge_count, program.consistency, program.schedule, program.until, self.seed,
            sorted(program.aggregates), sorted(program.edges),
        )  # fmt: skip
        digest = hashlib.sha256(repr(settings).encode())
        for array in (graph.sources, graph.targets):
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
        return digest.hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class OnWorkers:
    """A run of `work` on several workers: their settings, by the names of `RunConfig`, and who watches."""

    work: VertexWork
    workers: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    progress: Progress | None = None


Launch = Callable[[OnWorkers], GraphResult]
