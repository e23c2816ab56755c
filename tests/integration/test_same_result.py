"""Promise 1: synchronous means identical, for any number of workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from real_runs import final_state, relative_difference, same_bits, samples, small_net
from torch import nn

import syncline
from syncline.telemetry.events import InfoMessage
from syncline.telemetry.run_dir import RunDir

pytestmark = pytest.mark.xdist_group("same_result")  # one process, because these tests share a fixture


def train(tmp_path: Path, workers: int, **changes: object) -> syncline.Result:
    settings: dict[str, object] = {
        "model": small_net(), "data": samples(), "test": samples(57, seed=2), "loss": "cross_entropy",
        "optimizer": syncline.sgd(lr=0.05, momentum=0.9), "batch": 10, "epochs": 5, "max_steps": 50,
    }  # fmt: skip
    return syncline.train(**{**settings, **changes}, workers=workers, out=str(tmp_path), quiet=True)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> syncline.Result:
    return train(tmp_path_factory.mktemp("alone"), 1)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_parameters_after_50_steps_do_not_depend_on_the_number_of_workers(tmp_path, alone, workers):
    result = train(tmp_path, workers)
    assert result.steps == alone.steps == 50
    expected, actual = final_state(alone.run_dir)["model"], final_state(result.run_dir)["model"]
    assert relative_difference(expected, actual) < 1e-5
    assert result.metrics["test/accuracy"] == alone.metrics["test/accuracy"]
    assert result.metrics["test/loss"] == pytest.approx(alone.metrics["test/loss"], rel=1e-5)


def test_the_result_is_the_same_through_torch_distributed(tmp_path, alone):
    result = train(tmp_path, 3, collective="process-group")
    assert relative_difference(final_state(alone.run_dir)["model"], final_state(result.run_dir)["model"]) < 1e-5


def test_the_same_run_twice_gives_the_same_bits(tmp_path):
    first, second = (train(tmp_path / name, 3, max_steps=20) for name in "ab")
    for name, tensor in final_state(first.run_dir)["model"].items():
        assert torch.equal(tensor, final_state(second.run_dir)["model"][name]), name
    assert first.metrics == second.metrics


def test_batch_norm_over_the_global_batch_gives_what_one_process_gives(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).double()
    inputs, targets = samples()
    # 103 samples in batches of 17 leave a last batch of one: three of the four workers have no sample in it, and
    # batch norm over one sample is refused by torch, hence 102.
    data = (inputs.double()[:102], targets[:102])
    results = [train(tmp_path / str(n), n, model=net, data=data, test=data, batch=25, max_steps=30) for n in (1, 4)]
    states = [final_state(r.run_dir)["model"] for r in results]
    assert relative_difference(*states) < 1e-10
    assert results[0].metrics["test/accuracy"] == results[1].metrics["test/accuracy"]


def test_local_batch_norm_uses_each_workers_own_share_and_the_first_workers_statistics(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    states = [
        final_state(train(tmp_path / rule, 2, model=net, batch=24, max_steps=12, batch_norm=rule).run_dir)["model"]
        for rule in ("global", "local")
    ]
    assert relative_difference(*states) > 1e-4, "the two rules must differ"
    assert torch.isfinite(states[1]["1.running_mean"]).all()


def test_a_share_without_samples_changes_nothing(tmp_path):
    # 41 samples in batches of 20: the last batch has one sample for four workers.
    data = samples(41)
    results = [train(tmp_path / str(n), n, data=data, batch=20, epochs=4) for n in (1, 4)]
    assert results[0].steps == results[1].steps == 12
    assert relative_difference(*(final_state(r.run_dir)["model"] for r in results)) < 1e-5


def test_gradient_accumulation_clipping_weight_decay_and_schedules_keep_the_promise(tmp_path):
    changes = {
        "clip_norm": 0.5, "weight_decay": 0.01, "schedule": "CosineAnnealingLR", "optimizer": "adamw(lr=0.01)",
        "batch": 23, "max_steps": 20,
    }  # fmt: skip
    whole = train(tmp_path / "whole", 1, **changes)
    pieces = train(tmp_path / "pieces", 3, accumulate=3, **changes)
    assert relative_difference(final_state(whole.run_dir)["model"], final_state(pieces.run_dir)["model"]) < 1e-4
    plain = train(tmp_path / "plain", 1, **{**changes, "clip_norm": None})
    assert relative_difference(final_state(whole.run_dir)["model"], final_state(plain.run_dir)["model"]) > 1e-3


class Squares(torch.utils.data.Dataset):
    """A Dataset with code of its own, random per sample."""

    def __len__(self) -> int:
        return 61

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((12,), float(index)) / 61 + 0.01 * torch.randn(12)
        return x, torch.tensor(index % 3)


def test_random_augmentation_does_not_depend_on_the_number_of_workers(tmp_path):
    results = [train(tmp_path / str(n), n, data=Squares(), test=Squares(), batch=9, max_steps=14) for n in (1, 3)]
    assert relative_difference(*(final_state(r.run_dir)["model"] for r in results)) < 1e-5


def test_too_little_shared_memory_falls_back_and_says_so(tmp_path, alone):
    result = train(tmp_path, 2, shared_memory_limit_mb=0.0001)
    events = (result.run_dir / "events.jsonl").read_text()
    assert "Too little shared memory" in events
    assert '"collective":"ProcessGroup"' in events
    assert relative_difference(final_state(alone.run_dir)["model"], final_state(result.run_dir)["model"]) < 1e-5


def large_net() -> nn.Module:
    """So large that its gradients are summed in several parts during backward."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 1024), nn.ReLU(), nn.Linear(1024, 1100), nn.ReLU(), nn.Linear(1100, 1000))


LARGE: dict[str, object] = {"batch": 24, "max_steps": 12}


@pytest.fixture(scope="module")
def large_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The parameters of the large network after one worker has trained it."""
    alone = train(tmp_path_factory.mktemp("large"), 1, model=large_net(), **LARGE)
    return final_state(alone.run_dir)["model"]


@pytest.mark.parametrize("workers", [2, 8])
def test_gradients_that_are_summed_during_backward_give_the_same_result(tmp_path, large_alone, workers):
    """Also with more workers than cores."""
    for accumulate in (1, 2):
        changes = {**LARGE, "model": large_net(), "accumulate": accumulate}
        together = train(tmp_path / str(accumulate), workers, **changes)
        assert relative_difference(large_alone, final_state(together.run_dir)["model"]) < 1e-5


def test_what_is_tuned_gives_the_same_result_and_is_told(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 3))
    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(96, 3, 8, 8, generator=generator), torch.arange(96) % 3)
    changes = {"model": net, "data": data, "test": data, "batch": 12, "epochs": 14, "max_steps": None}
    plain = train(tmp_path / "plain", 2, **changes, tune="off")
    forms = [train(tmp_path / form, 2, **changes, memory_format=form) for form in ("contiguous", "channels-last")]
    tuned = train(tmp_path / "tuned", 2, **changes)
    states = [final_state(result.run_dir)["model"] for result in (plain, *forms, tuned)]
    assert all(relative_difference(states[0], state) < 1e-3 for state in states[1:])
    (note,) = (e for e in RunDir(tuned.run_dir).read_events() if isinstance(e, InfoMessage))
    assert note.message.startswith("tuned (measured in ")
    again = train(tmp_path / "again", 2, **changes)
    (note,) = (e for e in RunDir(again.run_dir).read_events() if isinstance(e, InfoMessage))
    assert note.message.startswith("tuned (cached): ")
    assert same_bits(final_state(again.run_dir)["model"], states[-1])


def test_bf16_is_close_to_float32_and_the_weights_stay_float32(tmp_path):
    whole, half = (
        final_state(train(tmp_path / p, 2, precision=p, max_steps=20).run_dir)["model"] for p in ("float32", "bf16")
    )
    assert 0 < relative_difference(whole, half) < 0.05
    assert {tensor.dtype for tensor in half.values()} == {torch.float32}
