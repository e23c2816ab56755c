"""Strategies carried out by real workers: the equivalences that theory promises, and that all of them learn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from real_runs import (
    FailAt,
    InterruptAt,
    KillServer,
    Slow,
    final_state,
    relative_difference,
    same_bits,
    samples,
    small_net,
)

import syncline
from syncline.strategies.method import ModelShapes
from syncline.strategies.presets import PRESETS
from syncline.strategies.reading import read_strategy
from syncline.telemetry.events import CheckpointSaved, Progress, StrategySwitched, TournamentMatch, WarningMessage
from syncline.telemetry.run_dir import RunDir


def train(tmp_path: Path, strategy: str, workers: int = 3, **changes: object) -> syncline.Result:
    settings: dict[str, object] = {
        "model": small_net(), "data": samples(), "test": samples(57, seed=2), "batch": 12, "epochs": 4,
        "optimizer": syncline.sgd(lr=0.1), "out": str(tmp_path), "quiet": True, **changes,
    }  # fmt: skip
    return syncline.train(strategy=strategy, workers=workers, **settings)  # type: ignore[arg-type]


def model_of(result: syncline.Result) -> dict[str, object]:
    return final_state(result.run_dir)["model"]


def test_averaging_after_every_step_of_plain_sgd_is_the_all_reduce(tmp_path):
    reference = train(tmp_path / "a", "allreduce")
    assert relative_difference(model_of(reference), model_of(train(tmp_path / "b", "sparknet(tau=1)"))) < 1e-5
    assert (
        relative_difference(model_of(reference), model_of(train(tmp_path / "c", "updates(outer=sgd(lr=1.0))"))) < 1e-5
    )


def test_an_outer_sgd_of_rate_1_is_averaging(tmp_path):
    changes = {"optimizer": syncline.sgd(lr=0.1, momentum=0.9)}
    plain = train(tmp_path / "a", "sparknet(4)", **changes)
    outer = train(tmp_path / "b", "updates(outer=sgd(lr=1.0)) | every(4)", **changes)
    assert relative_difference(model_of(plain), model_of(outer)) < 1e-5
    assert relative_difference(model_of(plain), model_of(train(tmp_path / "c", "allreduce", **changes))) > 1e-3


def test_a_sum_at_the_servers_is_the_all_reduce_bit_by_bit(tmp_path):
    changes = {"optimizer": syncline.adam(lr=0.01, fused=False), "workers": 3}
    reference = model_of(train(tmp_path / "a", "allreduce", **changes))
    assert same_bits(reference, model_of(train(tmp_path / "b", "server-sync", **changes)))
    assert same_bits(reference, model_of(train(tmp_path / "c", "server-sync(shards=2)", **changes)))
    assert same_bits(reference, model_of(train(tmp_path / "d", "ssp(bound=0)", **changes)))


def test_the_schedule_and_the_clipping_reach_the_server(tmp_path):
    changes = {"optimizer": syncline.sgd(lr=0.2, momentum=0.9), "schedule": "OneCycleLR(max_lr=0.3)", "clip_norm": 0.3}
    reference = model_of(train(tmp_path / "a", "allreduce", **changes))
    assert relative_difference(reference, model_of(train(tmp_path / "b", "server-sync", **changes))) < 1e-5
    with pytest.raises(syncline.ConfigError, match="Set shards=1"):
        train(tmp_path / "c", "server-sync(shards=2)", **changes)


def test_a_hierarchy_of_equals_is_the_flat_form(tmp_path):
    for flat in ("allreduce", "sparknet(4)"):
        levels = f"hierarchy(inside_host={flat}, across_hosts={flat}, group=2)"
        a, b = (train(tmp_path / s, s, workers=4) for s in (flat, levels))
        assert relative_difference(model_of(a), model_of(b)) < 1e-5


def test_through_torch_distributed_it_is_the_same(tmp_path):
    for strategy in ("gossip", "hierarchy(allreduce, sparknet(3))"):
        here = train(tmp_path / "a", strategy, workers=4)
        there = train(tmp_path / "b", strategy, workers=4, collective="process-group")
        assert relative_difference(model_of(here), model_of(there)) < 1e-4, strategy
    with pytest.raises(syncline.ConfigError, match="memory"):
        train(tmp_path, "hogwild", workers=4, collective="process-group")


@pytest.mark.parametrize("strategy", ["onebit", "hogwild"])
def test_one_worker_alone_is_plain_sgd(tmp_path, strategy):
    alone = train(tmp_path / "a", strategy, workers=1)
    assert same_bits(model_of(alone), model_of(train(tmp_path / "b", "allreduce", workers=1)))


@pytest.mark.parametrize("name", [p.name for p in PRESETS.values()])
def test_every_preset_learns_digits_with_four_workers(tmp_path, name):
    result = syncline.train(
        model="mlp(hidden=(64,))", data="digits", workers=4, epochs=12, strategy=name, out=str(tmp_path), quiet=True
    )
    assert result.metrics["test/accuracy"] > 0.9


@pytest.mark.parametrize(
    "strategy",  # the contract of strategies has them all, as threads; these need what only processes have
    [
        "diloco(steps=5)", "server-sync(shards=2) + onebit", "ltfb(steps=4, perturb=1.2)",
        "hierarchy(allreduce, sparknet(4))", "allreduce until step 9, then sparknet(4) until epoch 3, then gossip",
    ],
)  # fmt: skip
def test_a_stopped_run_goes_on_with_the_same_bits_whatever_the_workers_hold_for_themselves(tmp_path, strategy):
    workers = 4 if "hierarchy" in strategy else 3
    changes = {"optimizer": syncline.sgd(lr=0.05, momentum=0.9), "epochs": 5, "workers": workers}
    whole = train(tmp_path / "whole", strategy, model=InterruptAt(small_net(), -1, tmp_path / "no"), **changes)
    with pytest.raises(syncline.Interrupted):
        train(tmp_path / "cut", strategy, model=InterruptAt(small_net(), 13, tmp_path / "flag"), **changes)
    (run_dir,) = (p.parent for p in (tmp_path / "cut").glob("*/plan.json"))
    assert 13 <= final_state(run_dir)["position"]["step"] < 45
    assert same_bits(model_of(syncline.resume(run_dir, quiet=True)), model_of(whole))


@pytest.mark.parametrize("strategy", ["ssp(bound=2)", "downpour(lr=0.1)", "easgd(tau=3)", "gossip(asynchronous=True)"])
def test_workers_at_their_own_pace_stop_together_and_go_on(tmp_path, strategy):
    changes = {"epochs": 12, "optimizer": syncline.sgd(lr=0.2)}
    with pytest.raises(syncline.Interrupted, match="everything is saved"):
        train(tmp_path, strategy, model=InterruptAt(small_net(), 13, tmp_path / "flag"), **changes)
    (run_dir,) = (p.parent for p in tmp_path.glob("*/plan.json"))
    assert 13 <= final_state(run_dir)["position"]["step"] < 108
    result = syncline.resume(run_dir, quiet=True)
    assert result.steps == 108
    assert result.metrics["test/accuracy"] > 0.75


@pytest.mark.parametrize("strategy", ["hierarchy(allreduce, sparknet(4))", "server-async"])
def test_a_run_goes_on_with_more_workers_than_it_was_saved_with(tmp_path, strategy):
    first = train(tmp_path, strategy, workers=4, epochs=2)
    result = syncline.resume(first.run_dir, quiet=True, workers=6, epochs=4)
    assert result.steps == 2 * first.steps


def test_checkpoints_are_made_while_workers_are_at_different_steps(tmp_path):
    changes = {"checkpoint_every_steps": 10, "keep_checkpoints": 20, "epochs": 9}
    result = train(tmp_path, "server-async", model=Slow(small_net(), 0.02), **changes)
    steps = [e.step for e in RunDir(result.run_dir).read_events() if isinstance(e, CheckpointSaved)]
    assert len(steps) > 2
    assert steps[-1] == result.steps == 81


def test_a_server_that_is_killed_is_named_and_nothing_is_left(tmp_path):
    with pytest.raises(syncline.WorkerFailed, match=r"^Server 1 was killed by SIGKILL"):
        train(
            tmp_path,
            "server-async(shards=2)",
            model=KillServer(small_net(), call=7, rank=4),
            epochs=50,
            on_worker_failure="stop",
        )


def test_a_strategy_that_changes_says_so_and_keeps_its_bytes(tmp_path):
    result = train(tmp_path, "allreduce until epoch 1, then allreduce + topk(0.1)", workers=2)
    events = RunDir(result.run_dir).read_events()
    (switch,) = [e for e in events if isinstance(e, StrategySwitched)]
    assert (switch.step, switch.strategy) == (9, "gradients | every | everyone | topk(fraction=0.1)")


def test_tournaments_are_told_with_winners_and_what_they_pass_on(tmp_path):
    result = train(tmp_path, "ltfb(steps=6, perturb=1.3)", workers=4, epochs=4)
    contests = [e for e in RunDir(result.run_dir).read_events() if isinstance(e, TournamentMatch)]
    assert {(c.round, c.worker_id) for c in contests} == {
        (r, k) for r in range(1, result.steps // 6 + 1) for k in range(4)
    }
    for contest in contests:
        assert contest.adopted == (contest.opponent_score < contest.own_score)
    assert len({c.hyperparameters["lr_factor"] for c in contests}) > 1
    assert any(c.adopted for c in contests)


def test_a_rival_whose_loss_is_not_finite_is_no_failure_of_the_run(tmp_path):
    model = FailAt(small_net(), call=5, rank=1, fault="nan")
    result = train(tmp_path, "ltfb(steps=6)", workers=2, model=model)
    warnings = [e.message for e in RunDir(result.run_dir).read_events() if isinstance(e, WarningMessage)]
    assert any("on worker 1 at step 4" in w and "will lose its next contest" in w for w in warnings)


@pytest.mark.parametrize("codec", ["exact", "bf16", "int8", "onebit", "topk(0.01)", "powersgd(2)"])
def test_the_bytes_that_are_sent_are_those_of_theory(tmp_path, codec):
    torch.manual_seed(0)
    wide = torch.nn.Sequential(torch.nn.Linear(12, 3000), torch.nn.Linear(3000, 3))
    parameters = sum(p.numel() for p in wide.parameters())
    shapes = [p.shape for p in wide.parameters()]
    result = train(tmp_path, f"allreduce + {codec}", workers=2, model=wide, evaluate_every=0, epochs=2)
    sent = sum(
        e.bytes_sent for e in RunDir(result.run_dir).read_events() if isinstance(e, Progress) and e.worker_id == 1
    )
    in_theory = ModelShapes(shapes).encoded_bytes(read_strategy(f"allreduce + {codec}").how) * result.steps
    assert sent == pytest.approx(in_theory, rel=0.02)
    times_less = 4 * parameters * result.steps / sent
    assert times_less > {"onebit": 25, "topk(0.01)": 40}.get(codec, 0.9)


def test_workers_that_train_by_themselves_have_batch_norm_statistics_of_their_own(tmp_path):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 3))
    changes = {"model": net, "workers": 2, "evaluate_every": 0, "epochs": 2}
    states = [
        model_of(train(tmp_path / rule, "sparknet(3)", batch_norm=rule, **changes)) for rule in ("global", "local")
    ]
    assert same_bits(*states), "between exchanges there is no global batch to take statistics of"
