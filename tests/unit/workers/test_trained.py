"""What a run makes better: steps that come to nothing, starting over, and state that travels."""

from __future__ import annotations

import copy
import io

import torch
from torch import nn

from syncline.workers.trained import Parts, Trained


def make() -> Parts:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Parts(model, optimizer, [torch.optim.lr_scheduler.StepLR(optimizer, 1)])


def step(trained: Trained, x: torch.Tensor) -> None:
    trained.optimizer.zero_grad()
    trained.model(x).sum().backward()
    trained.optimizer.step()


def buffers(trained: Trained) -> dict[str, torch.Tensor]:
    return {name: b.clone() for name, b in trained.model.named_buffers()}


def test_a_step_that_came_to_nothing_leaves_every_buffer_as_it_was_counters_included() -> None:
    trained = Trained(make)
    held = trained.model[1].running_mean  # type: ignore[index]
    trained.begin_step(may_fail=True)
    trained.model(torch.randn(5, 4))
    trained.end_step()
    after_first = buffers(trained)
    assert after_first["1.num_batches_tracked"] == 1
    trained.begin_step(may_fail=True)
    trained.model(torch.randn(5, 4))
    assert not torch.equal(trained.model[1].running_mean, after_first["1.running_mean"])  # type: ignore[index]
    trained.forget_step()
    for name, buffer in trained.model.named_buffers():
        assert torch.equal(buffer, after_first[name]), name
    assert held is trained.model[1].running_mean, "the objects stay who they are"  # type: ignore[index]
    trained.forget_step()  # a second time changes nothing
    assert torch.equal(held, after_first["1.running_mean"])


def test_a_step_that_counts_is_not_undone() -> None:
    trained = Trained(make)
    trained.begin_step(may_fail=True)
    trained.model(torch.randn(5, 4))
    trained.end_step()
    now = buffers(trained)
    trained.forget_step()
    assert torch.equal(trained.model[1].running_mean, now["1.running_mean"])  # type: ignore[index]


def test_starting_over_makes_everything_anew_but_only_if_something_was_done() -> None:
    trained = Trained(make)
    first = trained.model
    trained.start_over()
    assert trained.model is first
    trained.begin_step(may_fail=False)
    step(trained, torch.randn(5, 4))
    trained.epochs_closed, trained.metrics["train/loss"] = 3, 0.5
    trained.start_over()
    assert trained.model is not first
    assert all(torch.equal(a, b) for a, b in zip(trained.model.parameters(), make().model.parameters(), strict=True))
    assert (trained.epochs_closed, trained.metrics) == (0, {})


def test_the_whole_state_makes_another_one_the_same() -> None:
    giver, taker = Trained(make), Trained(make)
    giver.begin_step(may_fail=True)
    step(giver, torch.randn(5, 4))
    giver.schedulers[0].step()
    giver.end_step()
    giver.epochs_closed, giver.evaluated_at, giver.metrics["train/loss"] = 2, 7, 0.25
    taker.load(copy.deepcopy(giver.whole_state()))  # as if it had travelled
    assert all(torch.equal(a, b) for a, b in zip(giver.model.parameters(), taker.model.parameters(), strict=True))
    assert taker.lr == giver.lr == 0.1 * 0.1
    assert taker.progress_state() == giver.progress_state()
    x = torch.randn(5, 4)
    for trained in (giver, taker):
        trained.begin_step(may_fail=True)
        step(trained, x)
        trained.end_step()
    assert all(torch.equal(a, b) for a, b in zip(giver.model.parameters(), taker.model.parameters(), strict=True))


def test_a_model_without_buffers_has_nothing_to_keep() -> None:
    trained = Trained(lambda: Parts(model := nn.Linear(2, 2), torch.optim.SGD(model.parameters(), lr=0.1)))
    trained.begin_step(may_fail=True)
    trained.forget_step()
    assert trained.progress_state()["schedulers"] == []


def test_buffers_of_any_dtype_and_shape_are_kept_side_by_side() -> None:
    torch.manual_seed(0)
    odd = {
        "flag": torch.tensor(True),
        "narrow": torch.randn(3, dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "wide": torch.randn(2, 3, dtype=torch.float64).t(),
        "nothing": torch.empty(0),
        "complex": torch.randn(5, dtype=torch.complex128),
    }
    model = nn.Linear(2, 2)
    for name, buffer in odd.items():
        model.register_buffer(name, buffer.clone())
    trained = Trained(lambda: Parts(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    trained.begin_step(may_fail=True)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, odd[name]), f"{name} has moved, and is the same"
        buffer.copy_(torch.zeros_like(buffer))
    trained.forget_step()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, odd[name]), f"{name} is as it was"
    torch.save(trained.whole_state(), io.BytesIO())  # it can travel
