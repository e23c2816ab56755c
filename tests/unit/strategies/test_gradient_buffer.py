"""All gradients in one buffer: views that backward fills, whatever a user's loop does to them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from syncline.comms.collective import Collective, Solo
from syncline.strategies.gradients import GradientBuffer
from syncline.testing.threads import run_on_threads


class OneOfTwo(Solo):
    """A worker that is not alone, as far as the buffer is concerned."""

    size = 2


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def backward(model: nn.Module, seed: int = 0, shape: tuple[int, ...] = (5, 4)) -> None:
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    model(inputs.to(next(model.parameters()).dtype)).pow(2).sum().backward()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def lies_in(part: torch.Tensor, whole: torch.Tensor) -> bool:
    end = whole.data_ptr() + whole.numel() * whole.element_size()
    return whole.data_ptr() <= part.data_ptr() < end


def test_backward_writes_straight_into_the_buffer():
    model, plain = small_model(), small_model()
    buffer = GradientBuffer(model.parameters(), OneOfTwo(), piggybacked=0)
    backward(model)
    backward(plain)
    (flat,) = buffer.flats
    assert torch.equal(flat, torch.cat([g.flatten() for g in gradients(plain)]))
    assert all(lies_in(p.grad, flat) for p in model.parameters())


@pytest.mark.parametrize("is_small", [True, False])
def test_gradients_accumulate_until_they_are_zeroed(monkeypatch, is_small):
    monkeypatch.setattr("syncline.strategies.gradients._SMALL_BYTES", 2**20 if is_small else 0)
    model, plain = small_model(), small_model()
    buffer = GradientBuffer(model.parameters(), OneOfTwo(), piggybacked=2)
    address = buffer.flats[0].data_ptr()
    for _ in range(2):
        for seed in range(3):
            backward(model, seed)
            backward(plain, seed)
        buffer.attach()
        torch.testing.assert_close(gradients(model), gradients(plain), rtol=0, atol=0)
        assert buffer.flats[0].data_ptr() == address == next(model.parameters()).grad.data_ptr()
        buffer.piggybacked.fill_(3.0)
        buffer.zero_()
        plain.zero_grad()
        assert not buffer.piggybacked.any()
        assert not any(g.any() for g in gradients(model))
        assert bool(gradients(model)) != is_small, "small ones are made anew by autograd, and copied"
    buffer.attach()
    assert not any(flat.any() for flat in buffer.flats), "without a backward pass they are zero"


def test_what_was_accumulated_before_the_buffer_existed_is_kept():
    model = small_model()
    backward(model)
    before = gradients(model)
    GradientBuffer(model.parameters(), OneOfTwo(), piggybacked=1)
    torch.testing.assert_close(gradients(model), before, rtol=0, atol=0)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_users_zero_grad_does_no_harm(set_to_none):
    model, plain = small_model(), small_model()
    buffer = GradientBuffer(model.parameters(), OneOfTwo(), piggybacked=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        plain.zero_grad()
        backward(model, seed)
        backward(plain, seed)
        buffer.attach()
        torch.testing.assert_close(gradients(model), gradients(plain), rtol=0, atol=0)
        assert all(lies_in(p.grad, buffer.flats[0]) for p in model.parameters())


def test_a_gradient_that_is_missing_counts_as_zero_and_not_as_the_last_one():
    model = small_model()
    buffer = GradientBuffer(model.parameters(), OneOfTwo(), piggybacked=1)
    backward(model)
    model.zero_grad(set_to_none=True)
    model[0](torch.ones(1, 4)).sum().backward()  # the last layer takes no part
    buffer.attach()
    assert model[0].weight.grad.any()
    assert not model[2].weight.grad.any()
    assert not model[2].bias.grad.any()


def test_a_gradient_that_somebody_put_there_is_taken_in():
    parameter = nn.Parameter(torch.zeros(3))
    buffer = GradientBuffer([parameter], OneOfTwo(), piggybacked=0)
    parameter.grad = torch.tensor([1.0, 2.0, 3.0])
    buffer.attach()
    assert buffer.flats[0].tolist() == [1.0, 2.0, 3.0]
    parameter.grad.mul_(2)
    assert buffer.flats[0].tolist() == [2.0, 4.0, 6.0]


def test_channels_last_weights_have_channels_last_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)).to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    buffer = GradientBuffer(model.parameters(), OneOfTwo(), piggybacked=0)
    for each in (model, plain):
        backward(each, shape=(2, 3, 6, 6))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad.stride() == p.stride()
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0)
    assert not model[0].weight.is_contiguous()
    assert sum(p.numel() for p in model.parameters()) == buffer.flats[0].numel()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(6, 4).t(),
        lambda: torch.zeros(8, 6)[::2],
        lambda: torch.zeros(1).expand(5),
        lambda: torch.zeros(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        lambda: torch.zeros(2, 100)[:1, :5],
        lambda: torch.zeros(()),
        lambda: torch.zeros(0, 3),
    ],
)
def test_a_weight_of_any_layout_has_a_gradient_within_its_own_place(make):
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(make()), nn.Parameter(torch.zeros(3))]
    buffer = GradientBuffer(parameters, OneOfTwo(), piggybacked=1)
    assert buffer.flats[0].numel() == buffer.numel + 1
    for number, p in enumerate(parameters):
        p.grad.fill_(number + 1)
    assert buffer.flats[0].tolist() == [1.0] * 3 + [2.0] * parameters[1].numel() + [3.0] * 3 + [0.0]


def test_there_is_one_buffer_for_each_type():
    types = [torch.float64, torch.float32, torch.bfloat16, torch.float64]
    parameters = [nn.Parameter(torch.ones(n + 1, dtype=t)) for n, t in enumerate(types)]
    buffer = GradientBuffer(parameters, OneOfTwo(), piggybacked=3)
    assert {f.dtype: f.numel() for f in buffer.flats} == {torch.float32: 2 + 3, torch.float64: 1 + 4, torch.bfloat16: 3}
    assert buffer.numel == 10
    sum((p * 2).sum().double() for p in parameters).backward()
    for flat in buffer.flats:
        assert flat[: sum(p.numel() for p in parameters if p.dtype == flat.dtype)].eq(2.0).all()
    assert not buffer.piggybacked.any()


def test_piggybacked_values_travel_behind_the_gradients():
    def work(collective: Collective) -> tuple[list[float], list[float]]:
        parameter = nn.Parameter(torch.zeros(2))
        buffer = GradientBuffer([parameter], collective, piggybacked=2)
        (parameter * (collective.rank + 1)).sum().backward()
        buffer.piggybacked[0], buffer.piggybacked[1] = 10.0 * collective.rank, 1.0
        for flat in buffer.flats:
            collective.all_reduce_(flat, (0.25, 0.75)[collective.rank])
        return parameter.grad.tolist(), buffer.piggybacked.tolist()

    assert run_on_threads(2, work) == [([1.75, 1.75], [7.5, 1.0])] * 2


@pytest.mark.parametrize("piggybacked", [0, 1, 4])
@pytest.mark.parametrize("parameters", [[], [nn.Parameter(torch.zeros(3, dtype=torch.float64))]])
def test_piggybacked_values_are_there_without_any_parameter_of_their_type(piggybacked, parameters):
    buffer = GradientBuffer(parameters, OneOfTwo(), piggybacked)
    assert buffer.piggybacked.shape == (piggybacked,)
    assert buffer.piggybacked.dtype == torch.float32
    buffer.piggybacked.fill_(1.0)
    buffer.zero_()
    assert not buffer.piggybacked.any()


def test_frozen_parameters_have_no_place_and_no_gradient():
    model = small_model()
    model[0].requires_grad_(False)
    buffer = GradientBuffer(model.parameters(), OneOfTwo(), piggybacked=0)
    backward(model)
    assert buffer.numel == buffer.flats[0].numel() == 8 * 3 + 3
    assert model[0].weight.grad is None


def test_tied_weights_have_one_place():
    embedding = nn.Embedding(5, 3)
    head = nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head)
    buffer = GradientBuffer(model.parameters(), OneOfTwo(), piggybacked=0)
    model(torch.tensor([1, 2])).sum().backward()
    assert buffer.numel == 15
    assert head.weight.grad is embedding.weight.grad
    assert lies_in(head.weight.grad, buffer.flats[0])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_sparse_gradients_are_taken_in(set_to_none):
    embedding, plain = nn.Embedding(5, 3, sparse=True), nn.Embedding(5, 3)
    buffer = GradientBuffer(embedding.parameters(), OneOfTwo(), piggybacked=0)
    embedding.zero_grad(set_to_none=set_to_none)
    for each in (embedding, plain):
        each(torch.tensor([1, 1, 4])).sum().backward()
    buffer.attach()
    assert torch.equal(embedding.weight.grad, plain.weight.grad)
    assert lies_in(embedding.weight.grad, buffer.flats[0])


def test_an_optimizer_steps_as_it_would_without_the_buffer():
    model, plain = small_model(), small_model()
    buffer = GradientBuffer(model.parameters(), OneOfTwo(), piggybacked=1)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain)]
    for seed in range(5):
        buffer.zero_()
        plain.zero_grad()
        backward(model, seed)
        backward(plain, seed)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()), rtol=0, atol=0)


def test_a_worker_alone_lets_autograd_keep_its_gradients():
    parameter = nn.Parameter(torch.ones(3))
    buffer = GradientBuffer([parameter], Solo(), piggybacked=2)
    (parameter * 2).sum().backward()
    buffer.attach()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [2, 2, 2]
    assert [f.numel() for f in buffer.flats] == [2], "only the piggybacked values"
    buffer.zero_()
    assert parameter.grad is None
