"""Whichever worker is killed, and whenever: the run continues, and each sample counts exactly once."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from real_runs import KillServer, SignalAt, Slow, final_state, samples, small_net
from real_runs import syncline as command
from warm_process import warm_process

import syncline
from syncline.compute.tuning import TuningResult
from syncline.coordinator.requests import Request, is_live, send_request
from syncline.data.audit import Audit, audit_file
from syncline.strategies.presets import PRESETS
from syncline.telemetry.events import Event, InfoMessage, Recovered, WorkerFailure
from syncline.telemetry.run_dir import RunDir


def train(tmp_path: Path, model: object, **changes: object) -> syncline.Result:
    settings: dict[str, object] = {
        "data": samples(), "batch": 10, "epochs": 4, "workers": 3, "optimizer": syncline.sgd(lr=0.05),
        "out": str(tmp_path / "runs"), "quiet": True, **changes,
    }  # fmt: skip
    return syncline.train(model=model, **settings)  # type: ignore[arg-type]


def events(result: syncline.Result, kind: type[Event]) -> list[Event]:
    return [e for e in RunDir(result.run_dir).read_events() if isinstance(e, kind)]


def audited(result: syncline.Result) -> Audit:
    return audit_file(RunDir(result.run_dir).ledger)


@pytest.mark.parametrize("strategy", sorted(PRESETS))
def test_under_every_strategy_a_killed_worker_costs_no_sample(tmp_path, strategy):
    workers = 4 if strategy == "h2o" else 3
    # The first and another one, at different times: the first is the one that writes checkpoints.
    model = SignalAt(small_net(), [(7, 1), (16, 0)], tmp_path / "killed")
    result = train(tmp_path, model, strategy=strategy, workers=workers)
    assert len(events(result, WorkerFailure)) == 2
    assert audited(result).is_clean, audited(result)
    assert audited(result).is_complete
    assert [e.samples for e in audited(result).epochs] == [e.committed for e in audited(result).epochs]
    assert result.epochs == 4


def test_when_replacements_are_waited_for_the_result_is_the_same_to_the_bit(tmp_path):
    kills = [(3, 0), (6, 1), (9, 2), (11, 0), (14, 1)]
    killed = train(
        tmp_path / "killed",
        SignalAt(small_net(), kills, tmp_path / "k"),
        on_worker_failure="replace-only",
        max_failures=99,
    )
    whole = train(tmp_path / "whole", SignalAt(small_net(), [], tmp_path / "w"))
    assert len(events(killed, WorkerFailure)) == 5
    for name, tensor in final_state(whole.run_dir)["model"].items():
        assert torch.equal(final_state(killed.run_dir)["model"][name], tensor), name


def test_gradients_that_are_summed_during_backward_are_the_same_to_the_bit_too(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(12, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 1200))
    killed = train(
        tmp_path / "killed", SignalAt(net, [(5, 1), (9, 0)], tmp_path / "k"), on_worker_failure="replace-only"
    )
    whole = train(tmp_path / "whole", SignalAt(net, [], tmp_path / "w"))
    assert len(events(killed, WorkerFailure)) == 2
    for name, tensor in final_state(whole.run_dir)["model"].items():
        assert torch.equal(final_state(killed.run_dir)["model"][name], tensor), name


def test_batch_norm_statistics_are_the_same_to_the_bit_too(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    killed = train(tmp_path / "killed", SignalAt(net, [(5, 1)], tmp_path / "k"), on_worker_failure="replace-only")
    whole = train(tmp_path / "whole", SignalAt(net, [], tmp_path / "w"))
    for name, tensor in final_state(whole.run_dir)["model"].items():
        assert torch.equal(final_state(killed.run_dir)["model"][name], tensor), name


def test_convolutions_by_other_algorithms_are_the_same_to_the_bit_too(tmp_path, monkeypatch):
    # Which way is faster is the clock's to say; so what it said is written over. About the memory format it always says
    # something, so there is something to write over.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    images = torch.randn(250, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    settings = {"data": (images, torch.arange(250) % 3), "workers": 2}
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.MaxPool2d(2), torch.nn.Conv2d(8, 12, 3), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(), torch.nn.Linear(48, 3),
    )  # fmt: skip
    train(tmp_path / "first", SignalAt(net, [], tmp_path / "f"), **settings)
    remembered = tmp_path / "cache" / "syncline" / "tuning.json"
    found = json.loads(remembered.read_text())
    compiled = {"forward": "compiled", "input": "compiled", "weight": "compiled"}
    winograd = dict.fromkeys(compiled, "winograd")
    algorithms = {"net.0": {**compiled, "weight": "matrices"}, "net.1": compiled, "net.2": winograd, "net.3": compiled}
    assert found
    for tuning, findings in found.values():
        tuning.update(memory_format="channels-last", layers=algorithms)
        findings[:] = [vars(TuningResult(choice="convolutions", usual="a", other="b", speed=2.0, is_taken=True))]
    remembered.write_text(json.dumps(found))

    killed = train(
        tmp_path / "killed",
        SignalAt(net, [(5, 1), (9, 0)], tmp_path / "k"),
        on_worker_failure="replace-only",
        **settings,
    )
    whole = train(tmp_path / "whole", SignalAt(net, [], tmp_path / "w"), **settings)
    assert len(events(killed, WorkerFailure)) == 2
    for result in (killed, whole):
        (shown,) = [e for e in events(result, InfoMessage) if "tuning" in e.details]
        assert shown.details["tuning"]["layers"] == algorithms
    for name, tensor in final_state(whole.run_dir)["model"].items():
        assert torch.equal(final_state(killed.run_dir)["model"][name], tensor), name


def test_without_replacement_the_others_finish_alone(tmp_path):
    result = train(tmp_path, SignalAt(small_net(), [(7, 1)], tmp_path / "killed"), on_worker_failure="shrink")
    assert [e.members for e in events(result, Recovered)] == [[0, 2]]
    assert audited(result).is_clean


def test_a_run_of_one_worker_goes_on_with_another_in_its_place(tmp_path):
    model = SignalAt(Slow(small_net(), 0.02), [(30, 0)], tmp_path / "killed")
    result = train(tmp_path, model, workers=1, checkpoint_every_steps=5)
    (went_on,) = events(result, Recovered)
    assert went_on.step > 5, "from a checkpoint, not from the beginning"
    assert audited(result).is_clean


@pytest.mark.parametrize("strategy", ["ssp", "server-sync", "easgd"])
def test_a_killed_server_costs_no_more_than_the_time_since_the_last_checkpoint(tmp_path, strategy):
    result = train(
        tmp_path,
        KillServer(small_net(), call=20, rank=2),
        strategy=strategy,
        workers=2,
        checkpoint_every_steps=5,
    )
    assert [e.name for e in events(result, WorkerFailure)] == ["server 0"]
    assert audited(result).is_clean
    assert audited(result).is_complete


def test_a_worker_that_is_stopped_is_noticed_within_seconds_and_replaced(tmp_path):
    model = SignalAt(Slow(small_net(), 0.02), [(20, 1)], tmp_path / "stopped", number=signal.SIGSTOP)
    result = train(tmp_path, model)
    (lost,) = events(result, WorkerFailure)
    assert (lost.worker_id, "SIGSTOP" in lost.cause) == (1, True)
    assert audited(result).is_clean


def test_a_run_with_too_many_failures_saves_and_says_why(tmp_path):
    kills = [(10, 1), (20, 2)]
    with pytest.raises(syncline.WorkerFailed) as caught:
        train(tmp_path, SignalAt(small_net(), kills, tmp_path / "k"), max_failures=1)
    message = str(caught.value)
    assert "SIGKILL" in message.splitlines()[0]
    assert "more than 1 process" in message
    assert "--max-failures" in message
    assert caught.value.facts["resume_command"] in message


def test_the_run_reports_how_it_recovered(tmp_path, capsys):
    train(tmp_path, SignalAt(Slow(small_net(), 0.02), [(9, 1)], tmp_path / "killed"))
    shown = capsys.readouterr().err
    assert "worker 1 was killed by SIGKILL" in shown
    assert re.search("[23] workers continued after", shown), (
        "the replacement may be there before the others have noticed"
    )
    assert "worker 1 rejoined after" in shown


@pytest.mark.parametrize("strategy", sorted(PRESETS))
def test_workers_can_be_added_and_removed_under_way(tmp_path, strategy):
    enough = tmp_path / "enough"
    at_first = 4 if strategy == "h2o" else 2  # two groups of two
    model = Slow(small_net(), 0.05, until=enough)
    run_dir = tmp_path / "runs" / "elastic"
    warm_process()  # starting it may take longer than the run
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(train, tmp_path, model, strategy=strategy, workers=at_first, epochs=50, name="elastic")
        _until(run, lambda: is_live(run_dir) and _steps(run_dir) > 0)
        if strategy == "allreduce":
            assert "workers now: 0, 1, 2, 3" in command("workers", str(run_dir), "add", "2", cwd=tmp_path).out
        else:
            send_request(run_dir, Request(add=2))
        _until(run, lambda: _members(run_dir) == at_first + 2)
        send_request(run_dir, Request(remove=3))
        fewest = 2 if strategy == "ltfb" else at_first - 1  # a tournament needs two models
        _until(run, lambda: _members(run_dir) == fewest)
        enough.touch()
        result = run.result(timeout=50)
    assert result.epochs == 50
    assert audited(result).is_clean
    assert not is_live(run_dir)


def test_the_command_line_audits_a_run_and_says_when_one_cannot_be_changed(tmp_path):
    result = train(tmp_path, SignalAt(small_net(), [(7, 1)], tmp_path / "killed"))
    done = command("audit", str(result.run_dir), cwd=tmp_path)
    assert done.code == 0
    assert "epoch 4: 103 of 103 samples committed once; 0 lost, 0 repeated" in done.out
    ledger = RunDir(result.run_dir).ledger
    used = [line for line in ledger.read_text().splitlines() if '"used"' in line]
    ledger.write_text(ledger.read_text().replace(used[-1], f"{used[-1]}\n{used[-1]}"))
    assert command("audit", str(result.run_dir), cwd=tmp_path).code == 1, "samples that were used twice"
    done = command("workers", str(result.run_dir), "add", "1", cwd=tmp_path)
    assert done.code != 0
    assert str(result.run_dir) in done.err
    assert "syncline resume" in done.err


def _steps(run_dir: Path) -> int:
    return max((e.step for e in RunDir(run_dir).read_events() if hasattr(e, "step")), default=0)


def _members(run_dir: Path) -> int:
    return next((len(e.members) for e in reversed(list(RunDir(run_dir).read_events())) if isinstance(e, Recovered)), 0)


def _until(run: Future[syncline.Result], condition: Callable[[], bool]) -> None:
    """Wait for something to happen in a run in progress."""
    deadline = time.monotonic() + 40
    while not condition():
        assert not run.done(), f"the run has ended before: {run.result()}"
        assert time.monotonic() < deadline, "it did not come about"
        threading.Event().wait(0.05)
