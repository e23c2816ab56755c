"""Batch normalization over several workers computes what one process computes with the whole batch."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncline.comms.collective import Collective, Solo
from syncline.compute.batch_norm import (
    CollectiveStatistics,
    has_global_batch_norm,
    synchronize_batch_norm,
    take_part_without_samples,
)
from syncline.errors import ConfigError, PeerFailed
from syncline.models import zoo
from syncline.testing.threads import run_on_threads, thread_collectives

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
SHAPES = {nn.BatchNorm1d: (8, 3), nn.BatchNorm2d: (8, 3, 4, 5), nn.BatchNorm3d: (8, 3, 2, 3, 2)}


class Step(NamedTuple):
    """What one training step left behind, in the scale of one process with the whole batch."""

    outputs: torch.Tensor
    input_gradient: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


class CountingCollective:
    """Notes the sizes of the sums that pass through."""

    def __init__(self, inner: Collective) -> None:
        self.inner = inner
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def all_reduce_(self, tensor: torch.Tensor, weight: float = 1.0) -> None:
        self.sizes.append(tensor.numel())
        self.inner.all_reduce_(tensor, weight)


def sample_losses(outputs: torch.Tensor) -> torch.Tensor:
    """One loss for each sample, with a gradient that differs everywhere."""
    mask = torch.linspace(-1, 2, math.prod(outputs.shape[1:]), dtype=outputs.dtype).view(outputs.shape[1:])
    return (outputs.square() * mask + outputs.sin()).flatten(1).sum(1)


def one_process(model: nn.Module, x: torch.Tensor, steps: int = 1) -> Step:
    model = copy.deepcopy(model)
    for _ in range(steps):
        model.zero_grad()
        whole = x.clone().requires_grad_()
        outputs = model(whole)
        sample_losses(outputs).mean().backward()
    assert whole.grad is not None
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Step(outputs.detach(), whole.grad, gradients, dict(model.named_buffers()))


def many_workers(
    model: nn.Module, x: torch.Tensor, shares: Sequence[int], *, empty: str = "context", steps: int = 1
) -> list[Step]:
    """The same steps by one worker for each share; one result for each worker, with the parts put together.

    A worker without samples either borrows one (`empty="context"`) or runs on none (`empty="input"`).
    """
    assert sum(shares) == len(x)
    ends = list(itertools.accumulate(shares))

    def work(collective: Collective) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], nn.Module]:
        own = synchronize_batch_norm(copy.deepcopy(model), collective)
        share, end = shares[collective.rank], ends[collective.rank]
        for _ in range(steps):
            own.zero_grad()
            part = x[end - share : end].clone().requires_grad_()
            if share == 0 and empty == "context":
                with take_part_without_samples(own):
                    sample_losses(own(x[:1].clone().requires_grad_())).mean().backward()
                outputs, input_gradient = part.detach(), part.detach()
            else:
                outputs = own(part)
                losses = sample_losses(outputs)
                (losses.mean() if share else losses.sum()).backward()
                assert part.grad is not None
                outputs, input_gradient = outputs.detach(), part.grad * (share / len(x))
        gradients = {n: p.grad.clone() for n, p in own.named_parameters() if p.grad is not None}
        for gradient in gradients.values():
            if share == 0:
                assert not gradient.any(), "a worker without samples must have gradients of exactly zero"
            collective.all_reduce_(gradient, share / len(x))
        return outputs, input_gradient, gradients, own

    parts = run_on_threads(len(shares), work)
    outputs = torch.cat([part[0] for part in parts if len(part[0])])
    input_gradient = torch.cat([part[1] for part in parts])
    return [Step(outputs, input_gradient, part[2], dict(part[3].named_buffers())) for part in parts]


def assert_same(steps: Sequence[Step], reference: Step) -> None:
    for step in steps:
        torch.testing.assert_close(step, reference, **CLOSE)
        for name, buffer in step.buffers.items():
            assert torch.equal(buffer, steps[0].buffers[name]), "replicas must hold the same bits"


def layer_and_input(kind: type[_BatchNorm], **options: object) -> tuple[nn.Module, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    layer = kind(3, dtype=torch.float64, **options)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, 0.5, 2.0, generator=generator)
    x = torch.randn(SHAPES[kind], dtype=torch.float64, generator=generator)
    return layer, x * 3 + torch.arange(3).view(1, 3, *[1] * (x.dim() - 2))


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("empty", ["context", "input"])
def test_unequal_shares_give_what_one_process_gives(kind: type[_BatchNorm], empty: str) -> None:
    layer, x = layer_and_input(kind)
    assert_same(many_workers(layer, x, (5, 3, 0), empty=empty, steps=3), one_process(layer, x, steps=3))


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": None},
        {"momentum": 0.0},
        {"affine": False},
        {"bias": False},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
        {"eps": 0.1, "momentum": 0.7},
    ],
    ids=str,
)
def test_every_option_of_torch_means_the_same(options: dict[str, object]) -> None:
    layer, x = layer_and_input(nn.BatchNorm2d, **options)
    assert_same(many_workers(layer, x, (1, 0, 7), steps=2), one_process(layer, x, steps=2))


@settings(deadline=None, max_examples=25)
@given(
    shares=st.lists(st.integers(0, 4), min_size=2, max_size=5).filter(lambda shares: sum(shares) >= 2),
    kind=st.sampled_from(list(SHAPES)),
    empty=st.sampled_from(["context", "input"]),
)
def test_any_shares_give_what_one_process_gives(shares: list[int], kind: type[_BatchNorm], empty: str) -> None:
    layer, x = layer_and_input(kind)
    x = torch.cat([x, x.flip(0).exp() / 10, x.sin()])[: sum(shares)]
    assert_same(many_workers(layer, x, shares, empty=empty), one_process(layer, x))


def test_samples_of_different_size_weigh_as_many_values_as_they_have() -> None:
    layer = nn.BatchNorm1d(3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    short = torch.randn(5, 3, 4, dtype=torch.float64, generator=generator)
    long = torch.randn(3, 3, 9, dtype=torch.float64, generator=generator) * 2 + 1
    # One process with the same values in the same layer: the statistics do not care where a value stands.
    values = torch.cat([part.transpose(0, 1).flatten(1).t() for part in (short, long)]).requires_grad_()
    output = copy.deepcopy(layer)(values)
    output.sin().sum().div(8).backward()

    def work(collective: Collective) -> torch.Tensor:
        own = synchronize_batch_norm(copy.deepcopy(layer), collective)
        part = (short, long)[collective.rank].clone().requires_grad_()
        own(part).sin().flatten(1).sum(1).mean().backward()
        assert part.grad is not None
        return (part.grad * (len(part) / 8)).transpose(0, 1).flatten(1).t()

    torch.testing.assert_close(torch.cat(run_on_threads(2, work)), values.grad, **CLOSE)


def convolutional_network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4, momentum=None),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 5),
        nn.BatchNorm1d(5),
        nn.Tanh(),
    ).double()


@pytest.mark.parametrize("empty", ["context", "input"])
def test_a_convolutional_network_learns_what_one_process_learns(empty: str) -> None:
    model = convolutional_network()
    x = torch.randn(8, 2, 6, 6, dtype=torch.float64)
    assert_same(many_workers(model, x, (5, 3, 0), empty=empty), one_process(model, x))


def test_resnet18_learns_what_one_process_learns() -> None:
    torch.manual_seed(0)
    model = zoo.build("resnet18", (3, 8, 8), 4, width=4).double()
    x = torch.randn(8, 3, 8, 8, dtype=torch.float64)
    assert_same(many_workers(model, x, (5, 0, 3), empty="input"), one_process(model, x))


@pytest.mark.parametrize("empty", ["context", "input"])
def test_a_worker_without_samples_takes_part_in_every_sum_of_resnet18(empty: str) -> None:
    torch.manual_seed(0)
    model = zoo.build("resnet18", (3, 8, 8), 4, width=2)
    x, y = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])

    def work(collective: Collective) -> list[int]:
        counting = CountingCollective(collective)
        own = synchronize_batch_norm(copy.deepcopy(model), counting)
        samples = 4 if collective.rank == 0 else 0
        if samples == 0 and empty == "context":
            with take_part_without_samples(own):
                F.cross_entropy(own(x[:1]), y[:1]).backward()
        else:
            F.cross_entropy(own(x[:samples]), y[:samples], reduction="sum").backward()
        gradients = [p.grad for p in own.parameters()]
        assert all(g is not None and g.isfinite().all() for g in gradients)
        assert all(g.any() for g in gradients) == (samples > 0)
        assert any(g.any() for g in gradients) == (samples > 0)
        return counting.sizes

    with_samples, without_samples = run_on_threads(2, work)
    assert with_samples == without_samples
    assert len(with_samples) == 2 * 20, "one sum forward and one backward for each of the 20 layers"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_layout_and_type_of_input_and_gradient_stay_as_in_torch(
    dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(6)  # single precision, as under autocast
    x = (torch.randn(8, 6, 5, 4) + 2).to(dtype).contiguous(memory_format=memory_format)
    reference = x.clone().requires_grad_()
    expected = copy.deepcopy(layer)(reference)
    expected.float().sin().mean().backward()
    assert reference.grad is not None

    def work(collective: Collective) -> tuple[torch.Tensor, torch.Tensor]:
        own = synchronize_batch_norm(copy.deepcopy(layer), collective)
        part = (x[:5], x[5:])[collective.rank].clone(memory_format=memory_format).requires_grad_()
        output = own(part)
        output.float().sin().mean().backward()
        assert part.grad is not None
        for tensor in (output, part.grad):
            assert tensor.dtype == dtype
            assert tensor.is_contiguous(memory_format=memory_format)
        return output.detach(), part.grad * (len(part) / 8)

    parts = run_on_threads(2, work)
    close = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(torch.cat([p[0] for p in parts]), expected.detach(), **close)
    torch.testing.assert_close(torch.cat([p[1] for p in parts]), reference.grad, **close)


def test_a_mean_far_from_zero_does_not_drown_the_variance() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 2) + 1e3  # E[x^2] - mean^2 in single precision would be noise

    def work(collective: Collective) -> torch.Tensor:
        layer = nn.BatchNorm1d(2, momentum=1.0)
        synchronize_batch_norm(layer, collective)(x.chunk(2)[collective.rank])
        assert layer.running_var is not None
        return layer.running_var

    for variance in run_on_threads(2, work):
        torch.testing.assert_close(variance, x.double().var(0).float(), rtol=1e-4, atol=0)


def test_evaluation_is_torchs_own_and_exchanges_nothing() -> None:
    layer, x = layer_and_input(nn.BatchNorm2d)
    layer(x)
    layer.eval()
    connected = copy.deepcopy(layer)
    collective = CountingCollective(thread_collectives(2, timeout_s=0.1)[0])
    synchronize_batch_norm(connected, collective)
    assert torch.equal(connected(x), layer(x))
    assert collective.sizes == []


def test_forward_and_backward_are_one_sum_each_and_none_for_inputs_without_gradient() -> None:
    def work(collective: Collective) -> list[list[int]]:
        counting = CountingCollective(collective)
        layer = synchronize_batch_norm(nn.BatchNorm1d(3), counting)
        seen = []
        for requires_grad in (True, False):
            counting.sizes.clear()
            layer(torch.randn(4, 3, requires_grad=requires_grad)).sum().backward()
            seen.append(list(counting.sizes))
        return seen

    for with_gradient, without in run_on_threads(2, work):
        assert with_gradient == [2 * (3 + 2 * 3), 2 * 3]
        assert without == [2 * (3 + 2 * 3)]


def test_parameters_buffers_and_keys_stay_the_same_objects() -> None:
    model = convolutional_network()
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kinds = [type(m) for m in model]
    assert synchronize_batch_norm(model, thread_collectives(2)[0]) is model
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    assert all(isinstance(m, kind) for m, kind in zip(model, kinds, strict=True))
    assert repr(model) == repr(convolutional_network())
    assert list(model.state_dict()) == list(convolutional_network().state_dict())


def test_one_worker_leaves_torchs_own_layers() -> None:
    model = convolutional_network()
    kinds = [type(m) for m in model]
    synchronize_batch_norm(model, Solo())
    assert [type(m) for m in model] == kinds
    assert not has_global_batch_norm(model)


def test_a_new_view_reconnects_the_layers_and_one_worker_disconnects_them() -> None:
    model = convolutional_network()
    attributes = set(vars(model[1]))
    kinds = [type(m) for m in model]
    first, second = thread_collectives(2)[0], thread_collectives(3)[0]
    synchronize_batch_norm(synchronize_batch_norm(model, first), second)
    assert has_global_batch_norm(model)
    assert all(m.exchange._collective is second for m in model if isinstance(m, _BatchNorm))
    synchronize_batch_norm(model, Solo())
    assert not has_global_batch_norm(model)
    assert [type(m) for m in model] == kinds
    assert set(vars(model[1])) == attributes


def test_a_pickled_model_is_torchs_own() -> None:
    model = synchronize_batch_norm(convolutional_network(), thread_collectives(2)[0])
    loaded = pickle.loads(pickle.dumps(model))
    assert [type(m) for m in loaded] == [type(m) for m in convolutional_network()]
    x = torch.randn(3, 2, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(loaded(x), convolutional_network()(x))


def test_a_deep_copy_stays_connected_to_the_same_workers() -> None:
    model = synchronize_batch_norm(convolutional_network(), thread_collectives(2)[0])
    clone = copy.deepcopy(model)
    assert clone[1].exchange is model[1].exchange
    assert clone[1].weight is not model[1].weight


class Renamed(nn.BatchNorm2d):
    """A user's subclass that keeps torch's forward."""


class WithActivation(nn.BatchNorm2d):
    """A user's subclass with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


def test_a_subclass_is_synchronized_and_stays_what_it_is() -> None:
    layer, x = Renamed(3, dtype=torch.float64), layer_and_input(nn.BatchNorm2d)[1]
    assert_same(many_workers(layer, x, (2, 6)), one_process(layer, x))
    assert type(pickle.loads(pickle.dumps(synchronize_batch_norm(layer, thread_collectives(2)[0])))) is Renamed


@pytest.mark.parametrize(
    ("layer", "code", "fix"),
    [
        (WithActivation(3), "custom-batch-norm", "nn.BatchNorm1d, 2d or 3d"),
        (nn.SyncBatchNorm(3), "custom-batch-norm", "nn.BatchNorm1d, 2d or 3d"),
        (nn.LazyBatchNorm2d(), "lazy-batch-norm", "num_features"),
    ],
)
def test_a_layer_that_cannot_be_synchronized_is_refused_by_name(layer: nn.Module, code: str, fix: str) -> None:
    model = nn.Sequential(nn.Identity(), layer)
    with pytest.raises(ConfigError, match=fix) as caught:
        synchronize_batch_norm(model, thread_collectives(2)[0])
    assert (caught.value.code, caught.value.facts) == (code, {"layer": "1"})
    synchronize_batch_norm(model, Solo())


def test_if_all_samples_are_gone_with_their_workers_the_others_compute_nothing_that_counts() -> None:
    layer = synchronize_batch_norm(nn.BatchNorm1d(3), Solo(), CollectiveStatistics(Solo()))
    before = copy.deepcopy(layer.state_dict())
    with take_part_without_samples(layer):
        layer(torch.randn(1, 3, requires_grad=True)).sum().backward()
    assert all(torch.equal(layer.state_dict()[name], before[name]) for name in before)
    assert all(not p.grad.any() for p in layer.parameters() if p.grad is not None)


def test_a_worker_that_is_alone_exchanges_as_before_if_its_exchanges_are_on_record() -> None:
    counting = CountingCollective(Solo())
    layer, x = layer_and_input(nn.BatchNorm2d)
    expected = copy.deepcopy(layer)(x)
    connected = synchronize_batch_norm(layer, counting, CollectiveStatistics(counting))
    torch.testing.assert_close(connected(x), expected)
    assert len(counting.sizes) == 1


def test_a_lazy_layer_is_synchronized_once_it_knows_its_size() -> None:
    layer = nn.LazyBatchNorm1d(dtype=torch.float64)
    _, x = layer_and_input(nn.BatchNorm1d)
    layer(x)
    assert_same(many_workers(layer, x, (4, 4)), one_process(layer, x))


def test_one_value_per_channel_in_the_whole_batch_is_refused_on_every_worker() -> None:
    def work(collective: Collective) -> ConfigError:
        layer = synchronize_batch_norm(nn.BatchNorm1d(3), collective)
        with pytest.raises(ConfigError) as caught:
            layer(torch.randn(1 if collective.rank == 0 else 0, 3))
        return caught.value

    for error in run_on_threads(2, work):
        assert (error.code, error.facts) == ("batch-norm-values", {"values": 1})
        assert "2 workers" in str(error)


def test_an_input_of_the_wrong_dimension_is_refused_before_anything_is_exchanged() -> None:
    collective = CountingCollective(thread_collectives(2)[0])
    with pytest.raises(ValueError, match="expected 4D input"):
        synchronize_batch_norm(nn.BatchNorm2d(3), collective)(torch.randn(2, 3))
    assert collective.sizes == []


def test_nan_in_a_borrowed_sample_reaches_nobody() -> None:
    layer, x = layer_and_input(nn.BatchNorm1d)

    def work(collective: Collective) -> torch.Tensor:
        own = synchronize_batch_norm(copy.deepcopy(layer), collective)
        part = (x if collective.rank == 0 else x[:1] * float("nan")).clone().requires_grad_()
        with take_part_without_samples(own) if collective.rank == 1 else nullcontext():
            sample_losses(own(part)).mean().backward()
        assert own.running_mean.isfinite().all()
        assert own.weight.grad is not None
        assert part.grad is not None
        assert part.grad.isfinite().all() == (collective.rank == 0)
        return own.weight.grad

    gradients = run_on_threads(2, work)
    torch.testing.assert_close(gradients[0], one_process(layer, x).gradients["weight"], **CLOSE)
    assert not gradients[1].any()


def test_the_layers_count_samples_again_after_the_context_even_after_an_error() -> None:
    layer = synchronize_batch_norm(nn.BatchNorm1d(3), thread_collectives(2)[0])
    with pytest.raises(RuntimeError, match="boom"), take_part_without_samples(layer):
        raise RuntimeError("boom")
    assert layer.counts_samples is True


def test_a_peer_that_fails_ends_the_exchange_with_peer_lost() -> None:
    lost: list[Exception] = []

    def work(collective: Collective) -> None:
        layer = synchronize_batch_norm(nn.BatchNorm1d(3), collective)
        if collective.rank == 1:
            raise KeyError("first cause")
        try:
            layer(torch.randn(4, 3))
        except PeerFailed as error:
            lost.append(error)
            raise

    with pytest.raises(KeyError, match="first cause"):
        run_on_threads(2, work)
    assert len(lost) == 1


class TestThreadCollectives:
    def test_sums_are_weighted_and_the_same_bits_on_every_rank(self) -> None:
        def work(collective: Collective) -> torch.Tensor:
            tensor = torch.tensor([0.1, 1e8]) * (collective.rank + 1)
            collective.all_reduce_(tensor, 0.5 * collective.rank)
            return tensor

        first, *others = run_on_threads(3, work)
        torch.testing.assert_close(first, torch.tensor([0.1, 1e8]) * (0.5 * 2 + 1.0 * 3))
        assert all(torch.equal(first, other) for other in others)

    def test_many_exchanges_in_a_row_do_not_mix(self) -> None:
        def work(collective: Collective) -> list[float]:
            seen = []
            for step in range(200):
                tensor = torch.tensor([float(step * 10 + collective.rank)])
                collective.all_reduce_(tensor)
                seen.append(tensor.item())
            return seen

        for seen in run_on_threads(3, work):
            assert seen == [30.0 * step + 3.0 for step in range(200)]

    def test_broadcast_gather_and_barrier_reach_everybody(self) -> None:
        def work(collective: Collective) -> tuple[float, list[bytes]]:
            tensor = collective.allocate(1, torch.float32, torch.device("cpu")) + collective.rank
            collective.broadcast_(tensor, source=1)
            collective.barrier()
            gathered = collective.all_gather(b"x" * collective.rank)
            collective.close()
            return tensor.item(), gathered

        assert run_on_threads(3, work) == [(1.0, [b"", b"x", b"xx"])] * 3

    def test_different_calls_are_named_rank_by_rank(self) -> None:
        def work(collective: Collective) -> None:
            collective.all_reduce_(torch.zeros(2 + collective.rank))

        with pytest.raises(
            AssertionError, match=r"rank 0: all_reduce_ of \(2,\) float32; rank 1: all_reduce_ of \(3,\) float32"
        ):
            run_on_threads(2, work)

    def test_a_missing_rank_is_noticed_after_the_time_limit(self) -> None:
        with pytest.raises(PeerFailed, match=r"0\.05 s"):
            thread_collectives(2, timeout_s=0.05)[0].barrier()

    def test_abort_ends_later_calls_too(self) -> None:
        first, second = thread_collectives(2)
        first.abort()
        for collective in (first, second):
            with pytest.raises(PeerFailed):
                collective.barrier()

    def test_the_first_cause_is_raised_and_not_its_consequences(self) -> None:
        def work(collective: Collective) -> None:
            if collective.rank == 2:
                raise ZeroDivisionError("the cause")
            collective.barrier()

        with pytest.raises(ZeroDivisionError, match="the cause"):
            run_on_threads(3, work)


def test_workers_in_different_layers_are_noticed_instead_of_mixing_their_statistics() -> None:
    def forward(collective: Collective) -> str | None:
        model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
        synchronize_batch_norm(model, collective)
        try:
            model[collective.rank](torch.randn(4, 3))
        except ConfigError as error:
            return error.code
        return None

    assert run_on_threads(2, forward) == ["out-of-step", "out-of-step"]
