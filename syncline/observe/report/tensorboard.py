"""A run's scalars as TensorBoard event files: `RUN/tensorboard/run` and `RUN/tensorboard/worker-N`.

Here: scalars from a record, rewritten each time with TensorBoard's own writer, without torch or TensorFlow. Not here:
histograms and the graph, which need the model (`workers/tensorboard.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from syncline.observe.report.record import RunRecord


class Scalar(NamedTuple):
    """One value at one step."""

    name: str
    step: int
    time: float
    value: float


def scalars_of_run(record: RunRecord) -> list[Scalar]:
    """Losses, metrics and the learning rate."""
    return [
        Scalar(name.replace(" ", "_"), point.step, record.started_at + point.time_s, point.value)
        for name, points in record.curves.items()
        for point in points
    ]


def scalars_of_worker(record: RunRecord, worker_id: int) -> list[Scalar]:
    """The throughput of one worker."""
    name = "throughput/samples_per_s"
    return [
        Scalar(name, window.step, record.started_at + window.time_s, window.samples / window.seconds)
        for window in record.workers[worker_id].windows
        if window.seconds > 0
    ]


def write_scalars(record: RunRecord, folder: Path) -> None:
    """Write all scalars, replacing earlier files."""
    _write(folder / "run", scalars_of_run(record))
    for worker_id in record.workers:
        _write(folder / f"worker-{worker_id}", scalars_of_worker(record, worker_id))


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
