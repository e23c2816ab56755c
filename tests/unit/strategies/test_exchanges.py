"""Details of what strategies do that no contract sees: bytes, what is logged, which worker gets what."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from syncline.comms import codecs
from syncline.comms.codecs import Int8Codec
from syncline.comms.mixing import TOPOLOGIES, receivers
from syncline.comms.parameter_server.client import ParameterServers
from syncline.data.order import Position, SampleOrder
from syncline.errors import UnknownName
from syncline.strategies.brackets import draw
from syncline.strategies.exchange import Replica
from syncline.strategies.flat import FlatParameters
from syncline.strategies.gradients import GradientBuffer
from syncline.strategies.how import Exact
from syncline.strategies.methods.asynchronous_servers import AsynchronousServerExchange
from syncline.strategies.methods.tournament import Tournament
from syncline.strategies.reading import read_strategy
from syncline.strategies.reducers import CodecReducer, PowerSGDReducer
from syncline.strategies.what import Models
from syncline.strategies.when import Every
from syncline.strategies.whom import Rivals
from syncline.testing.threads import run_on_threads
from syncline.testing.trials import Problem, RecordingLog, linear_problem, train_on_threads
from syncline.workers.update import PIGGYBACKED_COUNT

NUMEL = 47  # of the model of linear_problem: 5 x 6 + 5 + 2 x 5 + 2


def replica_of(collective, start: float, *, seed: int = 0, score: Callable | None = None, **options) -> Replica:
    """A model of two numbers, both `start`."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, **options)
    gradients = GradientBuffer(model.parameters(), collective, PIGGYBACKED_COUNT, is_flat=True)
    log = RecordingLog()
    return Replica(
        model,
        optimizer,
        gradients,
        collective,
        seed=seed,
        score=None if score is None else lambda: (score(model), 0.0),
        log=log,
    )


# ----------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("topology", sorted(TOPOLOGIES))
@pytest.mark.parametrize("size", [2, 4, 5])
def test_a_gossiping_worker_sends_its_model_to_each_that_takes_it_and_to_nobody_else(topology, size):
    def work(collective):
        exchange = read_strategy(f"gossip('{topology}')").method.exchange(replica_of(collective, 1.0))
        exchange.begin()
        before = collective.bytes_sent
        exchange.combine(1.0, 1)
        return collective.bytes_sent - before

    mixing = TOPOLOGIES[topology](range(size), 1, 0)
    assert run_on_threads(size, work) == [2 * 4 * len(receivers(mixing, rank)) for rank in range(size)]


def bytes_to_servers(trial, rank: int) -> int:
    """Of a worker that is not the first, from which the servers also get their parameters."""
    _collective, servers = trial.logs[rank].counters
    return servers()


@pytest.mark.parametrize(("how", "nbytes"), [("", 4 * NUMEL), (" + int8", Int8Codec().wire_bytes(NUMEL))])
def test_a_push_costs_what_its_encoding_does(how, nbytes):
    trial = train_on_threads(f"server-async{how}", 2, steps=5)
    assert bytes_to_servers(trial, 1) == 5 * nbytes, "and nothing at the end, where nothing is left"
    trial = train_on_threads(f"server-sync{how}", 2, steps=5)
    assert bytes_to_servers(trial, 1) == 5 * nbytes


def test_gradients_that_are_added_up_are_pushed_once():
    trial = train_on_threads("downpour(push=3, fetch=6)", 2, steps=7)
    assert bytes_to_servers(trial, 1) == (2 + 1) * 4 * NUMEL, "once more at the end, with what is left"


def test_what_servers_send_back_is_told_too():
    trial = train_on_threads("server-sync", 2, steps=5)
    assert trial.logs[1].bytes_received == 5 * 4 * NUMEL


def test_hogwild_sends_nothing_however_long_it_trains():
    problem = linear_problem(samples=16 * 30)  # all in one epoch: at its end the workers meet
    short, long = (train_on_threads("hogwild", 3, steps=steps, problem=problem) for steps in (5, 25))
    assert [log.bytes_sent for log in short.logs] == [log.bytes_sent for log in long.logs]
    assert all(log.exchanges == 25 for log in long.logs)


# --------------------------------------------------------------------------------------------------- disagreement


def test_workers_that_combine_updates_tell_how_far_they_were_from_the_mean():
    def work(collective):
        replica = replica_of(collective, 2.0)
        exchange = read_strategy("sparknet(1)").method.exchange(replica)
        exchange.begin()
        FlatParameters(replica.gradients.parameters).write(torch.tensor([[1.0, 1.0], [5.0, 5.0]][collective.rank]))
        exchange.combine(0.5, 0)
        return replica.log.disagreements, replica.model.weight.flatten().tolist()

    for logged, weight in run_on_threads(2, work):
        assert weight == [3.0, 3.0]
        assert logged == pytest.approx([2 / 3])  # |1 - 3| / |3|


def test_workers_that_gossip_tell_how_far_they_were_from_the_mean():
    def work(collective):
        replica = replica_of(collective, 0.0)
        exchange = read_strategy("gossip(ring)").method.exchange(replica)
        exchange.begin()
        flat = FlatParameters(replica.gradients.parameters)
        flat.write(torch.full((2,), [1.0, 5.0][collective.rank]))
        exchange.combine(1.0, 0)
        return replica.log.disagreements, flat.read().tolist()

    for logged, weight in run_on_threads(2, work):
        assert weight == [3.0, 3.0]
        assert logged == pytest.approx([2 / 3])


# ---------------------------------------------------------------------------------------------------- tournaments


def tournament(size: int, what: Models, *, seed: int = 0):
    """One round among models of which the first is the best; momentum 0.1, 0.2, ..., its buffers 1, 2, ..."""

    def work(collective):
        place = collective.rank + 1
        replica = replica_of(
            collective,
            float(place),
            seed=seed,
            score=lambda model: float(model.weight.detach().sum()),
            momentum=place / 10,
        )
        exchange = Tournament(what, Every(1), Rivals(), Exact()).exchange(replica)
        exchange.begin()
        factor = exchange.private_state()["lr_factor"]
        replica.gradients.flats[0].fill_(float(place))
        exchange.before_update(1.0 / size)
        exchange.update()
        exchange.after_update(1.0 / size)
        state = exchange.private_state()
        (slots,) = state["optimizer"]["state"].values()
        (group,) = state["optimizer"]["param_groups"]
        return {
            "weight": float(state["own"][0].mean()),
            "buffer": float(slots["momentum_buffer"].mean()),
            "momentum": group["momentum"],
            "lr": group["lr"],
            "factor": state["lr_factor"],
            "factor_before": factor,
            "contests": replica.log.contests,
        }

    return run_on_threads(size, work)


def test_the_winners_weights_momentum_and_hyper_parameters_are_passed_on():
    first, second = tournament(2, Models())
    for worker in (first, second):
        assert (worker["weight"], worker["buffer"]) == (1.0, 1.0)
        assert worker["momentum"] == pytest.approx(0.1)
    (kept,), (taken) = first["contests"], second["contests"][0]
    assert (kept["rival"], kept["own_score"], kept["rival_score"], kept["took_over"]) == (1, 2.0, 4.0, False)
    assert (taken["rival"], taken["own_score"], taken["rival_score"], taken["took_over"]) == (0, 4.0, 2.0, True)
    assert taken["hyperparameters"]["momentum"] == pytest.approx(0.1)
    assert kept["round"] == taken["round"] == 1


def test_with_perturb_the_taker_varies_them_and_the_winner_keeps_its_own():
    first, second = tournament(2, Models(perturb=1.5))
    assert first["factor"] == first["factor_before"] != 1.0
    assert second["factor_before"] != first["factor_before"]
    assert second["factor"] != first["factor"]
    assert 1 / 1.5 <= second["factor"] / first["factor"] <= 1.5
    assert second["momentum"] != first["momentum"]
    assert 1 / 1.5 <= second["momentum"] / first["momentum"] <= 1.5
    assert second["contests"][0]["hyperparameters"]["lr_factor"] == second["factor"]
    assert second["weight"] == 1.0
    assert second["lr"] == 0.0  # the schedule's own, without the factor


@pytest.mark.parametrize("seed", range(4))
def test_who_has_a_bye_keeps_its_model(seed):
    workers = tournament(3, Models(), seed=seed)
    bye = draw(range(3), 1, seed).bye
    assert workers[bye]["weight"] == workers[bye]["buffer"] == bye + 1
    assert not workers[bye]["contests"]
    best = min(rank for rank in range(3) if rank != bye)
    assert all(worker["weight"] == best + 1 for rank, worker in enumerate(workers) if rank != bye)


def test_what_all_have_in_common_is_the_best_model_and_each_gets_its_own_back():
    def work(collective):
        replica = replica_of(
            collective, [3.0, 1.0, 2.0][collective.rank], score=lambda model: float(model.weight.detach().sum())
        )
        exchange = Tournament(Models(), Every(9), Rivals(), Exact()).exchange(replica)
        exchange.begin()
        with exchange.shared():
            inside = float(replica.model.weight.detach().mean())
        return inside, float(replica.model.weight.detach().mean())

    assert run_on_threads(3, work) == [(1.0, 3.0), (1.0, 1.0), (1.0, 2.0)]


# ------------------------------------------------------------------------------------------------------- layerwise


def test_layers_are_pushed_and_fetched_each_at_its_own_rate(monkeypatch):
    pushed, fetched = [], []
    push, pull = ParameterServers.push, ParameterServers.pull

    def noting_push(self, flat, *, ranges=None, ticks=1, **others):
        pushed.append((self.clock + ticks, ranges))
        push(self, flat, ranges=ranges, ticks=ticks, **others)

    def noting_pull(self, out, ranges=None):
        fetched.append((self.clock, ranges))
        pull(self, out, ranges)

    monkeypatch.setattr(ParameterServers, "push", noting_push)
    monkeypatch.setattr(ParameterServers, "pull", noting_pull)
    train_on_threads("gradients | layerwise(rates={'0.weight': 3, '1': 2}, largest=1) | server", 1, steps=7)
    # 0.weight is at 0 .. 30, 0.bias at 30 .. 35, 1.weight at 35 .. 45, 1.bias at 45 .. 47.
    often, twos, threes = [(30, 35)], [(30, 47)], [(0, 35)]
    assert pushed[:6] == [(1, often), (2, twos), (3, threes), (4, twos), (5, often), (6, None)]
    assert pushed[6:] == [(7, often), (7, [(0, 30), (35, 47)])]  # at the end, what is left
    partly = [(clock, ranges) for clock, ranges in fetched if ranges is not None]
    assert partly == [(1, often), (2, twos), (3, threes), (4, twos), (5, often)]  # and all of it at 0 and 6


def test_a_layer_that_is_not_there_is_answered_with_the_nearest_that_is():
    with pytest.raises(UnknownName, match=r"0\.wieght.*0\.weight"):
        train_on_threads("gradients | layerwise(rates={'0.wieght': 3}) | server", 1, steps=1)


# ------------------------------------------------------------------------------------------------------ embeddings


def words_problem() -> Problem:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, 50, (64, 3), generator=generator)

    def make_model() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(12, 2))

    targets = torch.randn(64, 2, generator=generator)
    return Problem(make_model, lambda p: torch.optim.SGD(p, lr=0.1), words, targets, batch=4)


def test_of_embeddings_only_the_touched_rows_travel():
    problem = words_problem()
    trial = train_on_threads("server-async", 2, steps=1, problem=problem)
    share = next(SampleOrder(seed=0, count=64, batch=4).shares(Position(), rank=1, size=2))
    touched = problem.inputs[torch.from_numpy(share.indices)].unique().numel()
    dense, one_row = 4 * (12 * 2 + 2), 8 + 4 * 4
    assert bytes_to_servers(trial, 1) == touched * one_row + dense


def test_pushing_rows_comes_to_the_same_as_pushing_all_of_an_embedding(monkeypatch):
    problem = words_problem()
    # Alone: of two workers, the later one may see what the other has pushed.
    by_rows = train_on_threads("server-async", 1, steps=1, problem=problem)
    monkeypatch.setattr(AsynchronousServerExchange, "_touched_rows", lambda self: None)
    whole = train_on_threads("server-async", 1, steps=1, problem=problem)
    assert by_rows.logs[0].bytes_sent < whole.logs[0].bytes_sent
    assert torch.equal(by_rows.shared[0], whole.shared[0])


# ------------------------------------------------------------------------------------------------------- switching


@pytest.mark.parametrize("until", ["step 4", "epoch 1"])  # an epoch has four steps
def test_a_switch_is_told_at_the_step_at_which_it_happens(until):
    trial = train_on_threads(f"allreduce until {until}, then sparknet(tau=2)", 2, steps=9)
    assert [log.switches for log in trial.logs] == [[(4, "updates | every(steps=2) | everyone | exact")]] * 2


def test_workers_that_trained_apart_go_on_with_one_optimizer():
    """Momenta that differ would drive workers apart that take the same gradients from the same parameters."""
    problem = linear_problem(momentum=0.9)
    trial = train_on_threads("sparknet(tau=3) until step 6, then allreduce", 3, steps=9, problem=problem)
    assert trial.is_equal_everywhere
    buffers = [[slot["momentum_buffer"] for slot in state["state"].values()] for state in trial.optimizers]
    assert all(torch.equal(mine, firsts) for other in buffers for mine, firsts in zip(other, buffers[0], strict=True))


# --------------------------------------------------------------------------------------------------------- closing

SHARE_MEMORY = ["hogwild", "gossip(asynchronous=True)", "h2o", "hogwild until step 2, then allreduce"]
"""Strategies that move the parameters to where other workers see them."""


@pytest.mark.parametrize("strategy", [*SHARE_MEMORY, "allreduce", "sparknet"])
def test_an_exchange_can_be_closed_if_its_begin_was_interrupted(strategy):
    def work(collective) -> list[float]:
        replica = replica_of(collective, start=2.0)
        read_strategy(strategy).method.exchange(replica).close()
        return replica.model.weight.flatten().tolist()

    assert run_on_threads(4, work) == [[2.0, 2.0]] * 4


@pytest.mark.parametrize("strategy", SHARE_MEMORY)
def test_closing_an_exchange_keeps_the_parameters_and_moves_them_out_of_shared_memory(strategy):
    def work(collective) -> None:
        replica = replica_of(collective, start=2.0)
        exchange = read_strategy(strategy).method.exchange(replica)
        close = exchange.close  # the end of a View calls what it was given at the beginning
        exchange.begin()
        weight = replica.model.weight
        for step in range(4):
            exchange.before_forward()
            with torch.no_grad():
                weight.fill_(float(step))
            collective.barrier()  # some average with others, which must have the same by then
            exchange.after_update(0.25)
            collective.barrier()
        trained_in = weight.data_ptr()
        close()
        assert weight.tolist() == [[3.0, 3.0]]
        assert weight.data_ptr() != trained_in or "allreduce" in strategy
        collective.barrier()

    run_on_threads(4, work)


# ------------------------------------------------------------------------------------------------------ hierarchies


def test_a_group_takes_over_the_optimizer_that_its_leader_has_averaged():
    text = "hierarchy(inside_host=gradients | every(1), across_hosts=updates(optimizer_state=True) | every(2))"
    trial = train_on_threads(text, 4, steps=3, problem=linear_problem(momentum=0.9))
    buffers = [torch.cat([s["momentum_buffer"].flatten() for s in o["state"].values()]) for o in trial.optimizers]
    assert all(torch.equal(buffer, buffers[0]) for buffer in buffers[1:])  # at the end all groups have averaged


# --------------------------------------------------------------------------------------------------------- encodings


def test_powersgd_of_a_gradient_of_its_own_rank_is_exact():
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(6, generator=generator), torch.randn(5, generator=generator)
    bias = torch.randn(5, generator=generator)

    def work(collective):
        reducer = PowerSGDReducer(1, [(6, 5), (5,)], collective, seed=0)
        sums = []
        for _ in range(2):
            scale = float(collective.rank + 1)
            flat = torch.cat([scale * torch.outer(left, right).flatten(), scale * bias])
            reducer.all_reduce_(flat, 0.5)
            sums.append(flat)
        return torch.stack(sums), reducer.state()["residual"]

    expected = 3.0 * torch.cat([torch.outer(left, right).flatten(), bias])  # (1 + 2 + 3) / 2
    for sums, residual in run_on_threads(3, work):
        torch.testing.assert_close(sums, expected.expand(2, -1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(residual, torch.zeros(35), rtol=0, atol=1e-5)


def test_an_exchange_that_another_worker_spoils_counts_as_not_sent():
    def work(collective):
        reducer = CodecReducer(codecs.OneBitCodec(), collective)
        reducer.all_reduce_(torch.linspace(-1.0, 2.0, 9), 0.5)
        before = reducer.state()["residual"].clone()
        flat = torch.linspace(-1.0, 3.0, 9)
        flat[4] = math.nan if collective.rank == 1 else 0.0
        reducer.all_reduce_(flat, 0.5)
        assert not flat.isfinite().all()
        return torch.equal(reducer.state()["residual"], before) and bool(before.any())

    assert run_on_threads(2, work) == [True, True]


def test_servers_that_throw_a_step_away_leave_what_could_not_be_sent_as_an_allreduce_does():
    """In the third step of the second worker the loss is NaN."""
    of_thread = threading.local()
    plain = linear_problem()

    def before_step(rank, step):
        of_thread.is_due = (rank, step) == (1, 2)

    def loss(output, target):
        value = plain.loss(output, target)
        return value * math.nan if getattr(of_thread, "is_due", False) else value

    problem = dataclasses.replace(plain, loss=loss)
    summed, served = (
        train_on_threads(f"{strategy} + onebit", 2, steps=6, problem=problem, before_step=before_step)
        for strategy in ("allreduce", "server-sync")
    )
    torch.testing.assert_close(served.shared[0], summed.shared[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["server-async", "server-async(shards=2)", "nexus(largest=1)"])
def test_coming_together_is_no_step_of_the_servers_optimizer(strategy):
    problem = linear_problem(momentum=0.9, lr=0.02)  # five epochs: the momentum would move on by itself after each
    alone = train_on_threads("allreduce", 1, steps=20, problem=problem)
    served = train_on_threads(strategy, 1, steps=20, problem=problem)
    torch.testing.assert_close(served.shared[0], alone.shared[0], rtol=1e-5, atol=1e-6)
