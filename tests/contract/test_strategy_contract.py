"""Every strategy keeps the contract: all presets, and combinations that are not one."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from syncline.comms.mixing import TOPOLOGIES
from syncline.strategies.presets import PRESETS
from syncline.testing.strategy_contract import check_strategy

ALLREDUCE = "gradients | every(1) | everyone"
OTHERS = [
    *(f"allreduce + {codec}" for codec in ("bf16", "int8", "topk(0.1)", "powersgd(rank=1)", "powersgd(rank=2)")),
    "server-sync(shards=2)",
    "server-sync + int8",
    "server-async(shards=2) + topk(0.2)",
    "ssp(bound=0)",
    "ssp(bound=1, shards=2)",
    "downpour(push=1, fetch=3)",
    "downpour(push=3, fetch=1)",
    "easgd(tau=2, shards=2)",
    "nexus(fraction=0.3, shards=2)",
    "gradients | layerwise(rates={'0.weight': 3, '1': 2}, largest=1) | server",
    "sparknet(tau=1)",
    "sparknet(tau=3) + onebit",
    "updates(outer=sgd(lr=0.5)) | every(3)",
    "iterative-reduce(steps=1)",
    "diloco(steps=3)",
    "bmuf(steps=3, nesterov=False)",
    *(f"gossip(topology='{topology}')" for topology in sorted(TOPOLOGIES)),
    "updates | every(3) | neighbors('ring')",
    "gossip(asynchronous=True)",
    "ltfb(steps=3)",
    "ltfb(steps=1, perturb=1.2)",
    "allreduce until epoch 1, then allreduce + onebit",
    "allreduce until step 7, then sparknet(tau=2)",
    "sparknet(tau=3) until step 5, then gossip until step 9, then iterative-reduce(steps=2)",
    "server-sync until step 5, then server-async until step 9, then allreduce",
    "hogwild until step 6, then easgd(tau=2) until step 10, then hogwild",
    "ltfb(steps=3) until step 7, then ltfb(steps=2, perturb=1.1)",
]
HIERARCHIES = [
    f"hierarchy(inside_host={inside}, across_hosts={across})"
    for inside, across in [
        (ALLREDUCE, ALLREDUCE),
        (ALLREDUCE, "gradients | every(1) | everyone | topk(0.3)"),
        ("gradients | every(1) | everyone | int8", "updates(outer=nesterov(lr=0.7, momentum=0.5)) | every(3)"),
        (ALLREDUCE, "updates | every(3) | everyone | int8"),
        (ALLREDUCE, "updates | every(2) | neighbors"),
        ("updates | every(2)", "updates | every(4)"),
        ("updates(optimizer_state=True) | every(2)", "updates | every(2) | neighbors('ring')"),
        ("gradients | async | memory", "updates | every(1) | neighbors"),
    ]
]
# A phase that ends where the contract saves, and one that ends later.
HIERARCHIES += [f"{HIERARCHIES[5]} until step {step}, then allreduce" for step in (7, 9)]


@pytest.fixture(scope="module", autouse=True)
def _one_thread_per_worker() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_keeps_the_contract(name):
    check_strategy(name, workers=4 if name == "h2o" else 3)


@pytest.mark.parametrize("text", OTHERS)
def test_other_strategies_keep_it(text):
    check_strategy(text)


@pytest.mark.parametrize("text", HIERARCHIES)
def test_hierarchies_keep_it(text):
    check_strategy(text, workers=4)


# ------------------------------------------------------------------------------------------- strategies of one's own

OWN = """
    from contextlib import contextmanager

    import torch

    from syncline.strategies.exchange import LocalExchange


    class Sums(LocalExchange):
        def before_update(self, weight):
            for flat in self.replica.gradients.flats:
                self.replica.collective.all_reduce_(flat, weight)
            return True


    class NeverAgrees(Sums):
        def before_update(self, weight):
            super().before_update(weight)
            return False


    class Stands(Sums):
        def update(self):
            pass


    class Momentum(Sums):
        '''The mean of the gradients so far, which it forgets to save.'''

        mean = None

        def update(self):
            flat = self.replica.gradients.flats[0]
            self.mean = flat.clone() if self.mean is None else 0.5 * self.mean + 0.5 * flat
            flat.copy_(self.mean)
            super().update()


    class Odd(Sums):
        def private_state(self):
            return {"what": object}


    class Spreads(LocalExchange):
        '''Averages gradients after it was decided whether a worker's own loss is finite.'''

        def update(self):
            pass

        def after_update(self, weight):
            for flat in self.replica.gradients.flats:
                self.replica.collective.all_reduce_(flat, weight)
            self.replica.optimizer.step()
            return True


    class Strategy:
        def __init__(self, name):
            self.name = name

        def exchange(self, replica):
            return globals().get(self.name, LocalExchange)(replica)
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(textwrap.dedent(OWN))
    return path


def test_a_sound_strategy_of_ones_own_keeps_the_contract(own):
    check_strategy(f"{own}:Strategy('Sums')")


CLIPPED = Path(__file__).parents[2] / "examples" / "clipped.py"


@pytest.mark.parametrize(
    ("text", "workers"),
    [
        (f"{CLIPPED}:ClippedPush", 3),
        (f"hierarchy(inside_host={CLIPPED}:ClippedSum(limit=2.0), across_hosts=updates | every(3))", 4),
        (f"hierarchy(inside_host={CLIPPED}:ClippedSum, across_hosts=allreduce + int8)", 4),
        (f"{CLIPPED}:ClippedPush until step 7, then {CLIPPED}:ClippedSum until step 9, then sparknet(2)", 3),
    ],
    ids=["server", "hierarchy of updates", "hierarchy of gradients", "switch"],
)
def test_ones_own_strategy_may_use_a_server_a_hierarchy_and_a_switch(text, workers):
    check_strategy(text, workers=workers)


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        (
            "LocalExchange",
            "workers \\[1, 2\\]",
        ),
        ("NeverAgrees", "worker 0 had one after 3 steps"),
        ("Stands", "does not learn"),
        ("Momentum", "12 steps.* after 7.*private_state"),
        ("Odd", "private_state"),
        ("Spreads", "NaN.*workers \\[0, 1, 2\\]"),
    ],
)
def test_a_strategy_that_breaks_a_promise_is_named_with_the_facts(own, name, facts):
    with pytest.raises(AssertionError, match=rf"own.py:Strategy\('{name}'\) .*{facts}"):
        check_strategy(f"{own}:Strategy({name!r})")
