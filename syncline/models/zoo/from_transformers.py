"""Models from transformers: `hf:gpt2(n_layer=2, n_embd=64, n_head=2)`, `hf:vit(patch_size=4)`.

Here: `build`, the names, and adapters to the inputs and outputs of a run. The data decides on the kind: causal language
modeling for data with a vocabulary, classification for images.

A model type (`gpt2`, `vit`) is built from the default config of that type and the options, without a network. Any other
name is a model of the hub: its config comes from the local cache, else from the hub unless HF_HUB_OFFLINE is set. A few
well-known models have exactly the default config of their type, which is then used. Weights are random or, with
`pretrained=True`, from the cache or the hub.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from syncline.errors import ConfigError, check_options, did_you_mean

_SAME_AS_TYPE = {
    "bert-base-uncased": "bert",
    "google-bert/bert-base-uncased": "bert",
    "openai-community/gpt2": "gpt2",
    "distilbert-base-uncased": "distilbert",
    "google/vit-base-patch16-224": "vit",
    "microsoft/resnet-50": "resnet",
}
"""Models of the hub that have the default config of their type."""


def names() -> list[str]:
    """The model types for causal language modeling or image classification."""
    from transformers.models.auto import modeling_auto as auto

    return sorted({*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES})


def build(input_shape: tuple[int, ...], classes: int, vocabulary: int | None, named: str, **options: Any) -> nn.Module:
    """The model called `named`, for tokens if there is a vocabulary, else for images."""
    if vocabulary is None and len(input_shape) != 3:
        raise ConfigError(
            f"The model 'hf:{named}' cannot take samples of shape {input_shape}. Models of transformers need "
            "tokens (time,) with a vocabulary, such as 'shakespeare', or images (channels, height, width)."
        )
    pretrained = bool(options.pop("pretrained", False))
    if vocabulary is not None:
        # A pretrained model keeps its own, larger vocabulary.
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
        shown = ", ".join(f"{key}={value!r}" for key, value in {**fit, **options}.items())
        raise ConfigError(f"transformers cannot build {named} with {shown}: {error}") from error
    return TokenScores(model) if vocabulary is not None else ImageScores(model)


class TokenScores(nn.Module):
    """Scores (batch, classes, time) for tokens (batch, time)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits of the next token, at every position."""
        logits: torch.Tensor = self.model(input_ids=x, use_cache=False).logits
        return logits.transpose(1, 2)


class ImageScores(nn.Module):
    """Scores (batch, classes) for images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits of each image."""
        logits: torch.Tensor = self.model(pixel_values=x).logits
        return logits


def _config(named: str, fit: dict[str, Any], options: dict[str, Any]) -> Any:
    """The config of the model, with the options and the sizes of the data that it has settings for."""
    from transformers import CONFIG_MAPPING

    kind = _SAME_AS_TYPE.get(named, named)
    # Its get() finds only configs that are already loaded.
    type_of_config: Any = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else None  # noqa: SIM401
    config = type_of_config() if type_of_config is not None else _from_hub(named)
    # Some settings are properties of the config's class.
    check_options(f"The config of the model 'hf:{named}'", [o for o in options if not hasattr(config, o)], vars(config))
    known = {key: value for key, value in fit.items() if hasattr(config, key)}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if "vocab_size" in known and (getattr(config, key, None) or 0) >= known["vocab_size"]:
            known[key] = None  # a special token outside the data's vocabulary
    settings = {key: list(v) if isinstance(v, tuple) else v for key, v in {**known, **options}.items()}
    if type_of_config is not None:
        return type_of_config(**settings)  # built at once, because some settings depend on others
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
            why = f"the hub failed ({str(error).splitlines()[0]})"
    hint = did_you_mean(f"hf:{named.rpartition('/')[2]}", [f"hf:{name}" for name in (*names(), *_SAME_AS_TYPE)])
    raise ConfigError(
        f"The model 'hf:{named}' is not a model type of transformers, is not in the local cache, and {why}. {hint}"
        "Without a network, use a model type such as hf:gpt2 or hf:vit; `syncline models --all` lists "
        "them."
    )


def _made(config: Any, named: str, pretrained: bool, *, for_tokens: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM, AutoModelForImageClassification

    maker: Any = AutoModelForCausalLM if for_tokens else AutoModelForImageClassification
    if pretrained:
        model: nn.Module = maker.from_pretrained(named, config=config, ignore_mismatched_sizes=True)
    else:
        model = maker.from_config(config)
    return model
