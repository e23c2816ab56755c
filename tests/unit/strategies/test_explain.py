"""What `explain` shows of strategies, and how many bytes they send by theory."""

from __future__ import annotations

import math

import pytest
from generators import all_strategies
from hypothesis import assume, given
from hypothesis import strategies as st

from syncline.comms import codecs
from syncline.comms.codecs import powersgd
from syncline.strategies.explain import expected_bytes_per_step, explain
from syncline.strategies.method import ModelShapes
from syncline.strategies.own import Own
from syncline.strategies.reading import read_strategy

SHAPES = {"conv.weight": (8, 1, 5, 5), "conv.bias": (8,), "fc.weight": (120, 400), "fc.bias": (120,)}
NUMEL = sum(math.prod(shape) for shape in SHAPES.values())
EXACT = 4 * NUMEL


def explained(text: str, workers: int = 4) -> str:
    return "\n".join(explain(read_strategy(text), workers, SHAPES))


def expected(text: str, workers: int = 4, **more: int) -> float | None:
    return expected_bytes_per_step(read_strategy(text), SHAPES, workers=workers, **more)


@given(all_strategies, st.integers(1, 9))
def test_every_strategy_can_be_explained_and_counted(strategy, workers):
    assume(not isinstance(strategy, Own))  # its file does not exist
    assert explain(strategy, workers, SHAPES)
    figure = expected_bytes_per_step(strategy, SHAPES, workers=workers)
    assert figure == 0 if workers == 1 else figure >= 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("allreduce", ["all workers sum their gradients"]),
        ("sparknet", ["Every 10 steps all workers average what they have changed"]),
        ("iterative-reduce", ["The optimizers' state is averaged, too."]),
        ("server-sync", ["pushes its gradients to the server", "When all have arrived, it steps", "pulls"]),
        ("server-sync(shards=3)", ["the 3 servers (each holds a part of the model)", "they step with"]),
        ("downpour(push=4)", ["every 4 steps (gradients add up in between)", "adagrad(lr=0.01"]),
        ("ssp", ["at most 3 steps ahead of the slowest"]),
        ("ssp(0)", ["When all have arrived"]),
        ("layerwise(rates={'fc': 4}) | server", ["named fc... every 4 steps", "the largest every 2 steps"]),
        ("hogwild", ["one copy of the parameters in shared memory", "Nothing is sent."]),
        ("gossip(topology=ring)", ["'ring'", "to 2 others"]),
        ("gossip", ["to 1 other"]),
        ("gossip(asynchronous=True)", ["every second worker averages"]),
        ("easgd", ["meets the center at the server", "elastic(rate=0.225)"]),
        ("ltfb(perturb=1.2)", ["paired at random", "lower loss", "2% of the training data", "a factor of up to 1.2"]),
        ("h2o", ["Inside a group:", "Nothing is sent.", "Across groups", "Every 5 steps"]),
        ("allreduce until epoch 1, then sparknet", ["Until epoch 1:", "Then:"]),
    ],
)
def test_the_explanation_shows_who_sends_what_to_whom_and_when(text, words):
    for part in words:
        assert part in explained(text)


def test_one_worker_exchanges_nothing_and_an_odd_one_has_no_rival():
    assert explained("sparknet", workers=1) == "There is only one worker: nothing is exchanged."
    assert "one of them has no rival" in explained("ltfb", workers=3)


@pytest.mark.parametrize(
    ("text", "a_step"),
    [
        ("allreduce", EXACT),
        ("allreduce + onebit", codecs.OneBitCodec().wire_bytes(NUMEL)),
        ("allreduce + powersgd(2)", powersgd.cut(list(SHAPES.values()), 2).wire_bytes),
        ("sparknet(10)", EXACT / 10),
        ("diloco(50)", codecs.Int8Codec().wire_bytes(NUMEL) / 50),
        ("server-sync", EXACT),
        ("server-async + topk(0.01)", codecs.TopKCodec(0.01).wire_bytes(NUMEL)),
        ("downpour(push=4, fetch=2)", EXACT / 4),
        ("ssp", EXACT),
        ("easgd(tau=10)", EXACT / 10),
        ("nexus", EXACT - 4 * 48000 / 2),
        ("layerwise(rates={'fc': 4}) | server", 4 * (208 + 48120 / 4)),
        ("hogwild", 0),
        ("gossip", EXACT),
        ("gossip(topology=ring)", 2 * EXACT),
        ("gossip(topology=static-exponential)", 2 * EXACT),
        ("gossip(asynchronous=True)", EXACT),
        ("ltfb(100)", EXACT / 100),
        ("h2o(steps=5)", EXACT / 5 / 2),
        # Every worker inside; of two workers one, the leader, across; and it passes the sum on.
        ("hierarchy(allreduce, allreduce)", 2 * EXACT),
        ("allreduce until epoch 1, then sparknet", EXACT / 10),
    ],
)
def test_bytes_a_step_are_what_theory_says(text, a_step):
    assert expected(text) == pytest.approx(a_step)


def test_the_optimizers_state_is_counted_where_it_travels():
    assert expected("iterative-reduce", optimizer_slots=1) == pytest.approx(2 * EXACT / 5)
    assert expected("ltfb(10)", optimizer_slots=2) == pytest.approx(3 * EXACT / 10)
    assert expected("sparknet", optimizer_slots=1) == pytest.approx(EXACT / 10)


def test_an_odd_number_of_workers_leaves_one_out():
    assert expected("ltfb(10)", workers=3) == pytest.approx(EXACT / 10 * 2 / 3)
    assert expected("gossip(topology=random)", workers=5) == pytest.approx(EXACT * 4 / 5)


def test_shapes_may_be_named_listed_or_only_counted():
    strategy = read_strategy("allreduce + int8")
    figures = {ModelShapes(shapes).encoded_bytes(strategy.how) for shapes in (SHAPES, list(SHAPES.values()), NUMEL)}
    assert len(figures) == 1
    assert f"{NUMEL:,} parameters" in "\n".join(explain(strategy, 2, NUMEL))


@pytest.mark.parametrize(
    ("text", "consequence"),
    [
        ("allreduce", "step in flight"), ("sparknet", "since the last average"), ("server-async", "not pushed"),
        ("nexus", "last checkpoint"), ("h2o", "last checkpoint"), ("hogwild", "finished writing"),
    ],
)  # fmt: skip
def test_the_explanation_shows_which_steps_of_a_failed_worker_count(text, consequence):
    assert consequence in explain(read_strategy(text), 4, SHAPES)[-1]
