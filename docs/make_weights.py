"""Make the weights that come with Syncline: train each run file beside them for real, measure, and write.

    python docs/make_weights.py

What is measured is measured with the numbers as they are shipped, rounded to 16 bits.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from syncline.cli.tasks import find_task
from syncline.driver import run_task
from syncline.models.zoo import pretrained
from syncline.observe.observer import choose_view
from syncline.task import LocatedData
from syncline.workers.build import build_sources


def make(run_file: Path) -> None:
    found = find_task(str(run_file), {}, {})
    task = found.task.with_defaults().located(found.data_dir, None)
    assert isinstance(task.data, LocatedData)
    with tempfile.TemporaryDirectory() as folder:
        config = found.config.replace(out=folder, checkpoint_every_s=1e6)
        model = run_task(found.task, config, choose_view(quiet=False, json=False), data_dir=found.data_dir).model
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    inputs, targets = build_sources(task)[1].fetch(range(task.data.info.test_samples))
    with torch.inference_mode():
        right = torch.cat([model(some).argmax(1) for some in inputs.split(500)]) == targets
    accuracy = right.double().mean().item()
    spec = task.model
    pretrained.save(
        run_file.with_suffix(".npz"), spec.name, spec.options, task.data.info, model, {"accuracy": accuracy}
    )
    print(f"{run_file.stem}: {accuracy:.2%} on {task.data.info.test_samples:,} test samples")  # noqa: T201


if __name__ == "__main__":
    for path in sorted(pretrained.FOLDER.glob("*.toml")):
        make(path)
