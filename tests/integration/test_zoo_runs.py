"""Models of the zoo in real runs: what is trained in stages, what reads tokens, what comes from another package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import syncline
from syncline.telemetry.events import Evaluated, InfoMessage
from syncline.telemetry.run_dir import RunDir

STACKED = "stacked-autoencoder(hidden=(32, 12), pretrain=0.75)"


def train(out: Path, **given):
    return syncline.train(out=str(out), quiet=True, tune="off", **given)


def test_a_stacked_autoencoder_writes_down_each_layers_error_and_it_falls(tmp_path):
    result = train(tmp_path, model=STACKED, data="digits", workers=2, epochs=8, batch=32)
    events = list(RunDir(result.run_dir).read_events())
    noted = [e.details["stage"] for e in events if isinstance(e, InfoMessage) and "stage" in e.details]
    assert noted == ["layer1", "layer2", "whole"]
    for stage in noted:
        key = f"test/loss_{stage}"
        errors = [e.metrics[key] for e in events if isinstance(e, Evaluated) and key in e.metrics]
        assert len(errors) == (2 if stage == "whole" else 3)
        assert errors[-1] < errors[0]
    assert result.metrics["test/loss"] == result.metrics["test/loss_whole"]


def test_training_in_stages_gives_the_same_parameters_for_any_number_of_workers(tmp_path):
    alone, together = (
        train(tmp_path, model=STACKED, data="digits", workers=n, epochs=4, batch=64, name=f"{n}") for n in (1, 2)
    )
    assert alone.metrics.keys() == together.metrics.keys()
    for one, other in zip(alone.model.parameters(), together.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "model",
    [
        "lstm(hidden=24)",
        "transformer(width=16, heads=2, layers=1)",
        "hf:gpt2(n_layer=1, n_embd=16, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)",
    ],
)
def test_a_model_learns_tokens_with_two_workers(model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokens = (torch.arange(33) * 3 + torch.arange(64)[:, None]) % 11  # each token is the one before and 3
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    result = train(
        tmp_path, model=model, data=(inputs, targets), test=(inputs[:16], targets[:16]), workers=2, epochs=25, batch=16,
        loss="cross_entropy", optimizer=syncline.adam(lr=0.02),
    )  # fmt: skip
    assert result.metrics["test/accuracy"] > 0.9
    assert result.model(inputs[:2]).shape == (2, 11, 32)


def test_an_image_model_of_transformers_trains_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    small = "hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, patch_size=2"
    result = train(
        tmp_path, model=f"hf:vit({small})", data="digits", workers=2, epochs=6, batch=32, optimizer=syncline.adam(0.005)
    )
    assert result.metrics["test/accuracy"] > 0.5
