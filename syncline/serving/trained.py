"""A trained model with all that is known about it: what it takes, what its outputs mean, what it was trained on.

Here: `TrainedModel`, from a run's checkpoint or from the weights that ship with Syncline. Not here: writing it in
another format (`exporting/`).
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from syncline import task_file
from syncline.checkpoint import store
from syncline.checkpoint.schema import CheckpointState
from syncline.config.spec import Spec
from syncline.data import transforms
from syncline.data.named import DataInfo
from syncline.errors import ConfigError
from syncline.models.answers import Answers, answers_of
from syncline.models.zoo import pretrained
from syncline.serving.metadata import InputKind
from syncline.serving.samples import Preparation, RawSamples, scale_of
from syncline.task import LocatedData, Script, Task
from syncline.telemetry.run_dir import RunDir
from syncline.workers.build import build_sources
from syncline.workers.entry import rebuild_model

__all__ = ["TrainedModel", "of_run", "of_shipped", "of_task", "saved_task", "trained_model"]

HANDWRITING = ("mnist", "digits")
"""The datasets whose images are ink, light on dark."""


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model in evaluation mode, and what is known about it.

    Attributes:
        module: The torch model.
        name: Of the model.
        version: The step of the checkpoint, or 1.
        preparation: What happens to an input before the model gets it: scaling and transforms.
        answers: What its outputs mean.
        train: The training data, if it is at hand.
        test: The test data, if there is any.
        shape: Of one input as stored, without scaling and transforms.
        is_described: Whether the data has a name or is in files, so that its inputs can be made from pictures.
        facts: For the model card: data, metrics, strategy and so on.
    """

    module: nn.Module
    name: str
    version: str
    preparation: Preparation
    answers: Answers
    shape: tuple[int, ...]
    vocabulary: int | None = None
    class_names: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    data: str = ""
    is_described: bool = True
    train: RawSamples | None = None
    test: RawSamples | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> InputKind:
        if self.vocabulary is not None:
            return "text"
        # How a picture becomes one of a user's own arrays is unknown: which colors, which scale.
        if len(self.shape) == 3 and self.shape[0] in (1, 3) and self.is_described:
            return "image"
        return "table" if len(self.shape) == 1 else "tensor"

    @property
    def is_handwriting(self) -> bool:
        return self.data in HANDWRITING and self.kind == "image" and self.shape[0] == 1

    @cached_property
    def sha256(self) -> str:
        """Of the weights: their names, types, shapes and values."""
        return hash_of(self.module)


def trained_model(
    what: str | Path, *, checkpoint: int | None = None, task: Task | None = None, data_dir: Path | None = None
) -> TrainedModel:
    """The model of a run directory, or one whose weights ship with Syncline."""
    if Path(what).is_dir():
        return of_run(Path(what), checkpoint=checkpoint, task=task, data_dir=data_dir)
    if checkpoint is not None or task is not None:
        raise ConfigError(f"{what} is no run directory, so it has no checkpoints.", code="not-a-run", path=str(what))
    return of_shipped(str(what))


def of_run(
    path: Path, *, checkpoint: int | None = None, task: Task | None = None, data_dir: Path | None = None
) -> TrainedModel:
    """The model of a run, at its newest checkpoint or that of the step `checkpoint`.

    A script's model cannot be rebuilt from the run alone: `task` brings the model and its data then.
    """
    run_dir = RunDir.owned(path)
    saved = saved_task(run_dir)
    if isinstance(saved, Script) and task is None:
        raise ConfigError(
            f"{path} is the run of a script, so its model cannot be rebuilt from the run alone. Pass a task with the "
            "same model and data: --task my_task.py:task, or task=syncline.Task(model=..., data=..., test=...).",
            code="script-model", path=str(path),
        )  # fmt: skip
    found = task or saved
    assert isinstance(found, Task)
    found = found.located(data_dir, None).with_defaults() if task is not None else found
    run_id = run_dir.read_plan().get("run_id")
    if checkpoint is None:
        where, state, problems = store.newest_sound(run_dir.checkpoints, run_id)
        if problems:
            warnings.warn(f"{' '.join(problems)} Using the checkpoint of step {where.step} instead.", stacklevel=3)
    else:
        where, state = store.at_step(run_dir.checkpoints, checkpoint, run_id)
    content = CheckpointState.from_dict(state)
    weights = _first_model(content.model) if isinstance(saved, Script) else content.model
    facts = {
        **_plan_facts(run_dir), "run": path.resolve().name, "step": where.step, "checkpoint_sha256": where.sha256,
        "metrics": {name: float(value) for name, value in content.metrics.items()},
    }  # fmt: skip
    return of_task(found, weights, version=str(where.step), facts=facts)


def of_task(task: Task, weights: Mapping[str, torch.Tensor], *, version: str, facts: Mapping[str, Any]) -> TrainedModel:
    """The model of a task with these weights."""
    train, test = build_sources(task)
    module = rebuild_model(task, train, weights)
    samples = RawSamples(train)
    info = task.data.info if isinstance(task.data, LocatedData) else None
    manifest = task.data.manifest if isinstance(task.data, LocatedData) else None
    example = samples.raw([0])[0]
    is_tokens = info.vocabulary is not None if info is not None else example.dtype.kind == "i"
    return TrainedModel(
        module=module,
        name=_name_of(task),
        version=version,
        preparation=Preparation(scale_of(train), _transforms_of(task)),
        answers=_answers(task, info),
        shape=tuple(example.shape[1:]),
        vocabulary=(info.vocabulary if info is not None else int(_vocabulary(module))) if is_tokens else None,
        class_names=info.class_names if info is not None else None,
        columns=manifest.features if manifest is not None and manifest.kind == "numbers" else None,
        data=info.name if info is not None else task.facts().data,
        is_described=info is not None,
        train=samples,
        test=RawSamples(test) if test is not None and len(test) else None,
        facts=facts,
    )


def of_shipped(name: str) -> TrainedModel:
    """A model whose weights ship with Syncline; without its data, which may not be on this machine."""
    weights = pretrained.find(name)
    info = weights.info
    return TrainedModel(
        module=weights.model(),
        name=weights.name,
        version="1",
        preparation=Preparation(info.scale, ()),
        answers="classes",
        shape=info.input_shape,
        class_names=info.class_names,
        data=info.name,
        facts={
            "data": info.name, "train_samples": info.train_samples, "test_samples": info.test_samples,
            "metrics": {f"test/{name}": float(value) for name, value in weights.metrics.items()},
        },
    )  # fmt: skip


def hash_of(module: nn.Module) -> str:
    """SHA-256 of a model's weights: their names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def saved_task(run_dir: RunDir) -> Task | Script:
    """What a run trained; `ConfigError` if that was not stored."""
    if not run_dir.task_file.exists():
        raise ConfigError(
            f"The task of {run_dir.path} was too large to store with the run, so its model cannot be rebuilt. Load "
            "'model' from the checkpoint into your own model.",
            code="no-task-file", path=str(run_dir.path),
        )  # fmt: skip
    found = task_file.read_saved(run_dir.task_file)
    if isinstance(found, Task | Script):
        return found
    if run_dir.read_plan().get("kind") == "fit":
        raise ConfigError(
            f"{run_dir.path} is a fit by blocks, which has no network. Its arrays are in {run_dir.path}/result.npz; in "
            "Python, syncline.fit(...) returns an object that predicts.", code="no-model", path=str(run_dir.path),
        )  # fmt: skip
    raise ConfigError(
        f"{run_dir.path} is not a training: it computed on a graph, and has no model. Its command "
        "saves them with --out.", code="no-model", path=str(run_dir.path),
    )  # fmt: skip


def _first_model(saved: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The first model that a script prepared. Of several, a checkpoint has all, as `model`, `model1` and so on."""
    if not any(name.startswith(("model1.", "parameter0")) for name in saved):
        return dict(saved)
    return {name.removeprefix("model."): t for name, t in saved.items() if name.startswith("model.")}


def _plan_facts(run_dir: RunDir) -> dict[str, Any]:
    plan = run_dir.read_plan()
    wanted = ("data", "strategy", "layout", "seed", "epochs", "batch", "train_samples", "test_samples", "precision")
    return {**{name: plan.get(name) for name in wanted}, "workers": len(plan.get("workers") or [])}


def _transforms_of(task: Task) -> tuple[transforms.Transform, ...]:
    """Those that apply to test data, too."""
    found = transforms.parse(task.augment)
    return tuple(t for t in found if isinstance(t, transforms.Transform) and not t.is_random)


def _answers(task: Task, info: DataInfo | None) -> Answers:
    if task.reconstructs:
        return "numbers"
    found = answers_of(task.loss)
    if found is None:  # the user's own function
        return "classes" if info is not None and info.classes is not None else "numbers"
    return found


def _name_of(task: Task) -> str:
    label = task.model.name if isinstance(task.model, Spec) else task.facts().model
    return label.replace("/", "-").replace(":", "-") or "model"


def _vocabulary(module: nn.Module) -> int:
    embeddings = [m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)]
    return embeddings[0] if embeddings else 0
