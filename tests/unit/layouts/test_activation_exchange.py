"""Workers put activations together in small slots, whatever their shapes, and notice if they are out of step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.comms.collective import Collective
from syncline.compute.partition import split
from syncline.errors import ConfigError
from syncline.layouts.activation_exchange import ActivationExchange
from syncline.testing.threads import run_on_threads

SHAPES = st.lists(
    st.tuples(
        st.integers(0, 9), st.integers(1, 9), st.integers(1, 4), st.sampled_from([torch.float32, torch.bfloat16])
    ),
    min_size=1,
    max_size=6,
)


def activation(number: int, outer: int, width: int, inner: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(outer, width, inner, generator=torch.Generator().manual_seed(number)).to(dtype)


@settings(max_examples=40)
@given(SHAPES, st.integers(2, 4), st.sampled_from([8, 64, 4096]))
def test_all_workers_get_the_whole_in_slots_of_any_size(shapes, size, slot_bytes):
    expected = [activation(number, *shape) for number, shape in enumerate(shapes)]

    def work(collective: Collective) -> tuple[list[torch.Tensor], int]:
        exchange = ActivationExchange(collective, slot_bytes=slot_bytes)
        found = []
        for whole in expected:
            low, high = split(whole.shape[1], size)[collective.rank]
            found.append(torch.empty_like(whole))
            exchange.gather(whole[:, low:high], found[-1])
        return found, exchange.bytes_sent

    answers = run_on_threads(size, work)
    for found, _ in answers:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert sum(sent for _, sent in answers) == sum(whole.nbytes for whole in expected)


@pytest.mark.parametrize("other", [(3, 4, 2), (4, 6, 1), (2, 4, 1)])
def test_workers_that_compute_different_things_are_told_so(other):
    def work(collective: Collective) -> None:
        exchange = ActivationExchange(collective)
        whole = torch.empty(4, 4, 1) if collective.rank == 0 else torch.empty(other)
        low, high = split(whole.shape[1], 2)[collective.rank]
        exchange.gather(whole[:, low:high], whole)

    with pytest.raises(ConfigError) as caught:
        run_on_threads(2, work)
    assert caught.value.code == "out-of-step"
    assert {caught.value.facts["rank"], caught.value.facts["other"]} == {0, 1}
