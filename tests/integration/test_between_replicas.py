"""Strategies between replicas that are spread over several workers: a replica is as one worker, also after kills."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from real_runs import final_state, my_rank, pid_of, relative_difference, samples
from real_runs import syncline as command
from torch import nn

import syncline
from syncline.coordinator.requests import Request, is_live, send_request
from syncline.data.audit import audit_file
from syncline.errors import ConfigError
from syncline.telemetry.events import ExchangeStats, Progress, Recovered, WorkerFailure
from syncline.telemetry.run_dir import RunDir

LAYOUTS = ["pipeline(2)", "sharded(2)", "tensor(2)"]


def net() -> nn.Module:
    """Large enough to be divided; batch norm, whose statistics are over a replica, and dropout.

    No bias before batch norm: its gradient is rounding error, which AdamW would make a step of.
    """
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 300, bias=False), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 60), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(60, 3),
    )  # fmt: skip


class KillingLoss:
    """Kills a worker by its rank when the worker that computes this loss comes to it for the n-th time, once."""

    def __init__(self, kills: dict[int, int], flags: Path) -> None:
        self.kills, self.flags, self.calls = kills, str(flags), 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.calls += 1
            victim = self.kills.get(self.calls)
            if victim is not None:
                try:
                    os.close(os.open(f"{self.flags}-{self.calls}", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    pass
                else:
                    os.kill(pid_of(victim), signal.SIGKILL)
        return nn.functional.cross_entropy(output, target)


class SlowLoss:
    """Takes its time until there is a file of this name."""

    def __init__(self, until: Path) -> None:
        self.until = str(until)

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and not os.path.exists(self.until):
            time.sleep(0.05)
        return nn.functional.cross_entropy(output, target)


class DiesInUpdate(torch.optim.AdamW):
    """The worker of this pid file's rank is killed in its fifth update, which it leaves half written."""

    def __init__(self, params: Any, victim: int, flag: str) -> None:
        super().__init__(params, lr=0.01)
        self.victim, self.flag, self.updates = victim, flag, 0

    def step(self, closure: Any = None) -> Any:
        self.updates += 1
        if self.updates == 5 and my_rank() == self.victim and not os.path.exists(self.flag):
            Path(self.flag).touch()
            for p in self.param_groups[0]["params"]:
                p.data[: p.numel() // 2] = float("nan")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


def train(folder: Path, *, workers: int = 4, layout: str = "pipeline(2)", **changes: Any) -> syncline.Result:
    settings = {
        "data": samples(96), "test": samples(57, seed=2), "batch": 16, "epochs": 3, "quiet": True, "out": str(folder),
        "optimizer": syncline.optimizer("adamw", lr=0.01), "tune": "off", **changes,
    }  # fmt: skip
    return syncline.train(model=net(), workers=workers, layout=layout, **settings)


def assert_audited(result: syncline.Result) -> None:
    audit = audit_file(RunDir(result.run_dir).ledger)
    assert audit.is_complete
    assert audit.is_clean


def events(result: syncline.Result, kind: type) -> list[Any]:
    return [e for e in RunDir(result.run_dir).read_events() if isinstance(e, kind)]


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("bmuf(steps=4)", {"clip_norm": 0.05}),
        ("iterative-reduce(steps=3)", {}),
        ("gossip", {}),
        ("server-sync", {"clip_norm": 0.05}),
    ],
)
def test_two_spread_replicas_train_as_two_workers_do(tmp_path, strategy, changes):
    pair = train(tmp_path / "pair", workers=2, layout="replicated", strategy=strategy, **changes)
    expected = final_state(pair.run_dir)
    for layout in LAYOUTS:
        result = train(tmp_path / layout, layout=layout, strategy=strategy, **changes)
        state = final_state(result.run_dir)
        assert relative_difference(expected["model"], state["model"]) < 1e-5, layout
        assert result.metrics["test/loss"] == pytest.approx(pair.metrics["test/loss"], rel=1e-4)
        assert len(state["worker_states"]) == 2
        assert_audited(result)


def test_an_encoded_average_is_within_its_rounding_of_that_of_two_workers(tmp_path):
    pair = train(tmp_path / "pair", workers=2, layout="replicated", strategy="diloco(steps=4)")
    for layout in LAYOUTS:
        result = train(tmp_path / layout, layout=layout, strategy="diloco(steps=4)")
        states = [final_state(r.run_dir)["model"] for r in (pair, result)]
        assert relative_difference(*states) < 0.02, layout
        assert_audited(result)


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [("pipeline(2, micro_batches=1)", "sparknet(tau=4)"), ("sharded(2)", "gossip"), ("tensor(2)", "ssp")],
)
@pytest.mark.parametrize("policy", ["replace-only", "shrink"])
def test_any_worker_of_a_replica_may_be_killed(tmp_path, layout, strategy, policy):
    # Leaders and others, with a replica left that has all; with "shrink" one replica and a spare worker remain.
    kills = {5: 1, 9: 2, 13: 0} if policy == "replace-only" else {7: 0}
    loss = KillingLoss(kills, tmp_path / "k")
    result = train(
        tmp_path / "killed", layout=layout, strategy=strategy, loss=loss, on_worker_failure=policy, max_failures=99
    )
    assert len(events(result, WorkerFailure)) == len(kills)
    assert all(e.repeated_steps == 0 for e in events(result, Recovered)), "no worker went back to a checkpoint"
    assert_audited(result)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_is_killed_in_its_update_leaves_nothing_half_written(tmp_path, victim):
    result = train(
        tmp_path / "killed", strategy="sparknet(tau=4)", on_worker_failure="replace-only",
        optimizer=lambda parameters: DiesInUpdate(parameters, victim, str(tmp_path / "k")),
    )  # fmt: skip
    assert len(events(result, WorkerFailure)) == 1
    assert all(torch.isfinite(value).all() for value in final_state(result.run_dir)["model"].values())
    assert_audited(result)


@pytest.mark.parametrize(("layout", "strategy"), [("pipeline(2)", "allreduce"), ("sharded(2)", "ssp")])
def test_replicas_can_be_added_and_removed_under_way(tmp_path, layout, strategy):
    enough, run_dir = tmp_path / "enough", RunDir(tmp_path / "elastic")

    def wait_for(run: Future[syncline.Result], members: int) -> None:
        while not any(isinstance(e, Recovered) and len(e.members) == members for e in run_dir.read_events()):
            assert not run.done(), run.result()
            time.sleep(0.05)

    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(
            train, tmp_path, layout=layout, strategy=strategy, loss=SlowLoss(enough), epochs=60, name="elastic"
        )
        try:
            while not (is_live(run_dir.path) and any(isinstance(e, Progress) for e in run_dir.read_events())):
                assert not run.done(), run.result()
                time.sleep(0.05)
            for request, members in ((Request(add=2), 6), (Request(remove=3), 3)):  # the last one has no replica
                send_request(run_dir.path, request)
                wait_for(run, members)
        finally:
            enough.touch()
        result = run.result(timeout=50)
    assert all(e.repeated_steps == 0 for e in events(result, Recovered)), "no worker went back to a checkpoint"
    assert_audited(result)


def test_a_checkpoint_between_replicas_is_resumed_with_and_without_a_layout(tmp_path):
    # Saving ends a round of averaging early, so the run to compare with is one that is saved and resumed, too.
    ends = []
    pair, spread, sharded = (2, "replicated"), (4, "pipeline(2)"), (4, "sharded(2)")
    for number, (before, after) in enumerate([(pair, pair), (spread, sharded), (spread, pair)]):
        workers, layout = before
        first = train(tmp_path / str(number), workers=workers, layout=layout, strategy="sparknet(tau=4)", max_steps=8)
        workers, layout = after
        result = syncline.resume(first.run_dir, workers=workers, layout=layout, max_steps=None, quiet=True)
        ends.append(final_state(result.run_dir)["model"])
        assert relative_difference(ends[0], ends[-1]) < 1e-5
        assert_audited(result)


def test_what_servers_hold_is_resumed_by_other_replicas(tmp_path):
    pair = train(tmp_path / "pair", workers=2, layout="replicated", strategy="server-sync(shards=2)")
    first = train(tmp_path / "spread", strategy="server-sync(shards=2)", max_steps=8)
    result = syncline.resume(first.run_dir, layout="sharded(2)", max_steps=None, quiet=True)
    assert relative_difference(final_state(pair.run_dir)["model"], final_state(result.run_dir)["model"]) < 1e-5
    assert_audited(result)


def test_a_replica_is_within_the_bound_of_the_slowest_as_a_whole(tmp_path):
    result = train(tmp_path / "ssp", layout="sharded(2)", strategy="ssp(bound=2)", epochs=6)
    staleness = [step for e in events(result, ExchangeStats) for step in e.staleness]
    assert staleness, "replicas push at their own pace"
    assert max(staleness) <= 2 * 2 + 1, "each of two replicas has pushed at most so often between two reads"
    assert result.metrics["test/accuracy"] > 0.6
    assert_audited(result)


@pytest.mark.parametrize(
    ("strategy", "layout", "reason"),
    [
        ("downpour", "pipeline(2)", "strategy"),
        ("easgd", "sharded(2)", "strategy"),
        ("hogwild", "pipeline(2)", "strategy"),
        ("ltfb", "sharded(2)", "strategy"),
        ("h2o", "sharded(2)", "strategy"),
        ("sparknet", "sharded", "one-replica"),
    ],
)
def test_what_does_not_work_between_replicas_is_refused_before_anything_starts(tmp_path, strategy, layout, reason):
    with pytest.raises(ConfigError) as caught:
        train(tmp_path, layout=layout, strategy=strategy)
    assert (caught.value.facts["reason"], caught.value.facts["nearest"]) == (reason, "replicated")
    assert not list(tmp_path.iterdir())


def test_explain_says_what_the_strategy_does_between_replicas(tmp_path):
    words = ("explain", "mlp", "--data", "digits", "--workers", "4", "--layout", "sharded(2)", "--strategy", "gossip")
    done = command(*words, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "2 replicas of 2 workers each. For the strategy each replica is one worker" in done.out
    assert "to 1 other" in done.out
