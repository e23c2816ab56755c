"""Model, optimizer and schedulers being trained: interrupted steps, starting over, and state that is sent."""

from __future__ import annotations

import copy
import io

import torch
from torch import nn

from syncline.workers.train_state import Parts, TrainState


def make() -> Parts:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Parts(model, optimizer, [torch.optim.lr_scheduler.StepLR(optimizer, 1)])


def step(state: TrainState, x: torch.Tensor) -> None:
    state.optimizer.zero_grad()
    state.model(x).sum().backward()
    state.optimizer.step()


def buffers(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: b.clone() for name, b in state.model.named_buffers()}


def test_a_step_that_came_to_nothing_leaves_every_buffer_as_it_was_counters_included() -> None:
    state = TrainState(make)
    held = state.model[1].running_mean  # type: ignore[index]
    state.begin_step(may_fail=True)
    state.model(torch.randn(5, 4))
    state.end_step()
    after_first = buffers(state)
    assert after_first["1.num_batches_tracked"] == 1
    state.begin_step(may_fail=True)
    state.model(torch.randn(5, 4))
    assert not torch.equal(state.model[1].running_mean, after_first["1.running_mean"])  # type: ignore[index]
    state.undo_step()
    for name, buffer in state.model.named_buffers():
        assert torch.equal(buffer, after_first[name]), name
    assert held is state.model[1].running_mean, "the objects stay who they are"  # type: ignore[index]
    state.undo_step()  # a second time changes nothing
    assert torch.equal(held, after_first["1.running_mean"])


def test_a_step_that_counts_is_not_undone() -> None:
    state = TrainState(make)
    state.begin_step(may_fail=True)
    state.model(torch.randn(5, 4))
    state.end_step()
    now = buffers(state)
    state.undo_step()
    assert torch.equal(state.model[1].running_mean, now["1.running_mean"])  # type: ignore[index]


def test_starting_over_makes_everything_anew_but_only_if_something_was_done() -> None:
    state = TrainState(make)
    first = state.model
    state.reset()
    assert state.model is first
    state.begin_step(may_fail=False)
    step(state, torch.randn(5, 4))
    state.epochs_closed, state.metrics["train/loss"] = 3, 0.5
    state.reset()
    assert state.model is not first
    assert all(torch.equal(a, b) for a, b in zip(state.model.parameters(), make().model.parameters(), strict=True))
    assert (state.epochs_closed, state.metrics) == (0, {})


def test_the_whole_state_makes_another_one_the_same() -> None:
    source, stale = TrainState(make), TrainState(make)
    source.begin_step(may_fail=True)
    step(source, torch.randn(5, 4))
    source.schedulers[0].step()
    source.end_step()
    source.epochs_closed, source.evaluated_at, source.metrics["train/loss"] = 2, 7, 0.25
    stale.load(copy.deepcopy(source.state()))  # as if it had traveled
    assert all(torch.equal(a, b) for a, b in zip(source.model.parameters(), stale.model.parameters(), strict=True))
    assert stale.lr == source.lr == 0.1 * 0.1
    assert stale.progress() == source.progress()
    x = torch.randn(5, 4)
    for state in (source, stale):
        state.begin_step(may_fail=True)
        step(state, x)
        state.end_step()
    assert all(torch.equal(a, b) for a, b in zip(source.model.parameters(), stale.model.parameters(), strict=True))


def test_a_model_without_buffers_has_nothing_to_keep() -> None:
    state = TrainState(lambda: Parts(model := nn.Linear(2, 2), torch.optim.SGD(model.parameters(), lr=0.1)))
    state.begin_step(may_fail=True)
    state.undo_step()
    assert state.progress().schedulers == []


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
    state = TrainState(lambda: Parts(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    state.begin_step(may_fail=True)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, odd[name]), f"{name} has moved, and is the same"
        buffer.copy_(torch.zeros_like(buffer))
    state.undo_step()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, odd[name]), f"{name} is as it was"
    torch.save(state.state().to_dict(), io.BytesIO())  # it can travel
