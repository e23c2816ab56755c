"""Hypothesis strategies for the things that property tests speak about."""

from __future__ import annotations

import dataclasses
import keyword
import string

import numpy as np
import torch
from hypothesis import strategies as st

from syncline.compute import outer
from syncline.config.spec import Spec
from syncline.data.order import Position, SampleOrder
from syncline.strategies.hierarchy import Hierarchy
from syncline.strategies.how import BF16, Exact, Int8, OneBit, PowerSGD, TopK
from syncline.strategies.own import Own
from syncline.strategies.strategy import Strategy
from syncline.strategies.switching import Phase, Switching, Until
from syncline.strategies.what import Gradients, Models, Updates
from syncline.strategies.when import Async, Every, Layerwise, Stale
from syncline.strategies.whom import OPTIMIZERS, TOPOLOGIES, Everyone, Memory, Neighbors, Rivals, Server

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

# Strategies of every kind, each sensible.

_rates = st.floats(0.001, 2)
_momenta = st.floats(0, 0.999)
_steps = st.integers(1, 1000)
outers = st.one_of(
    st.builds(outer.average),
    st.builds(outer.sgd, _rates),
    st.builds(outer.nesterov, _rates, _momenta),
    st.builds(outer.block_momentum, _momenta, _rates, st.booleans()),
)
codecs = st.one_of(st.sampled_from([Exact(), BF16(), Int8(), OneBit()]), st.builds(TopK, st.floats(1e-4, 1)))
everies = st.builds(Every, _steps)
optimizer_specs = st.sampled_from(sorted(set(OPTIMIZERS) - {"LBFGS"})).flatmap(
    lambda name: st.builds(
        Spec,
        st.just(name),
        st.fixed_dictionaries(
            {},
            optional={
                option: _rates if option == "lr" else st.booleans() | st.tuples(_momenta, _momenta) | st.none()
                for option in OPTIMIZERS[name]
            },
        ),
    )
)
servers = st.builds(Server, st.integers(1, 9), st.none() | optimizer_specs)
layerwises = st.builds(
    Layerwise, st.dictionaries(st.text(min_size=1, max_size=9), st.integers(1, 99), max_size=3), _steps, _steps
)
neighbors = st.builds(Neighbors, st.sampled_from(TOPOLOGIES))

sums_of_gradients = st.builds(Strategy, what=st.just(Gradients()), how=codecs | st.builds(PowerSGD, st.integers(1, 9)))
hogwild = st.just(Strategy(when=Async(), whom=Memory()))
sums_of_updates = st.one_of(
    st.builds(Strategy, what=st.builds(Updates, outers), when=everies, how=codecs),
    st.builds(Strategy, what=st.builds(Updates, outers, st.just(True)), when=everies),
)
gossips = st.builds(Strategy, what=st.just(Updates()), when=everies, whom=neighbors)
competitions = st.builds(
    Strategy,
    what=st.builds(Models, st.sampled_from(["loss", "accuracy"]), st.floats(0.001, 0.5), st.none() | st.floats(1, 4)),
    when=everies,
    whom=st.just(Rivals()),
)
shared_strategies = st.one_of(
    sums_of_gradients,
    sums_of_updates,
    hogwild,
    gossips,
    st.builds(Strategy, when=st.just(Async()), whom=neighbors, what=st.just(Updates())),
    st.builds(
        Strategy,
        when=st.one_of(
            st.just(Every(1)), st.builds(Async, _steps, _steps), st.builds(Stale, st.integers(0, 99)), layerwises
        ),
        whom=servers,
        how=codecs,
    ),
    st.builds(
        Strategy,
        what=st.builds(Updates, st.builds(outer.elastic, st.floats(0.01, 1))),
        when=everies,
        whom=st.builds(Server, st.integers(1, 9)),
    ),
)


@st.composite
def hierarchies(draw: st.DrawFn) -> Hierarchy:
    """Two strategies that go together."""
    inside = draw(st.one_of(sums_of_gradients, hogwild, sums_of_updates))
    across = draw(st.one_of(sums_of_gradients, sums_of_updates, gossips))
    if isinstance(across.what, Gradients) and inside.whom != Everyone():
        across = draw(sums_of_updates)
    if isinstance(inside.what, Updates):
        if isinstance(across.what, Gradients):
            across = draw(sums_of_updates)
        across = dataclasses.replace(across, when=Every(inside.when.steps * draw(st.integers(1, 9))))
    return Hierarchy(inside, across, draw(st.integers(2, 9)))


@st.composite
def switches(draw: st.DrawFn) -> Switching:
    """Strategies one after the other."""
    kinds = competitions if draw(st.integers(0, 4)) == 0 else shared_strategies | hierarchies()
    count = draw(st.integers(1, 3))
    last = {"epoch": 0, "step": 0}
    phases = []
    for _ in range(count):
        unit = draw(st.sampled_from(["epoch", "step"]))
        last[unit] += draw(st.integers(1, 500))
        phases.append(Phase(draw(kinds), Until(unit, last[unit])))
    return Switching(tuple(phases), draw(kinds))


_plain = st.none() | st.booleans() | numbers | st.text(max_size=9) | st.lists(numbers, max_size=3).map(tuple)
own_strategies = st.builds(
    Own,
    st.one_of(
        st.lists(identifiers, min_size=1, max_size=3).map(".".join),
        st.from_regex(r"(\./|/|C:\\)?([a-z_-]{1,6}[/\\]){0,2}[a-z_-]{1,8}( [a-z]{1,3})?\.py", fullmatch=True),
    ),
    identifiers,
    st.lists(_plain, max_size=2),
    st.dictionaries(identifiers, _plain, max_size=3),
)
all_strategies = st.one_of(shared_strategies, competitions, hierarchies(), switches(), own_strategies)
