"""Hypothesis strategies for the things that property tests speak about."""

from __future__ import annotations

import keyword
import string

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
