"""The runs of `syncline plan --check`: each strategy is predicted as `syncline plan` does it, and then trains briefly.

Here: the grid, and running a cell of it: one model in one place. Not here: the errors (`table.py`), the model that
stands for one where workers outnumber cores (`paced.py`), and emulating hosts (`lab/namespaces.py`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from syncline.config.run import RunConfig
from syncline.config.spec import Spec
from syncline.driver import run_task
from syncline.engines.network import Network
from syncline.errors import SynclineError
from syncline.lab.namespaces import Namespaces
from syncline.lab.plan_check.paced import MakePaced, paced_data
from syncline.lab.plan_check.table import Checked
from syncline.measuring import Enough, Measuring, Question, Watching, answer
from syncline.planning.cost.choice import name_of
from syncline.planning.cost.profile import Fact
from syncline.planning.cost.step import Prediction
from syncline.planning.expected import compare
from syncline.planning.forecaster import expected_of
from syncline.planning.machine import Machine
from syncline.strategies.reading import read_strategy
from syncline.task import Task

_PERIODS = 3
"""A run shows so many exchanges at least."""
_LONGEST_S = 25.0
"""What would take longer is left out."""
_SAMPLES = 2048
_QUICK = ("allreduce", "server-sync", "ssp", "sparknet", "onebit", "gossip")
_QUICK_S, _FULL_S = 1.5, 3.0
_LATENCY = "100us"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where workers run: on this machine, or on as many emulated hosts."""

    workers: int
    rate: str | None = None
    """Of each host's link; None: all workers on this machine."""

    @property
    def hosts(self) -> int:
        return self.workers if self.rate else 1

    def __str__(self) -> str:
        return f"{self.workers} hosts, {self.rate}/s" if self.rate else f"{self.workers} workers, 1 host"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is checked."""

    models: tuple[str, ...] = ("lenet", "resnet18", "transformer")
    places: tuple[Place, ...] = (
        Place(workers=2), Place(workers=4), Place(workers=4, rate="100mbit"), Place(workers=4, rate="1gbit"),
        Place(workers=8, rate="100mbit"), Place(workers=8, rate="1gbit"),
    )  # fmt: skip
    strategies: tuple[str, ...] | None = None
    """None: all of them."""
    layouts: tuple[str, ...] = ("sharded", "pipeline(2)")
    """Besides `replicated`, where the real model runs: with each that it can have."""
    seconds: float = _FULL_S
    rounds: int = 2
    """Each strategy is measured so often, in turns; the faster one counts, as for the profile."""


QUICK = Grid(
    models=("lenet",), places=(Place(workers=2), Place(workers=4, rate="100mbit")), strategies=_QUICK, seconds=_QUICK_S,
    rounds=1,
)  # fmt: skip
"""A minute or two."""


def check(grid: Grid, say: Callable[[str], None]) -> Iterator[Checked]:
    """Run it, one strategy after another."""
    for model in grid.models:
        for place in grid.places:
            say(f"{model}, {place}.")
            yield from _Cell(model, place, grid, say).results()


class _Cell:
    """One model in one place."""

    def __init__(self, model: str, place: Place, grid: Grid, say: Callable[[str], None]) -> None:
        self._model, self._place, self._grid, self._say = model, place, grid, say
        real = Task(model=Spec(model), data=_data_of(model)).with_defaults().located(None, None)
        self._config = RunConfig(workers=place.workers, threads=1, tune="off", batch=_batch_of(real, place.workers))
        crowded = place.workers > Machine.here().cores
        self._task = self._paced(real) if crowded else real
        self._layouts = () if crowded or place.hosts > 1 else grid.layouts

    def results(self) -> Iterator[Checked]:
        """The strategies that can run here, each predicted and measured."""
        place = self._place
        network = f"{place.rate},{_LATENCY}" if place.rate else None
        question = Question(
            task=self._task, config=self._config, hosts=place.hosts, network=network, seconds=self._grid.seconds,
            layouts=self._layouts,
        )  # fmt: skip
        plan = answer(question, self._grid.strategies, self._quietly, run_task)
        emulated = Namespaces(place.hosts, rate=place.rate) if place.rate else nullcontext()
        fastest: dict[str, Fact] = {}
        with emulated as namespaces:
            network_ = namespaces.network if namespaces is not None else None
            for number in range(1, self._grid.rounds + 1):
                for prediction in sorted(plan.predictions, key=name_of):
                    found, name = self._measured(prediction, network_), name_of(prediction)
                    if found is not None and (name not in fastest or found.step_s < fastest[name].step_s):
                        fastest[name] = found
                    if number == self._grid.rounds and name in fastest:
                        checked = _checked(self._model, str(place), prediction, fastest[name])
                        self._say(f"  {checked.strategy}: {checked.error:+.0%}")
                        yield checked

    def _paced(self, real: Task) -> Task:
        """The task with a model that sleeps for as long as this one's passes take."""
        share = max(1, self._config.batch or 1) // self._place.workers
        config = self._config.replace(workers=1, batch=max(1, share))
        question = Question(task=real, config=config, seconds=self._grid.seconds)
        measuring = Measuring(question, self._quietly, run_task)
        shapes, slots = measuring.shapes_and_slots()
        passes = measuring.profile(shapes, slots).phases
        model = MakePaced(
            {name: tuple(shape) for name, shape in shapes.by_name.items()},
            passes["forward"].mid,
            passes["backward"].mid,
        )
        task = Task(model=model, data=paced_data(_SAMPLES), optimizer=real.optimizer, loss="cross_entropy")
        return task.with_defaults().located(None, None)

    def _measured(self, prediction: Prediction, network: Network | None) -> Fact | None:
        """What a step took in a real run; None if it would take too long, or failed."""
        every = max((term.facts.get("every", 1.0) for term in prediction.terms), default=1.0)
        seconds = max(self._grid.seconds, _PERIODS * every * prediction.step_s.mid)
        if seconds > _LONGEST_S or _PERIODS * 2 * prediction.step_s.mid > _LONGEST_S:
            self._say(f"  {name_of(prediction)}: left out, {_PERIODS} exchanges would take {seconds:.0f} s.")
            return None
        watching = Watching(self._quietly, seconds, longest_s=2 * _LONGEST_S)
        with tempfile.TemporaryDirectory(prefix="syncline-check-") as folder:
            config = self._config.replace(
                strategy=prediction.strategy, layout=prediction.layout, epochs=100_000, evaluate_every=0,
                out=folder, name="check", checkpoint_every_s=1e6,
            )  # fmt: skip
            try:
                with suppress(Enough):
                    run_task(self._task, config, watching, network=network)
            except SynclineError as error:
                self._say(f"  {name_of(prediction)}: failed. {error}")
                return None
        return watching.fact()

    def _quietly(self, text: str) -> None:
        """What the measurements say of themselves is too much here."""


def _checked(model: str, place: str, prediction: Prediction, fact: Fact) -> Checked:
    found = compare(expected_of(prediction, ""), fact)
    worst = ""
    if found is not None:
        row = max(found.terms, key=lambda row: abs(row.predicted.mid - row.measured))
        part = (row.predicted.mid - row.measured) / fact.step_s
        worst = f"{row.name} {part:+.0%}"
    every = max((term.facts.get("every", 1.0) for term in prediction.terms), default=1.0)
    is_lock_step = read_strategy(prediction.strategy).method.is_lock_step
    is_plain = prediction.layout == "replicated"
    step = prediction.step_s
    return Checked(
        model=model, place=place, strategy=name_of(prediction), predicted_ms=1e3 * step.mid, low_ms=1e3 * step.low,
        high_ms=1e3 * step.high, measured_ms=1e3 * fact.step_s, predicted_bytes=prediction.bytes_per_step,
        measured_bytes=fact.bytes_per_step if every == 1 and is_lock_step and is_plain else None,
        predicted_mb=prediction.memory_bytes.mid / 1e6, measured_mb=fact.memory_bytes / 1e6, worst_term=worst,
        load=os.getloadavg()[0],
    )  # fmt: skip


def _batch_of(task: Task, workers: int) -> int:
    """The model's own, or as near to it as can be shared equally."""
    batch = task.facts().recommended_batch or 128
    return max(workers, batch // workers * workers)


def _data_of(model: str) -> Any:
    """Random samples of the shape that the model takes."""
    import torch

    make = torch.Generator().manual_seed(0)
    if model == "transformer":
        tokens = torch.randint(0, 64, (_SAMPLES // 4, 129), generator=make)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    shape = (1, 28, 28) if model in ("lenet", "mlp") else (3, 32, 32)
    inputs = torch.rand(_SAMPLES, *shape, generator=make)
    return inputs, torch.randint(0, 10, (_SAMPLES,), generator=make)
