"""The models by name: what they are, what they refuse, and that asking about them does not cost an import of torch."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from syncline.errors import ConfigError, UnknownName
from syncline.models import zoo
from syncline.models.catalog import losses as catalog

SHAPES = {
    "linear": (3, 5), "mlp": (1, 8, 8), "lenet": (1, 8, 8), "resnet18": (3, 8, 8), "resnet50": (3, 8, 8),
    "resnet34": (3, 8, 8), "alexnet": (1, 16, 15), "vgg11": (1, 8, 9), "googlenet": (2, 9, 8), "lstm": (5, 3),
    "autoencoder": (1, 8, 8), "stacked-autoencoder": (1, 8, 8), "transformer": (6,), "destin": (1, 8, 8),
}  # fmt: skip
SMALL: dict[str, dict[str, object]] = {
    "resnet18": {"width": 4}, "resnet34": {"width": 4}, "resnet50": {"width": 2}, "alexnet": {"hidden": 8},
    "vgg11": {"hidden": 8}, "lstm": {"hidden": 4}, "autoencoder": {"hidden": (6, 2)},
    "stacked-autoencoder": {"hidden": (6, 2)}, "destin": {"grid": (2, 1), "centroids": 3},
    "transformer": {"width": 8, "heads": 2, "layers": 2},
}  # fmt: skip
VOCABULARY = {"transformer": 9}
CLASSIFIERS = [n for n in zoo.names() if zoo.card(n).target == "given" and n not in VOCABULARY]


def build_small(name: str, classes: int = 4) -> nn.Module:
    return zoo.build(name, SHAPES[name], classes, VOCABULARY.get(name), **SMALL.get(name, {}))


def some_inputs(name: str, count: int = 3) -> torch.Tensor:
    if name in VOCABULARY:
        return torch.randint(VOCABULARY[name], (count, *SHAPES[name]))
    return torch.randn(count, *SHAPES[name])


def parameter_count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_names_and_cards_are_known_without_importing_torch() -> None:
    code = (
        "import sys, syncline.models.zoo, syncline.models.zoo.registry as registry\n"
        "assert [registry.card(n).name for n in registry.names()] == registry.names()\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_zoo_holds_the_models_in_order() -> None:
    assert zoo.names() == [
        "alexnet", "autoencoder", "destin", "googlenet", "lenet", "linear", "lstm", "mlp", "resnet18", "resnet34",
        "resnet50", "stacked-autoencoder", "transformer", "vgg11",
    ]  # fmt: skip


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_gives_one_output_per_class(name: str) -> None:
    assert build_small(name)(some_inputs(name)).shape == (3, 4)


@pytest.mark.parametrize(
    ("name", "options"), [("lstm", {"hidden": 4, "layers": 2}), ("transformer", {"width": 8, "heads": 2, "layers": 2})]
)
class TestAModelOfTokens:
    def test_gives_one_output_per_class_and_place(self, name: str, options: dict[str, object]) -> None:
        tokens = torch.randint(9, (3, 6))
        scores = zoo.build(name, (6,), 7, 9, **options)(tokens)
        assert scores.shape == (3, 7, 6)
        nn.functional.cross_entropy(scores, torch.randint(7, (3, 6))).backward()

    def test_sees_the_tokens_before_and_none_after(self, name: str, options: dict[str, object]) -> None:
        model = zoo.build(name, (6,), 9, 9, **options).eval()
        tokens = torch.zeros(1, 6, dtype=torch.int64)
        other = tokens.clone()
        other[0, 3] = 5
        differs = (model(tokens) != model(other)).any(dim=1)[0]
        assert differs.tolist() == [False, False, False, True, True, True]

    def test_reads_shorter_texts_than_it_was_built_for(self, name: str, options: dict[str, object]) -> None:
        model = zoo.build(name, (6,), 9, 9, **options).eval()
        tokens = torch.randint(9, (2, 6))
        torch.testing.assert_close(model(tokens[:, :4]), model(tokens)[:, :, :4])


def test_a_model_of_images_is_not_built_for_tokens_and_names_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"'lenet'.*floats.*vocabulary of 9.*lstm, transformer"):
        zoo.build("lenet", (1, 8, 8), 4, 9)


def test_a_transformer_is_not_built_for_images_and_names_a_data_set_with_text() -> None:
    with pytest.raises(ConfigError, match=r"'transformer'.*\(1, 8, 8\).*'shakespeare'"):
        zoo.build("transformer", (1, 8, 8), 4)


@pytest.mark.parametrize("vocabulary", [0, -3, 1.5, True])
def test_a_vocabulary_that_is_none_is_refused(vocabulary: object) -> None:
    with pytest.raises(ConfigError, match="vocabulary of"):
        zoo.build("lstm", (6,), 4, vocabulary)  # type: ignore[arg-type]


def test_the_heads_of_a_transformer_share_its_width_evenly() -> None:
    with pytest.raises(ConfigError, match="width that is a multiple of 3"):
        zoo.build("transformer", (6,), 9, 9, width=8, heads=3)


@pytest.mark.parametrize("name", zoo.names())
class TestEveryModel:
    def test_has_as_many_parameters_for_the_stated_data_as_its_card_says(self, name: str) -> None:
        fitted = zoo.card(name).reference
        with torch.device("meta"):
            model = zoo.build(name, fitted.input_shape, fitted.classes, fitted.vocabulary)
        assert parameter_count(model) == fitted.parameters

    def test_says_where_it_was_published(self, name: str) -> None:
        assert re.search(r"\b(19|20)\d\d\b", zoo.card(name).paper)

    def test_is_the_same_after_the_same_seed_and_another_after_another(self, name: str) -> None:
        built = []
        for seed in (7, 7, 8):
            torch.manual_seed(seed)
            built.append(torch.cat([p.flatten() for p in build_small(name).parameters()]))
        assert torch.equal(built[0], built[1])
        assert not torch.equal(built[0], built[2])

    def test_gives_every_parameter_a_gradient(self, name: str) -> None:
        model = build_small(name)
        model(some_inputs(name)).square().mean().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

    def test_has_a_frozen_card_whose_settings_torch_understands(self, name: str) -> None:
        card = zoo.card(name)
        assert card.name == name
        assert card.summary.endswith(".")
        with pytest.raises(dataclasses.FrozenInstanceError):
            card.batch = 1  # type: ignore[misc]

        assert hasattr(nn.functional, card.loss) or card.loss in catalog.functions()
        if card.learns_by == "sums":
            return  # it brings its own optimizer
        optimizer = dict(card.optimizer)
        made = getattr(torch.optim, str(optimizer.pop("name")))(build_small(name).parameters(), **optimizer)
        if card.schedule is not None:
            schedule = dict(card.schedule)
            schedule_name = str(schedule.pop("name"))
            filled_in = {"CosineAnnealingLR": {"T_max": 10}, "OneCycleLR": {"total_steps": 10, "max_lr": 0.1}}
            getattr(torch.optim.lr_scheduler, schedule_name)(made, **schedule, **filled_in[schedule_name])

    def test_refuses_an_option_it_does_not_have(self, name: str) -> None:
        with pytest.raises(ConfigError, match="color"):
            zoo.build(name, SHAPES[name], 4, color="red")

    @pytest.mark.parametrize("shape", [(), (0,), (3, -1, 8), (1, 8.0, 8)])
    def test_refuses_a_shape_that_is_none(self, name: str, shape: tuple[int, ...]) -> None:
        with pytest.raises(ConfigError, match="without the batch"):
            zoo.build(name, shape, 4)

    @pytest.mark.parametrize("classes", [0, -1, 2.0, True])
    def test_refuses_a_number_of_classes_that_is_none(self, name: str, classes: int) -> None:
        with pytest.raises(ConfigError, match="classes"):
            zoo.build(name, SHAPES[name], classes)


@pytest.mark.parametrize(
    ("name", "options", "published"),
    [
        ("alexnet", {}, 62_378_344),
        ("vgg11", {"batch_norm": False}, 132_863_336),
        ("resnet18", {"stem": "imagenet"}, 11_689_512),
        ("resnet34", {"stem": "imagenet"}, 21_797_672),
        ("resnet50", {"stem": "imagenet"}, 25_557_032),
    ],
)
def test_a_model_for_imagenet_has_as_many_parameters_as_published(name, options, published) -> None:
    with torch.device("meta"):
        assert parameter_count(zoo.build(name, (3, 224, 224), 1000, **options)) == published


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50", "googlenet"])
@pytest.mark.parametrize(("stem", "side"), [("cifar", 32), ("imagenet", 64)])
def test_a_stem_can_be_chosen_for_small_or_large_images(name: str, stem: str, side: int) -> None:
    small = {} if name == "googlenet" else {"width": 2}
    assert zoo.build(name, (3, side, side), 5, stem=stem, **small)(torch.randn(2, 3, side, side)).shape == (2, 5)


@pytest.mark.parametrize("name", ["resnet34", "googlenet"])
def test_an_unknown_stem_is_answered_with_those_that_there_are(name: str) -> None:
    with pytest.raises(UnknownName, match="'cifar'"):
        zoo.build(name, (3, 32, 32), 10, stem="cifar10")


@pytest.mark.parametrize("shape", [(1, 2, 3), (1, 8, 8), (3, 32, 20), (3, 40, 64)])
def test_vgg11_leaves_out_a_pooling_that_would_leave_nothing(shape: tuple[int, ...]) -> None:
    assert zoo.build("vgg11", shape, 10, hidden=8)(torch.randn(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize(("name", "shape"), [("vgg11", (64,)), ("googlenet", (1, 7, 8)), ("googlenet", (28, 28))])
def test_a_model_of_images_refuses_what_it_cannot_convolve(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}'.*\(channels, height, width\)"):
        zoo.build(name, shape, 10)


@pytest.mark.parametrize("options", [{"hidden": 0}, {"dropout": 1.0}, {"batch_norm": 1}])
def test_vgg11_refuses_options_that_make_no_sense(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"The option {next(iter(options))} of the model 'vgg11'"):
        zoo.build("vgg11", (3, 32, 32), 10, **options)


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


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
def test_a_resnet_refuses_a_flat_vector(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}'.*\(64,\)"):
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
    with pytest.raises(UnknownName) as caught:
        zoo.card("lennet")
    assert caught.value.facts["nearest"][0] == "lenet"


def test_an_unknown_option_is_answered_with_the_nearest_option() -> None:
    with pytest.raises(UnknownName) as caught:
        zoo.build("mlp", (4,), 2, hiden=(3,))
    assert caught.value.code == "unknown-option"
    assert (caught.value.facts["name"], caught.value.facts["nearest"]) == ("hiden", ["hidden"])


@pytest.mark.parametrize("hidden", [64, (0,), ("64",), (1.5,), (True,)])
def test_mlp_refuses_widths_that_are_none(hidden: object) -> None:
    with pytest.raises(ConfigError, match="hidden"):
        zoo.build("mlp", (4,), 2, hidden=hidden)


@pytest.mark.parametrize("width", [0, 1.5, "64"])
@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
def test_a_resnet_refuses_a_width_that_is_none(name: str, width: object) -> None:
    with pytest.raises(ConfigError, match="width"):
        zoo.build(name, (3, 32, 32), 10, width=width)
