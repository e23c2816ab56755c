"""How a graph is divided, in a line."""

from __future__ import annotations

from syncline.telemetry.events import GraphDivided


def division_text(event: GraphDivided) -> str:
    """One line about it."""
    halo = f"up to {event.staleness} steps old" if event.staleness else "exact"
    return (
        f"graph of {event.nodes:,} nodes and {event.edges:,} edges in {event.parts} parts ({event.method}): "
        f"{event.cut_share:.1%} of the edges are cut, the largest part has {event.balance:.2f} times the mean, "
        f"{event.copies:,} nodes are read by other parts; halos {halo}"
    )
