"""What TensorBoard can show of a model itself: histograms of its parameters at each checkpoint, and its graph.

Here: `write_histograms` and `write_graph`, for `syncline report` on request: they need torch, and the graph the task.
Not here: numbers over the run (`report/tensorboard.py`).
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch

from syncline import payload
from syncline.checkpoint import store
from syncline.errors import ConfigError
from syncline.task import Task
from syncline.telemetry.run_dir import RunDir
from syncline.workers.build import build_sources
from syncline.workers.entry import load_trained_model

__all__ = ["write_graph", "write_histograms"]


def write_histograms(run_dir: RunDir, folder: Path) -> int:
    """Of every parameter, at every checkpoint that the run has kept. How many checkpoints there were."""
    from torch.utils.tensorboard import SummaryWriter

    found = store.checkpoints_in(run_dir.checkpoints)
    if not found:
        raise ConfigError(f"{run_dir.path} has no checkpoint yet, so there are no parameters for histograms.")
    _clear(folder)
    with closing(SummaryWriter(str(folder))) as writer:
        for checkpoint in found:
            for name, value in store.load(checkpoint)["model"].items():
                if value.is_floating_point() and value.numel() and bool(value.isfinite().all()):
                    writer.add_histogram(name, value, global_step=checkpoint.step)
    return len(found)


def write_graph(run_dir: RunDir, folder: Path) -> None:
    """The model as torch traces it with one sample; `ConfigError` where it cannot be traced."""
    from torch.utils.tensorboard import SummaryWriter

    what = payload.read(run_dir.payload) if run_dir.payload.exists() else None
    if not isinstance(what, Task):
        raise ConfigError(
            "The graph needs the run's task: a script's model is its own, and a very large task is not kept."
        )
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
