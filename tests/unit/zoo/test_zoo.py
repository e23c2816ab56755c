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

SHAPES = {
    "linear": (3, 5), "mlp": (1, 8, 8), "lenet": (1, 8, 8), "resnet18": (3, 8, 8), "resnet50": (3, 8, 8),
    "alexnet": (1, 16, 15), "lstm": (5, 3), "autoencoder": (1, 8, 8),
}  # fmt: skip
SMALL: dict[str, dict[str, object]] = {
    "resnet18": {"width": 4}, "resnet50": {"width": 2}, "alexnet": {"hidden": 8}, "lstm": {"hidden": 4},
    "autoencoder": {"hidden": (6, 2)},
}  # fmt: skip
CLASSIFIERS = [name for name in zoo.names() if zoo.card(name).target == "given"]


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


def test_the_zoo_holds_the_models_in_order() -> None:
    assert zoo.names() == ["alexnet", "autoencoder", "lenet", "linear", "lstm", "mlp", "resnet18", "resnet50"]


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_gives_one_output_per_class(name: str) -> None:
    assert build_small(name)(torch.randn(3, *SHAPES[name])).shape == (3, 4)


@pytest.mark.parametrize("name", zoo.names())
class TestEveryModel:
    def test_is_the_same_after_the_same_seed_and_another_after_another(self, name: str) -> None:
        built = []
        for seed in (7, 7, 8):
            torch.manual_seed(seed)
            built.append(torch.cat([p.flatten() for p in build_small(name).parameters()]))
        assert torch.equal(built[0], built[1])
        assert not torch.equal(built[0], built[2])

    def test_gives_every_parameter_a_gradient(self, name: str) -> None:
        model = build_small(name)
        model(torch.randn(3, *SHAPES[name])).square().mean().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

    def test_has_a_frozen_card_whose_settings_torch_understands(self, name: str) -> None:
        card = zoo.card(name)
        assert card.name == name
        assert card.summary.endswith(".")
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


def test_resnet50_on_cifar_has_23520842_parameters() -> None:
    assert parameter_count(zoo.build("resnet50", (3, 32, 32), 10)) == 23_520_842


def test_alexnet_on_imagenet_has_the_62378344_parameters_of_the_paper() -> None:
    with torch.device("meta"):
        assert parameter_count(zoo.build("alexnet", (3, 224, 224), 1000)) == 62_378_344


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


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_a_resnet_refuses_a_flat_vector(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}' was asked for samples of shape \(64,\)"):
        zoo.build(name, (64,), 10)


@pytest.mark.parametrize("shape", [(1, 15, 15), (1, 28, 28), (3, 32, 32), (2, 15, 62), (3, 63, 63), (3, 64, 200)])
def test_alexnet_adapts_to_the_size_of_the_images(shape: tuple[int, ...]) -> None:
    assert zoo.build("alexnet", shape, 10, hidden=8)(torch.randn(1, *shape)).shape == (1, 10)


@pytest.mark.parametrize("shape", [(64,), (28, 28), (1, 14, 28), (1, 8, 8)])
def test_alexnet_refuses_images_that_are_too_small_and_names_models_that_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"'alexnet'.*sides of 15 or more.*'lenet' for smaller"):
        zoo.build("alexnet", shape, 10)


@pytest.mark.parametrize(
    "options", [{"hidden": 0}, {"hidden": 1.5}, {"dropout": 1}, {"dropout": -0.1}, {"dropout": True}]
)
def test_alexnet_refuses_options_that_make_no_sense(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"The option {next(iter(options))} of the model 'alexnet'"):
        zoo.build("alexnet", (1, 28, 28), 10, **options)


def test_lstm_reads_an_image_row_by_row() -> None:
    model = zoo.build("lstm", (2, 5, 3), 4, hidden=6)
    images = torch.randn(7, 2, 5, 3)
    rows = torch.cat([images[:, 0], images[:, 1]], dim=2)  # five steps, each a row of both channels
    assert torch.equal(model(images), model(rows))


def test_lstm_looks_at_every_step_in_order() -> None:
    model = zoo.build("lstm", (5, 3), 4, hidden=6, layers=2)
    sequence = torch.randn(1, 5, 3)
    assert not torch.equal(model(sequence), model(sequence.flip(1)))


@pytest.mark.parametrize("shape", [(64,), (1, 1, 28, 28)])
def test_lstm_refuses_what_is_no_sequence(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"'lstm'.*\(time, features\)"):
        zoo.build("lstm", shape, 10)


@pytest.mark.parametrize("options", [{"hidden": 0}, {"layers": "2"}])
def test_lstm_refuses_sizes_that_are_none(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"The option {next(iter(options))} of the model 'lstm'"):
        zoo.build("lstm", (5, 3), 4, **options)


@pytest.mark.parametrize("shape", [(7,), (4, 3), (1, 8, 8)])
def test_autoencoder_gives_back_the_shape_of_its_input_through_a_code(shape: tuple[int, ...]) -> None:
    model = zoo.build("autoencoder", shape, 10, hidden=(6, 2))
    assert model(torch.randn(3, *shape)).shape == (3, *shape)
    assert min(m.out_features for m in model if isinstance(m, nn.Linear)) == 2


@pytest.mark.parametrize("hidden", [30, (), (0,), (1.5,)])
def test_autoencoder_refuses_widths_that_are_none(hidden: object) -> None:
    with pytest.raises(ConfigError, match="hidden"):
        zoo.build("autoencoder", (4,), 2, hidden=hidden)


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
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_a_resnet_refuses_a_width_that_is_none(name: str, width: object) -> None:
    with pytest.raises(ConfigError, match="width"):
        zoo.build(name, (3, 32, 32), 10, width=width)
