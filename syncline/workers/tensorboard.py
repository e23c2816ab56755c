"""TensorBoard's views of a model: histograms of its parameters at each checkpoint, and its graph.

Here: `write_histograms` and `write_graph`, for `syncline report` on request: they need torch, and the graph needs the
task. Not here: scalars over the run (`observe/report/tensorboard.py`).
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch

from syncline import task_file
from syncline.checkpoint import store
from syncline.checkpoint.schema import CheckpointState
from syncline.errors import ConfigError
from syncline.task import Task
from syncline.telemetry.run_dir import RunDir
from syncline.workers.build import build_sources
from syncline.workers.entry import load_trained_model


def write_histograms(run_dir: RunDir, folder: Path) -> int:
    """Write histograms of every parameter at every checkpoint on disk. The number of checkpoints."""
    from torch.utils.tensorboard import SummaryWriter

    found = store.checkpoints_in(run_dir.checkpoints)
    if not found:
        raise ConfigError(f"{run_dir.path} has no checkpoint yet, so there are no parameters for histograms.")
    _clear(folder)
    with closing(SummaryWriter(str(folder))) as writer:
        for checkpoint in found:
            for name, value in CheckpointState.from_dict(store.load(checkpoint)).model.items():
                if value.is_floating_point() and value.numel() and bool(value.isfinite().all()):
                    writer.add_histogram(name, value, global_step=checkpoint.step)
    return len(found)


def write_graph(run_dir: RunDir, folder: Path) -> None:
    """Write the model as torch traces it on one sample; `ConfigError` if it cannot be traced."""
    from torch.utils.tensorboard import SummaryWriter

    what = task_file.read_saved(run_dir.task_file) if run_dir.task_file.exists() else None
    if not isinstance(what, Task):
        raise ConfigError("The graph needs the run's task, which is not available for scripts and very large tasks.")
    model = load_trained_model(what, run_dir)
    batch = build_sources(what)[0].fetch([0])
    inputs = tuple(batch[:-1]) if isinstance(batch, (tuple, list)) and len(batch) > 1 else batch
    _clear(folder)
    with closing(SummaryWriter(str(folder))) as writer, torch.inference_mode():
        try:
            writer.add_graph(model, inputs)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise ConfigError(f"torch cannot trace this model, so there is no graph: {error}") from error


def _clear(folder: Path) -> None:
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
