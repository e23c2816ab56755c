"""The errors for models that cannot be cut into pipeline stages."""

from __future__ import annotations

from torch import nn

from syncline.errors import ConfigError

_OTHER_WAYS = (
    "Write it as an nn.Sequential of its blocks, or add a method pipeline_units() that returns the modules to run one "
    "after another, or use --layout replicated."
)


def refusal(model: nn.Module, why: str) -> ConfigError:
    """The error for a model that cannot be cut into stages."""
    kind = type(model).__name__
    if getattr(getattr(model, "config", None), "use_cache", False):  # a model of transformers
        why += ", and model.config.use_cache is True. Set it to False"
    return ConfigError(
        f"The model {kind} cannot be cut into pipeline stages, because {why}. {_OTHER_WAYS}",
        code="layout", layout="pipeline", reason="untraceable", model=kind, why=why, nearest="sharded",
    )  # fmt: skip


def difference(model: nn.Module, what: str, samples: int, *, is_training: bool) -> ConfigError:
    """The error for a model whose stages give another result than the model itself."""
    kind, mode = type(model).__name__, "training" if is_training else "evaluation"
    return ConfigError(
        f"The model {kind} cannot be cut into pipeline stages: one after another, they have another {what} than the "
        f"model for {samples} samples in {mode}. Its forward pass depends on values or on the batch size in a way that "
        f"cannot be followed, or changes the model. {_OTHER_WAYS}",
        code="layout", layout="pipeline", reason="differs", model=kind, difference=what, samples=samples,
        is_training=is_training, nearest="sharded",
    )  # fmt: skip
