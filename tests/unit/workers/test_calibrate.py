"""Trying out how a model computes fastest: what is measured, what is left behind, and that all workers agree."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from syncline.comms.collective import Collective, Solo
from syncline.compute.tuning import PASSES, Algorithms, PassTimes, Tuning, TuningResult
from syncline.config.run import RunConfig
from syncline.planning.machine import Machine
from syncline.planning.planner import TaskFacts, make_plan
from syncline.testing.threads import run_on_threads
from syncline.workers import tuning_cache
from syncline.workers.calibrate import CalibrationTrial, calibrate
from syncline.workers.tuning import computing_in, lay_out, planned, settle

CPU = torch.device("cpu")
CHANNELS_LAST = Tuning(memory_format="channels-last")


def make_plan_of(workers: int, *, convolutions: bool = False, **config):
    """`convolutions` are left out unless asked for: which way is faster for small ones is a matter of chance."""
    facts = TaskFacts(kind="train", model="m", data="d", fingerprint="f", train_samples=100_000)
    plan = make_plan(facts, RunConfig(workers=workers, threads=1, **config), Machine.here())
    return plan if convolutions else replace(plan, measured=tuple(c for c in plan.measured if c != "convolutions"))


def network(dropout: float = 0.0) -> nn.Module:
    """Without dropout, for workers that are threads: these would take random numbers from each other."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(dropout), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    )


class Views(nn.Module):
    """As many models are: `view` works on contiguous memory only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.conv(x).view(len(x), -1))


def trial_of(model: nn.Module, samples: int = 8) -> CalibrationTrial:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(samples, 3, 8, 8, generator=generator), torch.arange(samples) % 4
    return CalibrationTrial(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        lambda m, batch: nn.functional.cross_entropy(m(batch[0]), batch[1]),
        lambda count: (inputs[:count], targets[:count]),
        samples=samples,
        device=CPU,
    )


def test_trying_out_leaves_nothing_behind():
    model = network(dropout=0.5)
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(5)
    random_state, threads = torch.get_rng_state(), torch.get_num_threads()
    trial = trial_of(model)
    calibrate(trial, make_plan_of(1, precision="auto"), Tuning(), Solo())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.get_num_threads() == threads
    assert trial.optimizer.state == {}


def test_a_model_that_needs_contiguous_memory_keeps_it():
    tuning, (result,) = calibrate(trial_of(Views()), make_plan_of(1), Tuning(), Solo())
    assert tuning.memory_format == "contiguous"
    assert result.speed == 0


def test_a_model_that_does_not_work_at_all_is_left_to_its_first_step():
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("as it is")

    assert calibrate(trial_of(Broken()), make_plan_of(1), Tuning(), Solo()) == (Tuning(), ())


def test_all_workers_come_to_the_same_decision():
    def work(collective: Collective):
        slow = 1e-4 * (1 + collective.rank)
        trial = trial_of(network())
        step = trial.step
        trial.step = lambda tuning: (slow * (0.2 if tuning == CHANNELS_LAST else 1), step(tuning)[1])  # type: ignore[method-assign]
        return calibrate(trial, make_plan_of(3), Tuning(), collective)

    (tuning, (result,)), *others = run_on_threads(3, work)
    assert tuning == CHANNELS_LAST
    assert result.speed == pytest.approx(5)
    assert all(other == (tuning, (result,)) for other in others)


def test_what_does_not_work_on_one_worker_is_taken_by_none():
    def work(collective: Collective):
        return calibrate(
            trial_of(Views() if collective.rank == 1 else network()), make_plan_of(2), Tuning(), collective
        )

    assert [tuning for tuning, _ in run_on_threads(2, work)] == [Tuning(), Tuning()]


def test_a_form_in_which_the_model_computes_something_else_is_not_taken():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            return self.last(y.flatten(1)) * (1 if y.is_contiguous() else 1000)

    _, (result,) = calibrate(trial_of(Odd()), make_plan_of(1), Tuning(), Solo())
    assert result.speed == 0


def by_matrices_in(seconds: float) -> PassTimes:
    """The times of a layer whose passes take torch 0.3 s each, and whose weight gradient takes so long by matrices."""
    times = {
        (which, algorithm): 0.3 if algorithm == "torch" else math.inf
        for which, algorithms in PASSES
        for algorithm in algorithms
    }
    return {**times, ("weight", "matrices"): seconds}


def test_all_workers_take_the_convolutions_that_are_faster_on_the_slowest(monkeypatch):
    def times(model: nn.Module, step: object, scale: float) -> dict[str, PassTimes]:
        return {"0": by_matrices_in(0.1), "1": by_matrices_in(0.1 if model.is_fast else 0.4)}  # type: ignore[union-attr]

    monkeypatch.setattr("syncline.workers.calibrate.compare_layers", times)

    def work(collective: Collective):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 4))
        model.is_fast = collective.rank == 0  # type: ignore[assignment]
        plan = make_plan_of(2, convolutions=True, memory_format="contiguous")
        trial = trial_of(model)
        step = trial.step
        trial.step = lambda tuning: (0.1 if tuning.layers else 0.2, step(tuning)[1])  # type: ignore[method-assign]
        return calibrate(trial, plan, Tuning(), collective)[0]

    assert [tuning.layers for tuning in run_on_threads(2, work)] == [{"0": Algorithms(weight="matrices")}] * 2


def test_the_convolutions_of_a_tuning_are_computed_in_its_ways_and_those_of_another_are_not():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    lay_out(
        model,
        optimizer,
        planned(make_plan_of(1, convolutions=True), Tuning(layers={"0": Algorithms(weight="matrices")})),
    )
    assert type(model[0]) is not nn.Conv2d
    lay_out(model, optimizer, planned(make_plan_of(1), Tuning(layers={"0": Algorithms(weight="matrices")})))
    assert type(model[0]) is nn.Conv2d


def test_no_worker_goes_over_to_what_one_of_them_could_not_measure(monkeypatch):
    def times(model: nn.Module, step: object, scale: float) -> dict[str, PassTimes]:
        if not model.is_fast:  # type: ignore[union-attr]
            raise MemoryError
        return {"0": by_matrices_in(0.1)}

    monkeypatch.setattr("syncline.workers.calibrate.compare_layers", times)

    def work(collective: Collective):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 4))
        model.is_fast = collective.rank == 0  # type: ignore[assignment]
        plan = make_plan_of(2, convolutions=True, memory_format="contiguous")
        return calibrate(trial_of(model), plan, Tuning(), collective)

    assert run_on_threads(2, work) == [(Tuning(), ())] * 2


@pytest.mark.parametrize(
    ("layer", "is_tried"),
    [
        (nn.Conv2d(3, 8, 1, stride=2), False),
        (nn.Conv2d(3, 8, 1), True),
        (nn.Conv2d(3, 8, 3, stride=2), True),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1, stride=2)), True),
    ],
)
def test_layers_with_which_torch_spoils_memory_are_not_tried_out(layer, is_tried):
    model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(4))
    model(torch.zeros(1, 3, 8, 8))
    _, results = calibrate(trial_of(model), make_plan_of(1), Tuning(), Solo())
    assert bool(results) == is_tried


def test_a_large_model_is_tried_out_with_part_of_the_samples():
    trial = trial_of(network(), samples=8)
    taken = []
    take, step = trial.take, trial.step
    trial.take = lambda count: (taken.append(count), take(count))[1]  # type: ignore[method-assign]
    trial.step = lambda tuning: (0.05 + 0.03 * taken[-1], step(tuning)[1])  # type: ignore[method-assign]
    calibrate(trial, make_plan_of(1), Tuning(), Solo())
    assert taken == [2, 4, 6], "two sizes give the time per sample, the third is the size of the trials"


def test_bf16_is_autocast_and_leaves_the_weights_as_they_are():
    model = network()
    with computing_in("bf16", CPU):
        assert model(torch.randn(2, 3, 8, 8)).dtype == torch.bfloat16
    with computing_in("float32", CPU):
        assert model(torch.randn(2, 3, 8, 8)).dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_the_loss_in_bf16_is_tried_out_on_a_copy():
    trial = trial_of(network())
    trial.take(8)
    before = copy.deepcopy(trial.model.state_dict())
    losses = trial.losses_of_training(Tuning(precision="bf16"))
    assert losses[-1] != losses[0]
    assert all(torch.equal(value, before[name]) for name, value in trial.model.state_dict().items())


@pytest.mark.parametrize("fused", [True, False])
def test_what_the_optimizer_keeps_is_laid_out_as_its_parameters_are(fused):
    """Fused optimizers read memory as it lies: with another layout they would mix up numbers."""

    def train(formats) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 8, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
        for number, tuning in enumerate(formats):
            lay_out(model, optimizer, tuning)
            optimizer.zero_grad()
            inputs = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(number))
            torch.autograd.backward(model(inputs).square().mean())
            optimizer.step()
        return model.weight.detach()

    plain = train([Tuning()] * 4)
    torch.testing.assert_close(train([Tuning(), CHANNELS_LAST, Tuning(), CHANNELS_LAST]), plain)


def test_who_joins_later_computes_as_the_others_do():
    def work(collective: Collective) -> Tuning:
        return settle(collective, CHANNELS_LAST if collective.rank == 1 else None, lambda: pytest.fail("it is known"))

    assert run_on_threads(3, work) == [CHANNELS_LAST] * 3


def test_what_the_user_decides_later_counts_more_than_what_was_found():
    found = Tuning(memory_format="channels-last", precision="bf16", threads=3, loaders=2)
    assert planned(make_plan_of(1, tune="off", precision="auto"), found) == Tuning(precision="bf16")


def test_findings_are_remembered(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = TuningResult(choice="memory-format", usual="a", other="b", speed=2.0, is_taken=True)
    key = tuning_cache.key_of(network(), make_plan_of(2), 64)
    assert tuning_cache.look_up(key) is None
    tuning_cache.remember(key, CHANNELS_LAST, (result,))
    assert tuning_cache.look_up(key) == (CHANNELS_LAST, (result,))
    assert [p.name for p in (tmp_path / "syncline").iterdir()] == ["tuning.json"]
    tuning_cache.forget("something else")
    assert tuning_cache.look_up(key) == (CHANNELS_LAST, (result,))
    for other in (
        tuning_cache.key_of(nn.Sequential(network()), make_plan_of(2), 64),
        tuning_cache.key_of(network(), make_plan_of(4), 64),
        tuning_cache.key_of(network(), make_plan_of(2), 32),
    ):
        assert tuning_cache.look_up(other) is None


def test_what_is_forgotten_is_measured_again(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning_cache.remember("key", CHANNELS_LAST, ())
    tuning_cache.forget("key")
    assert tuning_cache.look_up("key") is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": [1, 2]}', '{"key": null}', "\x00"])
def test_a_broken_memory_is_no_memory(monkeypatch, tmp_path, content):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning_cache.cache_file().parent.mkdir()
    tuning_cache.cache_file().write_text(content)
    assert tuning_cache.look_up("key") is None
    tuning_cache.remember("key", Tuning(), ())
    assert tuning_cache.look_up("key") == (Tuning(), ())


def test_a_home_that_cannot_be_written_to_is_borne(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    tuning_cache.remember("key", Tuning(), ())
    assert tuning_cache.look_up("key") is None


def test_the_oldest_are_forgotten(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for number in range(205):
        tuning_cache.remember(str(number), Tuning(threads=number + 1), ())
    assert tuning_cache.look_up("4") is None
    assert tuning_cache.look_up("204") == (Tuning(threads=205), ())


@pytest.mark.parametrize("shares", [(8, 7), (1, 0)])
def test_workers_with_other_shares_come_to_the_same_decision(monkeypatch, shares):
    """Of eight samples five are few (8 / 5 > 1.5), of seven they are not; and one share may have none at all."""

    def times(model: nn.Module, step: Callable[[], object], scale: float) -> dict[str, PassTimes]:
        step()  # lays the model out
        is_last = model[0].weight.is_contiguous(memory_format=torch.channels_last)
        return {"0": dict.fromkeys(by_matrices_in(0.1), 0.1 if is_last else 0.5)}

    monkeypatch.setattr("syncline.workers.calibrate.compare_layers", times)

    def work(collective: Collective):
        trial = trial_of(network(), samples=shares[collective.rank])
        step = trial.step

        def timed(tuning: Tuning) -> tuple[float, float]:
            step(tuning)
            slower = 1.2 if tuning.memory_format == "channels-last" else 1.0
            return (0.05 + 0.0334 * len(trial.batch[0])) * slower, 1.0

        trial.step = timed  # type: ignore[method-assign]
        return calibrate(trial, make_plan_of(2, convolutions=True), Tuning(), collective)

    first, second = run_on_threads(2, work)
    assert first == second
    assert first[0].memory_format == ("channels-last" if shares == (8, 7) else "contiguous")
