"""A run's numbers as TensorBoard's event files: `RUN/tensorboard/run` and `RUN/tensorboard/worker-N`.

Here: scalars from a record, written anew each time. TensorBoard's own writer does it, without torch or TensorFlow. Not
here: histograms and the graph, which need the model (`workers/portrait.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from syncline.report.record import RunRecord

__all__ = ["Scalar", "scalars_of_run", "scalars_of_worker", "write_scalars"]


class Scalar(NamedTuple):
    """One number at one step."""

    name: str
    step: int
    time: float
    value: float


def scalars_of_run(record: RunRecord) -> list[Scalar]:
    """What concerns all workers: losses, metrics, the learning rate."""
    return [
        Scalar(name.replace(" ", "_"), point.step, record.started_at + point.time_s, point.value)
        for name, points in record.curves.items()
        for point in points
    ]


def scalars_of_worker(record: RunRecord, rank: int) -> list[Scalar]:
    """How fast one worker is."""
    name = "throughput/samples_per_s"
    return [
        Scalar(name, window.step, record.started_at + window.time_s, window.samples / window.seconds)
        for window in record.workers[rank].windows
        if window.seconds > 0
    ]


def write_scalars(record: RunRecord, folder: Path) -> None:
    """Everything, in place of what was written there before."""
    _write(folder / "run", scalars_of_run(record))
    for rank in record.workers:
        _write(folder / f"worker-{rank}", scalars_of_worker(record, rank))


def _write(folder: Path, scalars: Iterable[Scalar]) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    with closing(EventFileWriter(str(folder))) as writer:
        for scalar in scalars:
            summary = Summary(value=[Summary.Value(tag=scalar.name, simple_value=scalar.value)])
            writer.add_event(Event(wall_time=scalar.time, step=scalar.step, summary=summary))
