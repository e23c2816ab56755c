"""State that is carried from batch to batch: right for every sample, whichever workers fail at whatever moment."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import ConfigError
from syncline.workers.own_loop.carried import CarriedTable
from syncline.workers.own_loop.worker import Worker
from syncline.workers.session import Session

SIZE = 5
BATCH = 2**20


def computed(state: torch.Tensor, batch: int) -> torch.Tensor:
    """A new state that depends on all batches so far, and on their order."""
    return (state * 31 + batch + 1) % 1_000_003


def expected(batches: range) -> int:
    state = 0
    for batch in batches:
        state = (state * 31 + batch + 1) % 1_000_003
    return state


@given(st.data(), st.none() | st.integers(1, 4))
def test_every_place_continues_from_its_own_state_after_any_failures(data, every):
    table = CarriedTable([torch.zeros(2, SIZE, dtype=torch.int64)], 1, every)
    cuts = st.sets(st.integers(1, SIZE - 1)).map(lambda found: [0, *sorted(found), SIZE])
    rounds = 0
    for batch in range(data.draw(st.integers(1, 6))):
        first = batch - batch % every if every is not None else 0
        parts = [list(range(low, high)) for low, high in pairwise(data.draw(cuts))]
        failed = [part for part in parts if data.draw(st.booleans())]
        is_gathered = data.draw(st.booleans())  # the workers failed before their state was gathered, or after
        redo = sorted(place for part in failed for place in part)
        train(table, rounds, batch, [p for p in parts if p not in failed or is_gathered], first)
        rounds += 1
        if data.draw(st.booleans()):  # a checkpoint, or a replacement
            saved, table = table.state(), CarriedTable([torch.zeros(2, SIZE, dtype=torch.int64)], 1, every)
            table.load(saved)
        if redo:
            train(table, rounds, batch, [redo[::2], redo[1::2]], first)
            rounds += 1
        assert table.newest[0].tolist() == [[expected(range(first, batch + 1))] * SIZE] * 2


def train(table: CarriedTable, round: int, batch: int, parts: list[list[int]], first: int) -> None:
    found = []
    for places in parts:
        (state,) = table.before(places, [batch * BATCH + 1] * len(places)) if places else (torch.zeros(2, 0),)
        assert state.tolist() == [[expected(range(first, batch))] * len(places)] * 2
        found.append((places, [batch * BATCH + 1] * len(places), [computed(state, batch)]))
    table.assign(round, found)


def test_several_states_in_one_batch_follow_each_other():
    worker = Worker(Session.alone())
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worker.prepare(model, optimizer)
    carried = worker.carried({"a": torch.zeros(4, 2), "b": (torch.zeros(4),)}, reset_every=2)
    seen = []
    for (x,) in worker.batches((torch.ones(4, 1),), steps=3):
        for _ in range(2):
            value = carried.value
            seen.append(value["b"][0].tolist())
            carried.value = {"a": value["a"] + 1, "b": (value["b"][0] + x[:, 0],)}
        model(x).sum().backward()
        optimizer.step()
    assert seen == [[float(n)] * 4 for n in (0, 1, 2, 3, 0, 1)]


@pytest.mark.parametrize(
    ("initial", "dim", "value", "code"),
    [
        (torch.zeros(4, 2), 0, torch.zeros(3, 2), "carried-shape"),
        (torch.zeros(4, 2), 0, (torch.zeros(4, 2), torch.zeros(4, 2)), "carried-shape"),
        (torch.zeros(4, 2), 1, torch.zeros(4, 2), "carried-size"),
        ((torch.zeros(4, 2), torch.zeros(2)), 0, None, "carried-shape"),
    ],
    ids=["another batch", "another structure", "the wrong dimension", "different sizes"],
)
def test_a_state_that_does_not_fit_is_refused(initial, dim, value, code):
    worker = Worker(Session.alone())
    model = torch.nn.Linear(1, 1)
    worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError) as raised:
        use(worker, initial, dim, value)
    assert raised.value.code == code


def use(worker: Worker, initial: Any, dim: int, value: Any) -> None:
    carried = worker.carried(initial, dim=dim)
    next(worker.batches((torch.ones(4, 1),), steps=3))
    carried.value = value
