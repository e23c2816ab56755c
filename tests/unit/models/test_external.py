"""Models of other packages by name: timm through a stand-in with its two functions, transformers for real, offline."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from syncline.cli.main import app
from syncline.config.spec import Spec
from syncline.errors import ConfigError, UnknownName
from syncline.models import zoo
from syncline.models.zoo import registry
from syncline.task import Task

TIMM = """
import torch

def list_models():
    return ["resnet50", "vit_tiny_patch16_224"]

def create_model(name, pretrained=False, num_classes=1000, in_chans=3, width=4):
    if width < 1:
        raise ValueError("width is too small")
    model = torch.nn.Sequential(torch.nn.Conv2d(in_chans, width, 3), torch.nn.AdaptiveAvgPool2d(1),
                                torch.nn.Flatten(), torch.nn.Linear(width, num_classes))
    model.was_asked_for = (name, pretrained)
    return model
"""


@pytest.fixture
def timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timm.py").write_text(TIMM)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    yield
    sys.modules.pop("timm", None)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))


def parameter_count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.usefixtures("timm")
class TestTimm:
    def test_a_model_gets_the_channels_and_classes_of_the_data_and_the_options(self) -> None:
        model = zoo.build("timm:resnet50", (1, 8, 8), 7, width=3)
        assert model(torch.randn(2, 1, 8, 8)).shape == (2, 7)
        assert model.was_asked_for == ("resnet50", False)
        assert model[0].out_channels == 3

    def test_pretrained_is_handed_on_and_a_tag_of_weights_is_part_of_the_name(self) -> None:
        model = zoo.build("timm:resnet50.a1_in1k", (3, 8, 8), 7, pretrained=True)
        assert model.was_asked_for == ("resnet50.a1_in1k", True)

    def test_an_unknown_name_is_answered_with_the_nearest(self) -> None:
        with pytest.raises(UnknownName, match="'resnet50'"):
            zoo.build("timm:resnet5", (3, 8, 8), 7)

    @pytest.mark.parametrize("options", [{"width": 0}, {"color": 3}])
    def test_what_timm_refuses_is_reported_with_its_reason(self, options: dict[str, int]) -> None:
        with pytest.raises(ConfigError, match=r"resnet50 .*(too small|color)"):
            zoo.build("timm:resnet50", (3, 8, 8), 7, **options)

    def test_a_vector_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"'timm:resnet50'.*\(64,\)"):
            zoo.build("timm:resnet50", (64,), 7)

    def test_tokens_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="needs floats"):
            zoo.build("timm:resnet50", (64,), 7, 7)

    def test_the_list_of_all_models_has_its_names_and_their_number(self) -> None:
        told = CliRunner().invoke(app, ["models", "--all"]).output
        assert "2 of timm:\n  timm:resnet50  timm:vit_tiny_patch16_224" in told


@pytest.mark.skipif(importlib.util.find_spec("timm") is not None, reason="timm is installed here")
def test_a_package_that_is_missing_is_reported_with_how_to_install_it() -> None:
    with pytest.raises(ConfigError, match=r"'timm:resnet50'.*not installed.*pip install 'syncline\[timm\]'"):
        Task(model="timm:resnet50", data="digits")


def test_a_task_is_checked_without_importing_transformers_or_torch() -> None:
    code = (
        "import sys\nfrom syncline.task import Task\n"
        "task = Task(model='hf:gpt2(n_layer=2)', data='digits').with_defaults()\n"
        "assert task.optimizer.name == 'AdamW' and not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("no_network")
class TestTransformers:
    def test_a_text_model_gives_scores_in_the_order_that_cross_entropy_wants(self) -> None:
        model = zoo.build("hf:gpt2", (6,), 11, 11, n_layer=2, n_embd=8, n_head=2)
        tokens = torch.randint(11, (3, 6))
        scores = model(tokens)
        assert scores.shape == (3, 11, 6)
        nn.functional.cross_entropy(scores, tokens).backward()
        assert all(p.grad is not None for p in model.parameters())

    @pytest.mark.parametrize("name", ["gpt2", "bert"])
    def test_a_text_model_does_not_see_what_comes_after(self, name: str) -> None:
        small = {"gpt2": {"n_layer": 1, "n_embd": 8, "n_head": 2}, "bert": {
            "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}}  # fmt: skip
        model = zoo.build(f"hf:{name}", (4,), 11, 11, **small[name]).eval()
        tokens = torch.zeros(1, 4, dtype=torch.int64)
        other = tokens.clone()
        other[0, 2] = 5
        differs = ((model(tokens) - model(other)).abs() > 1e-6).any(dim=1)[0]
        assert differs.tolist() == [False, False, True, True]

    @pytest.mark.parametrize(
        ("spec", "shape"),
        [
            ("hf:vit(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, patch_size=4)", 8),
            ("hf:resnet(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type='basic')", 32),
        ],
    )
    def test_an_image_model_gives_one_score_per_class(self, spec: str, shape: int) -> None:
        parsed = Spec.parse(spec)
        model = zoo.build(parsed.name, (1, shape, shape), 5, **parsed.options)
        assert model(torch.randn(2, 1, shape, shape)).shape == (2, 5)

    def test_a_well_known_name_of_the_hub_is_built_from_its_types_config(self) -> None:
        with torch.device("meta"):
            model = zoo.build("hf:bert-base-uncased", (8,), 30522, 30522)
        assert parameter_count(model) == pytest.approx(110e6, rel=0.01)  # what the paper says

    def test_without_a_network_other_names_are_answered_with_what_can_be_built(self) -> None:
        with pytest.raises(ConfigError, match=r"'hf:gpt3'.*HF_HUB_OFFLINE is set.*hf:gpt2"):
            zoo.build("hf:gpt3", (8,), 9, 9)

    def test_an_unknown_option_is_answered_with_the_nearest(self) -> None:
        with pytest.raises(ConfigError, match=r"'n_layers'.*'n_layer'"):
            zoo.build("hf:gpt2", (8,), 9, 9, n_layers=2)

    def test_what_transformers_refuses_is_reported_with_its_reason(self) -> None:
        with pytest.raises(ConfigError, match=r"gpt2 .*n_embd=9"):
            zoo.build("hf:gpt2", (8,), 9, 9, n_embd=9, n_head=2)

    def test_a_vector_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"'hf:gpt2'.*\(8,\).*vocabulary"):
            zoo.build("hf:gpt2", (8,), 9)


def test_the_list_of_models_has_sizes_papers_and_shapes() -> None:
    told = " ".join(CliRunner().invoke(app, ["models"]).output.split())
    for name in zoo.names():
        fitted = zoo.card(name).reference
        assert fitted is not None
        assert f"{fitted.parameters:,}" in told
        assert str(fitted.input_shape) in told
        assert zoo.card(name).paper in told
    assert f"{len(zoo.names())} models" in told


def test_the_list_of_all_models_counts_more_than_200() -> None:
    told = CliRunner().invoke(app, ["models", "--all", "--json"]).output
    listed = [json.loads(line)["name"] for line in told.splitlines()]
    assert len(listed) == len(set(listed)) > 200
    assert {"lenet", "hf:gpt2", "hf:vit"} <= set(listed)
    assert all(registry.is_known(name) for name in listed)
