"""Flags that say what to train, the same for every command that trains.

Here: their names and help. Not here: how to run it (`flags.py`), and finding the task (`tasks.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "Augment", "ClipNorm", "Data", "DataDir", "Loss", "Lr", "Metrics", "Optimizer", "Schedule", "WeightDecay", "What",
]  # fmt: skip

Loss = Annotated[
    str | None, typer.Option(help="A loss by torch's name, such as cross_entropy or 'huber_loss(delta=2)'.")
]
Optimizer = Annotated[str | None, typer.Option(help="An optimiser by torch's name, such as 'adam(lr=0.001)'.")]
Lr = Annotated[float | None, typer.Option(help="The learning rate.")]
Schedule = Annotated[
    str | None,
    typer.Option(help="A learning-rate schedule by torch's name, such as CosineAnnealingLR; 'none' for none."),
]
Metrics = Annotated[str | None, typer.Option(help="torchmetrics by name, with commas between: accuracy,f1_score.")]
WeightDecay = Annotated[float | None, typer.Option(help="Weight decay of the optimiser.")]
ClipNorm = Annotated[float | None, typer.Option(help="Clip the combined gradient to this norm.")]
Augment = Annotated[
    str | None, typer.Option(help="What to do to training inputs, at random: 'crop(padding=4), flip, cutout(size=8)'.")
]
What = Annotated[
    str,
    typer.Argument(
        metavar="TASK", help="A model by name (lenet), a Python task (my_task.py:task) or a run file (my_run.toml)."
    ),
]
Data = Annotated[
    str | None,
    typer.Option("--data", "-d", help="A data set by name (syncline data list), or the path or URL of your own."),
]
DataDir = Annotated[Path | None, typer.Option(help="Where to look for data sets first.")]
