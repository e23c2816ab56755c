"""Whatever `syncline list` names can be made and used, and there is more of it than the best framework of 2018 had."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import syncline
from syncline.cli.kinds import everything
from syncline.config.spec import Spec
from syncline.models.catalog import (
    activations,
    initializers,
    layers,
    losses,
    metrics,
    optimizers,
    regularizers,
    schedules,
)
from syncline.task import Task
from syncline.workers.build import build_loss, build_optimizer, build_schedule
from syncline.workers.metrics import MetricSet


@pytest.mark.parametrize(
    ("kind", "best_of_2018"),
    [
        ("activations", 17), ("metrics", 33), ("initializers", 14), ("losses", 20), ("layers", 90), ("optimizers", 17),
        ("regularizers", 2), ("models", 47),
    ],
)  # fmt: skip
def test_there_is_more_of_each_than_in_the_study_of_2018(kind, best_of_2018):
    assert len(everything(kind)) > best_of_2018


@pytest.mark.parametrize("kind", ["activations", "initializers", "layers", "losses", "optimizers", "regularizers"])
def test_every_name_has_a_sentence_of_plain_words(kind):
    for name, sentence in everything(kind).items():
        if name == "CrossMapLRN2d":  # torch says nothing of it
            continue
        assert sentence.endswith("."), name
        assert not {"`", "\\"} & set(sentence), (name, sentence)


IMAGE, VOLUME, SERIES, ROW, STEPS = (4, 8, 8), (4, 6, 6, 6), (4, 8), (8,), (5, 8)
_LAYERS: dict[str, tuple[str, tuple[int, ...]]] = {
    **{f"{kind}{d}d": (f"({arguments})", shape)
       for d, shape in ((1, SERIES), (2, IMAGE), (3, VOLUME))
       for kind, arguments in {
           "Conv": "3, 3", "ConvTranspose": "3, 3", "MaxPool": "2", "AvgPool": "2", "AdaptiveAvgPool": "2",
           "AdaptiveMaxPool": "2", "LPPool": "2, 2", "ConstantPad": "1, 0.5", "ZeroPad": "1", "ReflectionPad": "1",
           "ReplicationPad": "1", "CircularPad": "1", "Dropout": "", "InstanceNorm": "", "BatchNorm": "",
           "FractionalMaxPool": "2, output_size=2",
       }.items()},
    "Bilinear": ("(3)", ROW), "ChannelShuffle": ("(2)", IMAGE), "CrossMapLRN2d": ("(3)", IMAGE),
    "Embedding": ("(7)", STEPS), "EmbeddingBag": ("(7)", (5,)), "Fold": ("((5, 5), 2)", (8, 16)),
    "GRU": ("(6)", STEPS), "LSTM": ("(6)", STEPS), "RNN": ("(6, nonlinearity='relu')", STEPS),
    "GRUCell": ("(6)", ROW), "LSTMCell": ("(6)", ROW), "RNNCell": ("(6)", ROW), "GroupNorm": ("(2)", IMAGE),
    "Linear": ("(3)", ROW), "LocalResponseNorm": ("(2)", IMAGE), "MultiheadAttention": ("(2)", STEPS),
    "PixelShuffle": ("(2)", IMAGE), "PixelUnshuffle": ("(2)", IMAGE), "Transformer": ("(8, 2, 1, 1, 16)", STEPS),
    "TransformerDecoderLayer": ("(2, 16)", STEPS), "TransformerEncoderLayer": ("(2, 16)", STEPS),
    "Unflatten": ("(1, (2, 4))", ROW), "Unfold": ("(2)", IMAGE), "Upsample": ("(scale_factor=2)", IMAGE),
    "UpsamplingBilinear2d": ("(scale_factor=2)", IMAGE), "UpsamplingNearest2d": ("(scale_factor=2)", IMAGE),
    "Permute": ("(2, 1)", STEPS), "Reshape": ("((2, 4))", ROW), "Average": ("(1)", STEPS), "Last": ("", STEPS),
    "Squeeze": ("(2)", (5, 1)), "Unsqueeze": ("(1)", ROW), "SinePositions": ("", STEPS), "MatMul": ("", (6, 6)),
}  # fmt: skip
_TAKES_TWO = {"Bilinear", "CosineSimilarity", "PairwiseDistance", "Transformer", "TransformerDecoderLayer"}


@pytest.mark.parametrize("name", sorted(layers.names()))
def test_every_layer_is_made_by_name_from_the_shape_of_its_input_and_can_be_trained(name):
    arguments, shape = _LAYERS.get(name, ("", ROW))
    takes_two = name in _TAKES_TWO or name in layers.joining()
    sources = ["input", "input"] if takes_two else ["input"]
    is_embedding = name.startswith("Embedding")
    network = syncline.declared([{"layer": name + arguments, "from": sources}])
    model = network.build(shape, vocabulary=11 if is_embedding else None)
    sample = torch.randint(0, 11, (3, *shape)) if is_embedding else torch.rand(3, *shape, requires_grad=True)
    output = model(sample)
    assert len(output) == 3
    output.sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None


@pytest.mark.parametrize("name", sorted(activations.table()))
def test_every_activation_gives_finite_values_and_gradients(name):
    options = {"Threshold": "(0.1, 0.0)", "Softmax": "(1)", "Softmin": "(1)", "LogSoftmax": "(1)"}.get(name, "")
    model = syncline.declared([name + options]).build((4, 2, 2))
    sample = torch.randn(3, 4, 2, 2, requires_grad=True)
    output = model(sample)
    output.square().sum().backward()
    assert torch.isfinite(output).all()
    assert torch.isfinite(sample.grad).all()
    assert name == "GLU" or output.shape == sample.shape


def _loss_inputs(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    output, classes = torch.randn(6, 4, generator=generator), torch.tensor([0, 1, 2, 3, 1, 2])
    signs = torch.tensor([[1.0, -1.0, 1.0, -1.0]]).expand(6, 4)
    numbers = torch.rand(6, 4, generator=generator)
    of_classes = {"CrossEntropyLoss", "MultiMarginLoss", "dice", "focal", "generalized_cross_entropy", "jaccard",
                  "squared_hinge", "tversky"}  # fmt: skip
    if name in of_classes:
        return output, classes
    special = {
        "NLLLoss": (output.log_softmax(1), classes), "BCELoss": (output.sigmoid(), numbers),
        "KLDivLoss": (output.log_softmax(1), numbers.softmax(1)), "SoftMarginLoss": (output, signs),
        "HingeEmbeddingLoss": (output, signs), "MultiLabelMarginLoss": (output, torch.tensor([[1, 2, -1, 0]] * 6)),
    }  # fmt: skip
    return special.get(name, (output, numbers))


@pytest.mark.parametrize("name", sorted(losses.listed()))
def test_every_loss_is_one_number_with_a_gradient_that_lowers_it(name):
    loss = build_loss(Spec(name, {"reduction": "batchmean"} if name == "KLDivLoss" else {}))
    output, target = _loss_inputs(name)
    output = output.detach().requires_grad_()
    value = loss(output, target)
    assert value.dim() == 0
    (gradient,) = torch.autograd.grad(value, output)
    assert loss(output - 1e-3 * gradient, target) < value


@pytest.mark.parametrize("name", sorted(optimizers.table()))
def test_every_optimizer_lowers_a_quadratic(name):
    torch.manual_seed(0)
    model = nn.Linear(3, 4, bias=False)  # Muon takes matrices only
    if name == "SparseAdam":
        model = nn.Embedding(4, 3, sparse=True)
    goal = torch.ones(4, 3)
    optimizer = build_optimizer(Task(model=model, data=[0], optimizer=Spec(name)), model)
    first = float((model.weight - goal).square().sum().detach())
    for _ in range(30):
        optimizer.zero_grad()
        weight = model(torch.arange(4)) if name == "SparseAdam" else model.weight
        (weight - goal).square().sum().backward()
        optimizer.step()
    assert float((model.weight - goal).square().sum().detach()) < first


@pytest.mark.parametrize("name", sorted(schedules.listed()))
def test_every_schedule_changes_the_learning_rate_of_a_run(name):
    options: dict[str, Any] = {
        "StepLR": {"step_size": 2}, "MultiStepLR": {"milestones": [2, 4]}, "ExponentialLR": {"gamma": 0.5},
        "CosineAnnealingWarmRestarts": {"T_0": 5}, "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1},
        "ReduceLROnPlateau": {"patience": 1},
    }.get(name, {})  # fmt: skip
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    schedule = build_schedule(Spec(name, options), optimizer, total_steps=10, epochs=10)
    assert schedule is not None
    rates = []
    for step in range(1, 11):
        optimizer.step()
        schedule.after_step(step)
        schedule.after_epoch(1.0)
        rates.append(optimizer.param_groups[0]["lr"])
    assert len(set(rates)) > 1


@pytest.mark.parametrize("name", sorted(initializers.table()))
def test_every_initializer_fills_a_weight_by_name(name):
    arguments = {"constant": "(0.5)", "sparse": "(0.5)"}.get(name, "")
    layer = "conv1d(4, 3)" if name in ("dirac", "delta_orthogonal") else "linear(4)"
    torch.manual_seed(0)
    before = syncline.declared([layer]).build((4, 8))[0].weight
    torch.manual_seed(0)
    after = syncline.declared([{"layer": layer, "init": name + arguments}]).build((4, 8))[0].weight
    assert torch.isfinite(after).all()
    assert not torch.equal(before, after)


@pytest.mark.parametrize("name", sorted(regularizers.penalties()))
def test_every_penalty_is_a_positive_number_whose_gradient_lowers_it(name):
    penalty = regularizers.penalties()[name]
    weight = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    value = penalty(weight, 0.5) if name != "elastic_net" else penalty(weight, 0.2, 0.3)
    assert value > 0
    (gradient,) = torch.autograd.grad(value, weight)
    again = (
        penalty(weight - 1e-4 * gradient, 0.5) if name != "elastic_net" else penalty(weight - 1e-4 * gradient, 0.2, 0.3)
    )
    assert again < value


def _metric_inputs(name: str) -> tuple[torch.Tensor, torch.Tensor, str]:
    generator = torch.Generator().manual_seed(2)
    module = metrics.table()[name].__module__
    if "segmentation" in module or ".image" in module:
        size = 180 if name.startswith("MultiScale") else 16
        images = torch.rand(2, 4, 1 if size == 180 else 3, size, size, generator=generator)
        # Without a range these take that of each batch, so they differ from batch to batch by what they are.
        needs_range = "StructuralSimilarity" in name or name == "PeakSignalNoiseRatio"
        return images[0], images[1], "(data_range=1.0)" * needs_range
    if module.startswith("torchmetrics.classification") and name != "LogAUC":
        return torch.randn(12, 4, generator=generator), torch.arange(12) % 4, ""
    if name == "LogAUC":
        return torch.rand(12, generator=generator), torch.arange(12) % 2, ""
    if module.startswith("torchmetrics.nominal"):
        return torch.randn(12, 4, generator=generator), torch.arange(12) % 4, ""
    if module.startswith("torchmetrics.audio"):
        return *torch.randn(2, 12, 700, generator=generator), ""
    pair = torch.rand(2, 12, 5, generator=generator) + 0.1
    if name in ("CosineSimilarity", "KLDivergence"):
        return pair[0].softmax(1), pair[1].softmax(1), ""
    options = {"CriticalSuccessIndex": "(threshold=0.5)", "MinkowskiDistance": "(p=3)"}.get(name, "")
    return pair[0, :, 0], pair[1, :, 0], options


@pytest.fixture
def one_thread() -> Iterator[None]:
    """With two, torch 2.13's MKL fails on this processor to solve several systems of equations at once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", sorted(metrics.listed()))
@pytest.mark.usefixtures("one_thread")
def test_every_metric_computed_in_parts_is_what_it_is_over_everything(name):
    output, target, options = _metric_inputs(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, parted = (MetricSet([Spec.parse(name + options)]) for _ in range(2))
        expected = whole.compute([whole.states(output, target)])[name]
        cuts = [slice(0, 4), slice(4, 6), slice(6, None)] if len(output) > 6 else [slice(0, 2), slice(2, None)]
        found = parted.compute([parted.states(output[cut], target[cut]) for cut in cuts])[name]
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
