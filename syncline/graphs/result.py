"""What a vertex program has computed, and how much work that was."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from syncline.errors import ConfigError
from syncline.graphs.graph import Graph

__all__ = ["GraphResult"]


@dataclass(frozen=True, kw_only=True)
class GraphResult:
    """The values of all vertices.

    Attributes:
        graph: The graph.
        values: One row for each vertex.
        converged: Whether the last round changed no more than `until`; False if `max_rounds` ended the run.
        rounds: How many rounds there were.
        updates: How many vertices were updated, counted each time.
        edge_updates: How many edges were read or written.
        seconds: How long it took, without reading the graph.
        workers: How many workers took part.
        facts: More about the run by name, such as the division of the graph.
    """

    graph: Graph
    values: np.ndarray
    converged: bool
    rounds: int
    updates: int
    edge_updates: int
    seconds: float
    workers: int
    facts: dict[str, Any]

    def top(self, count: int = 10) -> list[tuple[str, float]]:
        """The vertices with the largest values, largest first, by name."""
        if self.values.ndim != 1:
            raise ConfigError("There is no largest one of values with several columns.", code="several-columns")
        largest = np.argsort(-self.values, kind="stable")[:count]
        return [(self.graph.name(int(number)), self.values[number].item()) for number in largest]

    def __getitem__(self, vertex: Any) -> Any:
        """The value of a vertex by name or number."""
        return self.values[self.graph.number(vertex)]

    def save(self, path: str | Path) -> None:
        """Save all values as .csv, .npy or .parquet; CSV and Parquet have the names of vertices, too."""
        path = Path(path)
        columns = self.values.reshape(len(self.values), -1)
        header = ["value"] if self.values.ndim == 1 else [f"value_{number}" for number in range(columns.shape[1])]
        names = [self.graph.name(number) for number in range(self.graph.size)]
        if path.suffix == ".npy":
            with open(path, "wb") as file:
                np.save(file, self.values)
        elif path.suffix == ".csv":
            with open(path, "w", newline="", encoding="utf-8") as text:
                writer = csv.writer(text)
                writer.writerow(["vertex", *header])
                writer.writerows([name, *row] for name, row in zip(names, columns.tolist(), strict=True))
        elif path.suffix == ".parquet":
            import pyarrow as pa
            from pyarrow import parquet

            table = {"vertex": names, **{name: columns[:, number] for number, name in enumerate(header)}}
            parquet.write_table(pa.table(table), path)
        else:
            raise ConfigError(
                f"{path} has the ending {path.suffix!r}. Use .csv, .npy or .parquet.", code="ending", path=str(path)
            )
