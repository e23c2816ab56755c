"""Models from transformers: `hf:gpt2(n_layer=2, n_embd=64, n_head=2)`, `hf:vit(patch_size=4)`.

Here: `build`, the names, and the adapter that gives a model the shape of input and output that a run expects. The data
decides on the kind: next tokens for data with a vocabulary, a classification for images.

A model type (`gpt2`, `vit`) is built from that type's own config, changed by the options; nothing is fetched. Any other
name is a model of the hub: its config is taken from the local cache, else from the hub unless HF_HUB_OFFLINE is set. A
few well-known ones are just what their type's config says, which is then taken. Weights are drawn anew, or with
`pretrained=True` come from the cache or the hub.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from syncline.errors import ConfigError, nearest

__all__ = ["ImageScores", "TokenScores", "build", "names"]

_SAME_AS_TYPE = {
    "bert-base-uncased": "bert",
    "google-bert/bert-base-uncased": "bert",
    "openai-community/gpt2": "gpt2",
    "distilbert-base-uncased": "distilbert",
    "google/vit-base-patch16-224": "vit",
    "microsoft/resnet-50": "resnet",
}
"""Models of the hub that are what their type's config describes by itself."""


def names() -> list[str]:
    """The model types that tell what token comes next, or classify images."""
    from transformers.models.auto import modeling_auto as auto

    return sorted({*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES})


def build(input_shape: tuple[int, ...], classes: int, vocabulary: int | None, named: str, **options: Any) -> nn.Module:
    """The model called `named`, for tokens if there is a vocabulary, else for images."""
    if vocabulary is None and len(input_shape) != 3:
        raise ConfigError(
            f"The model 'hf:{named}' was asked for samples of shape {input_shape}, but models of transformers take "
            "tokens (time,) with a vocabulary, such as 'shakespeare', or images (channels, height, width)."
        )
    pretrained = bool(options.pop("pretrained", False))
    if vocabulary is not None:
        # A trained model keeps its own vocabulary, which is larger.
        fit: dict[str, Any] = {"is_decoder": True, **({} if pretrained else {"vocab_size": vocabulary})}
    else:
        channels, height, width = input_shape
        fit = {
            "num_channels": channels,
            "num_labels": classes,
            "image_size": height if height == width else (height, width),
        }
    try:
        config = _config(named, fit, options)
        model = _made(config, named, pretrained, for_tokens=vocabulary is not None)
    except ConfigError:
        raise
    except (TypeError, ValueError, RuntimeError, OSError, ZeroDivisionError) as error:
        told = ", ".join(f"{key}={value!r}" for key, value in {**fit, **options}.items())
        raise ConfigError(f"transformers cannot make {named} with {told}: {error}") from error
    return TokenScores(model) if vocabulary is not None else ImageScores(model)


class TokenScores(nn.Module):
    """Scores (batch, classes, time) for tokens (batch, time)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What may come after each token."""
        logits: torch.Tensor = self.model(input_ids=x, use_cache=False).logits
        return logits.transpose(1, 2)


class ImageScores(nn.Module):
    """Scores (batch, classes) for images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What is on each image."""
        logits: torch.Tensor = self.model(pixel_values=x).logits
        return logits


def _config(named: str, fit: dict[str, Any], options: dict[str, Any]) -> Any:
    """The model's config, fitted to the data as far as it has such settings, with the options."""
    from transformers import CONFIG_MAPPING

    kind = _SAME_AS_TYPE.get(named, named)
    # Its get() knows only those that were loaded already.
    type_of_config: Any = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else None  # noqa: SIM401
    config = type_of_config() if type_of_config is not None else _from_hub(named)
    for option in options:
        if not hasattr(config, option):
            close = nearest(option, vars(config))
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"The model 'hf:{named}' has no option {option!r}.{hint} Its config has no such setting.")
    known = {key: value for key, value in fit.items() if hasattr(config, key)}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if "vocab_size" in known and (getattr(config, key, None) or 0) >= known["vocab_size"]:
            known[key] = None  # a special token that the data does not have
    settings = {key: list(v) if isinstance(v, tuple) else v for key, v in {**known, **options}.items()}
    if type_of_config is not None:
        return type_of_config(**settings)  # made whole, for some settings follow from others
    config.update(settings)
    return config


def _from_hub(named: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(named, local_files_only=True)
    except (OSError, ValueError):
        pass
    is_offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    why = "HF_HUB_OFFLINE is set"
    if not is_offline:
        try:
            return AutoConfig.from_pretrained(named)
        except (OSError, ValueError) as error:
            why = f"the hub did not give it ({str(error).splitlines()[0]})"
    close = nearest(named.rpartition("/")[2], [*names(), *_SAME_AS_TYPE])
    hint = f"Did you mean {' or '.join(f'hf:{name}' for name in close)}? " if close else ""
    raise ConfigError(
        f"The model 'hf:{named}' is no model type of transformers, it is not in the local cache, and {why}. {hint}"
        "Without a network a model type can be built from its config, such as hf:gpt2 or hf:vit; syncline models --all "
        "lists them."
    )


def _made(config: Any, named: str, pretrained: bool, *, for_tokens: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM, AutoModelForImageClassification

    maker: Any = AutoModelForCausalLM if for_tokens else AutoModelForImageClassification
    if pretrained:
        model: nn.Module = maker.from_pretrained(named, config=config, ignore_mismatched_sizes=True)
    else:
        model = maker.from_config(config)
    return model
