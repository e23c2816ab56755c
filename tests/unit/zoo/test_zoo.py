"""The models by name: what they are, what they refuse, and that asking about them does not cost an import of torch."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
from torch import nn

from syncline import zoo
from syncline.errors import ConfigError, UnknownName

SHAPES = {"linear": (3, 5), "mlp": (1, 8, 8), "lenet": (1, 8, 8), "resnet18": (3, 8, 8)}
SMALL = {"resnet18": {"width": 4}}


def build_small(name: str, classes: int = 4) -> nn.Module:
    return zoo.build(name, SHAPES[name], classes, **SMALL.get(name, {}))


def parameter_count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_names_and_cards_are_known_without_importing_torch() -> None:
    code = (
        "import sys, syncline.zoo, syncline.zoo.registry as registry\n"
        "assert [registry.card(n).name for n in registry.names()] == registry.names()\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_zoo_holds_the_four_models_in_order() -> None:
    assert zoo.names() == ["lenet", "linear", "mlp", "resnet18"]


@pytest.mark.parametrize("name", zoo.names())
class TestEveryModel:
    def test_gives_one_output_per_class(self, name: str) -> None:
        model = build_small(name)
        assert model(torch.randn(3, *SHAPES[name])).shape == (3, 4)

    def test_is_the_same_after_the_same_seed_and_another_after_another(self, name: str) -> None:
        built = []
        for seed in (7, 7, 8):
            torch.manual_seed(seed)
            built.append(torch.cat([p.flatten() for p in build_small(name).parameters()]))
        assert torch.equal(built[0], built[1])
        assert not torch.equal(built[0], built[2])

    def test_gives_every_parameter_a_gradient(self, name: str) -> None:
        model = build_small(name)
        nn.functional.cross_entropy(model(torch.randn(3, *SHAPES[name])), torch.tensor([0, 1, 2])).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

    def test_has_a_frozen_card_whose_settings_torch_understands(self, name: str) -> None:
        card = zoo.card(name)
        assert card.name == name
        assert card.module == f"syncline.zoo.{name}"
        with pytest.raises(dataclasses.FrozenInstanceError):
            card.batch = 1  # type: ignore[misc]

        optimizer = dict(card.optimizer)
        made = getattr(torch.optim, str(optimizer.pop("name")))(build_small(name).parameters(), **optimizer)
        assert card.schedule is not None
        schedule = dict(card.schedule)
        schedule_name = str(schedule.pop("name"))
        filled_in = {"CosineAnnealingLR": {"T_max": 10}, "OneCycleLR": {"total_steps": 10, "max_lr": 0.1}}
        getattr(torch.optim.lr_scheduler, schedule_name)(made, **schedule, **filled_in[schedule_name])
        assert hasattr(nn.functional, card.loss)

    def test_refuses_an_option_it_does_not_have(self, name: str) -> None:
        with pytest.raises(ConfigError, match="colour"):
            zoo.build(name, SHAPES[name], 4, colour="red")

    @pytest.mark.parametrize("shape", [(), (0,), (3, -1, 8), (1, 8.0, 8)])
    def test_refuses_a_shape_that_is_none(self, name: str, shape: tuple[int, ...]) -> None:
        with pytest.raises(ConfigError, match="without the batch"):
            zoo.build(name, shape, 4)

    @pytest.mark.parametrize("classes", [0, -1, 2.0, True])
    def test_refuses_a_number_of_classes_that_is_none(self, name: str, classes: int) -> None:
        with pytest.raises(ConfigError, match="classes"):
            zoo.build(name, SHAPES[name], classes)


def test_lenet_on_mnist_has_the_431080_parameters_of_caffe() -> None:
    assert parameter_count(zoo.build("lenet", (1, 28, 28), 10)) == 431_080


def test_resnet18_on_cifar_has_11173962_parameters() -> None:
    assert parameter_count(zoo.build("resnet18", (3, 32, 32), 10)) == 11_173_962


def test_linear_has_one_weight_per_input_and_class() -> None:
    assert parameter_count(zoo.build("linear", (1, 28, 28), 10)) == 7_850


def test_mlp_takes_its_widths_from_the_option_hidden() -> None:
    model = zoo.build("mlp", (4,), 2, hidden=[5, 3])
    assert [m.out_features for m in model if isinstance(m, nn.Linear)] == [5, 3, 2]
    assert [m.out_features for m in zoo.build("mlp", (4,), 2) if isinstance(m, nn.Linear)] == [256, 128, 2]


@pytest.mark.parametrize("shape", [(1, 4, 4), (1, 8, 8), (1, 27, 5), (3, 28, 20), (1, 28, 28), (3, 33, 32)])
def test_lenet_adapts_to_the_size_of_the_images(shape: tuple[int, ...]) -> None:
    assert zoo.build("lenet", shape, 10)(torch.randn(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("shape", [(64,), (28, 28), (1, 3, 8), (1, 1, 28, 28)])
def test_lenet_refuses_what_is_not_an_image_and_says_what_to_do(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"'lenet'.*\(channels, height, width\).*Reshape"):
        zoo.build("lenet", shape, 10)


def test_resnet18_refuses_a_flat_vector() -> None:
    with pytest.raises(ConfigError, match=r"'resnet18' was asked for samples of shape \(64,\)"):
        zoo.build("resnet18", (64,), 10)


def test_an_unknown_model_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'lenet'"):
        zoo.card("lennet")


def test_an_unknown_option_is_answered_with_the_nearest_option() -> None:
    with pytest.raises(UnknownName, match=r"option of the model 'mlp' called 'hiden'. Did you mean 'hidden'"):
        zoo.build("mlp", (4,), 2, hiden=(3,))


@pytest.mark.parametrize("hidden", [64, (0,), ("64",), (1.5,), (True,)])
def test_mlp_refuses_widths_that_are_none(hidden: object) -> None:
    with pytest.raises(ConfigError, match="hidden"):
        zoo.build("mlp", (4,), 2, hidden=hidden)


@pytest.mark.parametrize("width", [0, 1.5, "64"])
def test_resnet18_refuses_a_width_that_is_none(width: object) -> None:
    with pytest.raises(ConfigError, match="width"):
        zoo.build("resnet18", (3, 32, 32), 10, width=width)
