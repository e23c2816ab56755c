"""Hypothesis strategies for the things that property tests speak about."""

from __future__ import annotations

import keyword
import string

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

from syncline.config.spec import Spec
from syncline.data.order import Position, SampleOrder

# The same examples in every run, and no failures because a machine is busy.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

counts = st.integers(0, 10_000)
sizes = st.integers(1, 40)
seeds = st.integers(0, 2**63 - 1)


@st.composite
def orders(draw: st.DrawFn) -> SampleOrder:
    """A run's order of samples, small enough to be gone through."""
    count = draw(st.integers(1, 100))
    batch = draw(st.integers(1, 120))
    return SampleOrder(seed=draw(seeds), count=count, batch=batch, shuffle=draw(st.booleans()))


@st.composite
def starts(draw: st.DrawFn, order: SampleOrder) -> Position:
    """Anywhere in a run, also between two batches as another batch size would have left it."""
    return Position(draw(st.integers(0, 5)), draw(st.integers(0, order.count - 1)), draw(st.integers(0, 10_000)))


identifiers = st.text(string.ascii_letters + string.digits + "_", min_size=1, max_size=10).filter(
    lambda text: text.isidentifier() and not keyword.iskeyword(text)
)
names = st.from_regex(r"[A-Za-z][A-Za-z0-9_.:/-]{0,15}", fullmatch=True)
numbers = st.integers() | st.floats(allow_nan=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=20) | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
specs = st.builds(Spec, names, st.dictionaries(identifiers, values, max_size=4))


@st.composite
def flats(draw: st.DrawFn, min_size: int = 0) -> torch.Tensor:
    """A flat tensor as a codec gets it: a few chosen values, or many random ones of any scale, ties and zeros too."""
    if draw(st.booleans()):
        return torch.tensor(draw(st.lists(moderate_floats, min_size=min_size, max_size=40)), dtype=torch.float32)
    stream = np.random.RandomState(draw(st.integers(0, 2**32 - 1)))
    # Around the sizes of blocks and bytes, where mistakes would be.
    values = stream.standard_normal(
        draw(st.integers(max(1, min_size), 3000) | st.sampled_from([256, 1024, 1025, 2048]))
    )
    values *= 10.0 ** draw(st.integers(-30, 30))
    if draw(st.booleans()):
        values = values.round(2)
    values[stream.random_sample(values.shape) < draw(st.sampled_from([0.0, 0.5]))] = 0.0
    return torch.from_numpy(values).to(torch.float32)


moderate_floats = st.floats(-(2.0**100), 2.0**100, width=32)
member_lists = st.lists(st.integers(0, 100), min_size=1, max_size=24, unique=True)
