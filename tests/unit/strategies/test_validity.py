"""Which strategies are valid, and what a run must offer for one: every refusal suggests a valid strategy."""

from __future__ import annotations

import itertools
import re

import pytest

from syncline.comms.mixing import TOPOLOGIES as KNOWN_TOPOLOGIES
from syncline.compute.outer import average, block_momentum, elastic, nesterov, sgd
from syncline.config.spec import Spec
from syncline.errors import ConfigError
from syncline.strategies.answers import brief
from syncline.strategies.hierarchy import Hierarchy
from syncline.strategies.how import BF16, Exact, Int8, OneBit, PowerSGD, TopK
from syncline.strategies.method import RunConditions
from syncline.strategies.presets import PRESETS
from syncline.strategies.reading import read_strategy
from syncline.strategies.strategy import Strategy
from syncline.strategies.switching import Phase, Switching, Until
from syncline.strategies.what import Gradients, Models, Updates
from syncline.strategies.when import Async, Every, Layerwise, Stale
from syncline.strategies.whom import OPTIMIZERS, TOPOLOGIES, Everyone, Memory, Neighbors, Rivals, Server

WHATS = [
    Gradients(), Updates(), Updates(optimizer_state=True), Updates(outer=sgd(0.5)), Updates(outer=nesterov(0.7, 0.9)),
    Updates(outer=block_momentum(0.5)), Updates(outer=elastic(0.2)), Updates(outer=elastic(0.2), optimizer_state=True),
    Models(), Models(score="accuracy", perturb=1.2),
]  # fmt: skip
WHENS = [
    Every(1), Every(4), Async(), Async(4, 8), Stale(0), Stale(3), Layerwise(), Layerwise({"fc": 4}),
]  # fmt: skip
WHOMS = [
    Everyone(), Server(), Server(2, Spec("Adagrad", {"lr": 0.01})), Neighbors(), Neighbors("ring"), Memory(),
    Rivals(),
]  # fmt: skip
HOWS = [Exact(), BF16(), Int8(), OneBit(), TopK(0.1), PowerSGD()]


def makes_sense(what, when, whom, how):
    """What the methods declare together, written down a second time and the other way round."""
    is_exact, is_linear = isinstance(how, Exact), isinstance(how, PowerSGD)
    match what, when, whom:
        case Gradients(), Every(1), Everyone():
            return True
        case Gradients(), Every(1) | Async() | Stale() | Layerwise(), Server():
            return not is_linear
        case Gradients(), Async(1, 1), Memory():
            return is_exact
        case Updates(outer=elastic()), Every(), Server():
            return is_exact and whom.optimizer is None and not what.optimizer_state
        case Updates(outer=elastic()), _, _:
            return False
        case Updates(), Every(), Everyone():
            return is_exact if what.optimizer_state else not is_linear
        case Updates(outer=average()), Every() | Async(1, 1), Neighbors():
            return is_exact and not what.optimizer_state
        case Models(), Every(), Rivals():
            return is_exact
    return False


def way_out(error: ConfigError) -> Strategy | Hierarchy:
    """The strategy that an error message proposes."""
    found = re.search(r"""Use (['"])(?P<text>.*?)\1""", str(error))
    assert found is not None, f"No way out in: {error}"
    made = read_strategy(found["text"])
    assert isinstance(made, (Strategy, Hierarchy))
    return made


@pytest.mark.parametrize("what", WHATS, ids=str)
def test_every_combination_is_made_or_refused_with_the_nearest_that_can_be(what):
    for when, whom, how in itertools.product(WHENS, WHOMS, HOWS):
        answers = {"what": what, "when": when, "whom": whom, "how": how}
        if makes_sense(what, when, whom, how):
            assert Strategy(**answers).what == what
            continue
        with pytest.raises(ConfigError) as caught:
            Strategy(**answers)
        nearest = way_out(caught.value)
        kept = [question for question, answer in answers.items() if type(getattr(nearest, question)) is type(answer)]
        assert kept, f"Nothing is left of {answers} in {nearest}"
        assert caught.value.code == "invalid-combination"
        assert caught.value.facts["answer"] in str(caught.value), "the offending answer is shown"


SENSIBLE = [
    Strategy(**dict(zip(("what", "when", "whom", "how"), answers, strict=True)))
    for answers in itertools.product(WHATS, WHENS, WHOMS, HOWS)
    if makes_sense(*answers)
]


def levels_make_sense(inside: Strategy, across: Strategy) -> bool:
    if not isinstance(inside.whom, (Everyone, Memory)) or not isinstance(across.when, Every):
        return False
    if isinstance(across.what, Gradients):
        return across.whom == Everyone() and inside.what == Gradients() and inside.whom == Everyone()
    if not isinstance(across.what, Updates) or not isinstance(across.whom, (Everyone, Neighbors)):
        return False
    return not isinstance(inside.what, Updates) or across.when.steps % inside.when.steps == 0


def test_every_pair_of_strategies_makes_a_hierarchy_or_is_refused_with_the_nearest_that_does():
    few = [s for s in SENSIBLE if isinstance(s.how, (Exact, PowerSGD))]
    made = 0
    for inside, across in itertools.product(few, few):
        if levels_make_sense(inside, across):
            assert Hierarchy(inside, across).across_hosts == across
            made += 1
            continue
        with pytest.raises(ConfigError) as caught:
            Hierarchy(inside, across)
        assert isinstance(way_out(caught.value), Hierarchy)
    assert made > 100


@pytest.mark.parametrize(
    ("text", "offending", "instead"),
    [
        ("models | every(5) | rivals | onebit", "onebit", "models | every(5) | rivals"),
        ("gradients | async | memory | int8", "int8", "gradients | async | memory"),
        ("gradients | memory", "every", "gradients | async | memory"),
        ("gradients | neighbors", "gradients", "updates | every(1) | neighbors"),
        ("updates | every(20) | rivals", "updates", "models | every(20) | rivals"),
        ("gradients | async", "async", "gradients | async | server"),
        ("gradients | stale(3)", "stale", "gradients | stale | server"),
        ("gradients | layerwise", "layerwise", "gradients | layerwise | server"),
        ("updates(outer=elastic(0.2)) | every(10)", "updates(outer=elastic(rate=0.2))",
         "updates(outer=elastic(rate=0.2)) | every(10) | server"),
        ("updates | every(10) | server", "updates", "updates | every(10)"),
        ("gradients | server | powersgd", "powersgd", "gradients | every(1) | powersgd"),
        ("updates | every(4) | powersgd", "powersgd", "updates | every(4) | int8"),
        ("gradients | every(4)", "every(steps=4)", "updates | every(4)"),
        ("gradients | every(4) | server", "every(steps=4)", "gradients | async(push=4, fetch=4) | server"),
        ("updates(outer=elastic(0.2)) | every(4) | server(optimizer=sgd(lr=1))", "server(optimizer=sgd(lr=1))",
         "updates(outer=elastic(rate=0.2)) | every(4) | server"),
        ("updates | async(4, 4) | neighbors(topology=ring)", "async(push=4, fetch=4)",
         "updates | async | neighbors(topology='ring')"),
        ("updates(optimizer_state=True) | int8", "int8", "updates(optimizer_state=True) | every(1)"),
    ],
)  # fmt: skip
def test_the_offending_answer_and_the_nearest_valid_strategy_are_those_that_a_person_would_give(
    text, offending, instead
):
    with pytest.raises(ConfigError) as caught:
        read_strategy(text)
    assert caught.value.facts["answer"] == offending
    assert caught.value.facts["instead"] == instead == brief(way_out(caught.value).answers)


@pytest.mark.parametrize(
    ("inside", "across", "instead"),
    [
        ("updates | every(4)", "updates | every(6)", "across_hosts=updates | every(8)"),
        ("hogwild", "allreduce", "inside_host=gradients | async | memory, across_hosts=updates | every(10)"),
        ("sparknet", "allreduce", "across_hosts=updates | every(10)"),
        ("server-sync", "sparknet", "inside_host=gradients | every(1), across_hosts=updates | every(10)"),
        ("gossip", "sparknet", "inside_host=updates | every(1), across_hosts=updates | every(10)"),
        ("allreduce", "hogwild", "inside_host=gradients | every(1), across_hosts=gradients | every(1)"),
        ("allreduce", "ltfb", "across_hosts=updates | every(100)"),
        ("allreduce", "gossip(asynchronous=True)", "across_hosts=updates | every(1) | neighbors"),
    ],
)
def test_an_invalid_hierarchy_is_refused_with_the_nearest_valid_one(inside, across, instead):
    with pytest.raises(ConfigError) as caught:
        read_strategy(f"hierarchy(inside_host={inside}, across_hosts={across})")
    assert caught.value.code == "invalid-hierarchy"
    assert instead in caught.value.facts["instead"]


def test_hierarchies_do_not_nest():
    with pytest.raises(ConfigError) as caught:
        read_strategy("hierarchy(inside_host=h2o, across_hosts=allreduce)")
    assert (caught.value.code, caught.value.facts["level"]) == ("nested-hierarchy", "inside_host")


def test_phases_must_come_in_order_but_epochs_and_steps_are_not_compared():
    allreduce = Strategy()
    Switching((Phase(allreduce, Until("epoch", 2)), Phase(allreduce, Until("step", 1))), allreduce)
    phases = (
        Phase(allreduce, Until("step", 9)),
        Phase(allreduce, Until("epoch", 1)),
        Phase(allreduce, Until("step", 9)),
    )
    with pytest.raises(ConfigError, match="over before it begins"):
        Switching(phases, allreduce)
    with pytest.raises(ConfigError, match="a strategy to switch from"):
        Switching((), allreduce)


def test_competing_models_are_not_switched_to_or_from():
    for text in ("allreduce until epoch 1, then ltfb", "ltfb until epoch 1, then allreduce"):
        with pytest.raises(ConfigError) as caught:
            read_strategy(text)
        assert caught.value.code == "cannot-switch"
        assert brief(way_out(caught.value).answers) == "models | every(100) | rivals"
    assert read_strategy("ltfb(10) until epoch 1, then ltfb")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Models(score="beauty"), lambda: Models(held_out=0), lambda: Models(held_out=0.6),
        lambda: Models(perturb=0.9), lambda: Models(held_out=True), lambda: Async(push=0), lambda: Async(fetch=True),
        lambda: Stale(-1), lambda: Stale(1.5), lambda: Layerwise({"fc": 0}), lambda: Layerwise({"": 1}),
        lambda: Layerwise([1]), lambda: Layerwise(largest=0), lambda: Server(0), lambda: Server(1, Spec("Adagard")),
        lambda: Server(1, Spec("SGD", {"lrr": 1})), lambda: Server(1, Spec("SGD", {"lr": -1})),
        lambda: Server(1, Spec("LBFGS")), lambda: Neighbors("star"), lambda: PowerSGD(0), lambda: PowerSGD(True),
        lambda: Until("hour", 1), lambda: Until("step", 0), lambda: Hierarchy(Strategy(), Strategy(), 1),
        lambda: Updates(outer="nesterov"), lambda: Updates(optimizer_state=1), lambda: Phase(Strategy(), 3),
        lambda: Strategy(what=Every(1)),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_answered_with_a_sentence(make):
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value).endswith(".")


def test_a_layers_rate_is_that_of_the_longest_name_that_fits():
    sizes = {"conv.weight": 10, "fc.weight": 50, "fc.bias": 5, "out.weight": 40}
    assert Layerwise({"fc": 4, "fc.b": 8}, others=3, largest=2).rate_of(sizes) == {
        "conv.weight": 3, "fc.weight": 4, "fc.bias": 8, "out.weight": 3,
    }  # fmt: skip
    assert Layerwise().rate_of(sizes) == {"conv.weight": 1, "fc.weight": 2, "fc.bias": 1, "out.weight": 1}
    assert Layerwise().rate_of({}) == {}


def test_the_names_that_torch_and_gossip_know_are_those_that_a_strategy_takes():
    import inspect

    import torch

    there = {
        name: set(list(inspect.signature(kind).parameters)[1:])
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    assert {name: set(options) for name, options in OPTIMIZERS.items()} == there
    assert set(TOPOLOGIES) == set(KNOWN_TOPOLOGIES)


RUN = {"workers": 4, "hosts": 1, "shares_memory": True, "is_own_loop": False, "clip_norm": None}


def check(strategy, **changes):
    strategy.method.check_run(RunConditions(**{**RUN, **changes}))


@pytest.mark.parametrize(
    ("text", "facts", "words"),
    [
        ("hogwild", {"hosts": 2}, "--strategy h2o, which shares memory inside each host"),
        ("hogwild", {"hosts": 2, "shares_memory": False}, "--strategy server-async"),
        ("hogwild", {"shares_memory": False}, "--strategy server-async"),
        ("allreduce until epoch 1, then hogwild", {"shares_memory": False}, "--strategy server-async"),
        ("h2o", {"shares_memory": False}, "Hogwild needs memory that all workers share"),
        ("gossip(asynchronous=True)", {"shares_memory": False}, "gossip(topology='exponential')"),
        ("gossip(asynchronous=True)", {"hosts": 2}, "on 2 hosts"),
        ("ltfb", {"workers": 1}, "Set --workers to 2 or more"),
        ("ltfb", {"is_own_loop": True}, "Use syncline train"),
        ("h2o", {"workers": 2}, "Set --workers to 4 or more."),
        ("h2o(group=3)", {"workers": 4}, "Set --workers to 6 or more, or group to 2."),
        ("h2o(group=3)", {"workers": 8}, "Set --workers to 6 or 9, or group to 2."),
        ("h2o", {"workers": 7}, "Set --workers to 6 or 8."),
        ("server-sync(shards=2)", {"clip_norm": 1.0}, "Set shards=1, use --strategy allreduce"),
        ("ssp(bound=0, shards=2)", {"clip_norm": 1.0}, "Set shards=1"),
    ],
)
def test_what_a_run_cannot_do_is_said_before_it_starts(text, facts, words):
    with pytest.raises(ConfigError) as caught:
        check(read_strategy(text), **facts)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", [p.name for p in PRESETS.values()])
def test_every_preset_is_feasible_with_four_workers_and_all_but_tournaments_with_one(name):
    strategy = read_strategy(name)
    check(strategy)
    if name != "ltfb":
        check(strategy, workers=1, shares_memory=False, is_own_loop=True, clip_norm=1.0)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("h2o", {"hosts": 2, "workers": 3}),
        ("server-sync", {"clip_norm": 1.0}),
        ("allreduce until step 5, then sparknet", {"is_own_loop": True}),
        ("server-async(shards=2)", {"clip_norm": 1.0}),
        ("gossip", {"hosts": 3, "shares_memory": False}),
    ],
)
def test_what_a_run_can_do_is_not_refused(text, facts):
    check(read_strategy(text), **facts)


def test_a_run_knows_how_many_servers_a_strategy_needs():
    assert read_strategy("allreduce").method.servers == 0
    assert read_strategy("server-sync(shards=3)").method.servers == 3
    assert read_strategy("server-sync(shards=2) until step 5, then easgd(shards=4)").method.servers == 4
    assert read_strategy("h2o").method.servers == 0


def test_a_run_knows_whether_workers_train_at_their_own_pace():
    asynchronous = {p.name for p in PRESETS.values() if p.make().method.is_asynchronous}
    assert asynchronous == {"server-async", "downpour", "ssp", "hogwild", "easgd", "nexus"}
    assert read_strategy("gossip(asynchronous=True)").method.is_asynchronous
    assert read_strategy("hogwild until epoch 1, then allreduce").method.is_asynchronous
    assert not read_strategy("ssp(bound=0)").method.is_asynchronous


def test_a_run_knows_whether_forward_passes_are_in_step():
    in_step = {p.name for p in PRESETS.values() if p.make().method.is_lock_step}
    assert in_step == {"allreduce", "server-sync", "onebit"}
    assert read_strategy("hierarchy(allreduce, onebit)").method.is_lock_step
    assert read_strategy("ssp(0)").method.is_lock_step
    assert not read_strategy("hierarchy(allreduce, sparknet)").method.is_lock_step
    assert not read_strategy("allreduce until epoch 1, then sparknet").method.is_lock_step


def test_a_run_knows_how_much_data_is_held_out():
    assert read_strategy("allreduce").method.held_out == 0
    assert read_strategy("ltfb").method.held_out == 0.02
    assert read_strategy("models(held_out=0.1) | rivals until epoch 1, then ltfb").method.held_out == 0.1
