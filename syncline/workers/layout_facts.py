"""Checking and choosing a layout before any worker starts: the model is built and looked at in the driver's process.

Here: `settle_layout`, which refuses what a run cannot have and chooses for `--layout auto`, and `model_facts`. Not
here: the predictions (`layouts/forecast.py`) and the choice (`layouts/choice.py`), which are pure, and what the workers
do with the layout (`spreading.py`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncline.compute.recompute import recompute_activations
from syncline.config.run import RunConfig
from syncline.errors import ConfigError, SynclineError
from syncline.layouts.chain.chain import Chain
from syncline.layouts.chain.tracing import trace_chain
from syncline.layouts.choice import Candidate, candidates, choose, describe_fit, look_at, refuse
from syncline.layouts.cut import UnitCost
from syncline.layouts.forecast import Forecast, check_layers, forecast
from syncline.layouts.layout import AUTO, REPLICATED, Layout, is_auto, read_layout
from syncline.layouts.model_facts import DividedFacts, ModelFacts
from syncline.layouts.optimizer_size import optimizer_state
from syncline.layouts.stage_costs import measure_costs, measure_whole
from syncline.layouts.tensor_split import Split, split_of
from syncline.layouts.tensor_summary import exchanged_bytes
from syncline.planning.machine import Machine
from syncline.planning.plan import Plan
from syncline.planning.planner import TaskFacts, make_plan
from syncline.strategies.method import RunConditions
from syncline.strategies.reading import read_strategy
from syncline.task import Task
from syncline.workers.build import build_loss, build_model, build_optimizer, build_sources
from syncline.workers.forward import inputs_and_target
from syncline.workers.spreading import check_can_be_spread, cut_of

_MEASURED_S = 0.3
_MOST_SAMPLES = 16
"""Of how many samples the measured micro-batch is at most: enough for the time of a layer, little memory."""


def settle_layout(
    task: Task, facts: TaskFacts, config: RunConfig, machine: Machine
) -> tuple[RunConfig, tuple[str, ...]]:
    """The settings with the layout that a run will have, and what to say about it.

    `ConfigError` if the run, its model or its memory limit do not allow the layout.
    """
    if is_auto(config.layout) and config.engine != "local":
        raise ConfigError(
            f"--layout auto looks at this machine, but --engine {config.engine} may use others. Name a layout, such as "
            "--layout replicated or --layout sharded.",
            code="layout", layout=AUTO, reason="engine", nearest=REPLICATED,
        )  # fmt: skip
    request = _Request(task, config, make_plan(facts, config.replace(layout=REPLICATED), machine))
    try:
        known = request.facts()
    except SynclineError:
        raise
    except Exception as error:  # the user's own code: a worker will report it, unless the model is needed here
        if not request.chooses:
            return config, ()
        raise ConfigError(
            f"--layout auto tries out the model before the start, and it raised {type(error).__name__}: {error}. Fix "
            "the model, or choose a layout: --layout replicated.",
            code="layout", layout=AUTO, reason="model-failed", nearest=REPLICATED,
        ) from error  # fmt: skip
    if request.chooses:
        choice = choose(request.look_at(known), limit=request.limit, host_bytes=machine.memory_available_bytes)
        return _with_layout(config, choice.chosen), tuple(choice.describe())
    request.check(known)
    if request.limit is None:
        return config, ()
    predicted = request.forecast(known)
    if not predicted.fits(request.limit):
        raise refuse(predicted, request.look_at(known), request.limit)
    return _with_layout(config, predicted), (describe_fit(predicted, request.limit),)


def look_at_layouts(
    task: Task, facts: TaskFacts, config: RunConfig, machine: Machine, more: Sequence[Layout] = ()
) -> tuple[Candidate, ...]:
    """What each possible layout, and `more`, would mean for the run; the model is built, and its layers are timed."""
    plan = make_plan(facts, config.replace(layout=REPLICATED), machine)
    request = _Request(task, config.replace(layout=AUTO), plan, more)
    return request.look_at(request.facts())


class _Request:
    """A layout that was asked for, and the run that is to have it; `plan` is that of the run without any layout."""

    def __init__(self, task: Task, config: RunConfig, plan: Plan, more: Sequence[Layout] = ()) -> None:
        self._task, self._config, self._plan = task, config, plan
        self.chooses = is_auto(config.layout)
        self.limit = plan.memory_limit_bytes
        self._layout = Layout() if self.chooses else read_layout(config.layout)
        self._layouts = candidates(plan.size) if self.chooses or self.limit is not None else []
        self._layouts += [layout for layout in (self._layout, *more) if layout not in self._layouts]

    def facts(self) -> ModelFacts:
        """What the layouts need to know; what is impossible is raised if it was asked for."""
        plan = self._plan
        with _own_threads(plan), torch.random.fork_rng(devices=[]):
            # A copy: the user's own objects stay as they are. An optimizer may hold the model's parameters.
            model, optimizer = copy.deepcopy((self._task.model, self._task.optimizer))
            task = dataclasses.replace(self._task, model=model, optimizer=optimizer)
            source, _ = build_sources(task, plan.seed)
            network = build_model(task, source, plan.seed).train()
            if plan.checkpoint_activations:
                recompute_activations(network)
            samples = max(2, min(_MOST_SAMPLES, plan.batch, len(source)))
            inputs, target = inputs_and_target(source.fetch(np.arange(samples) % len(source)))
            loss = build_loss(task.loss)  # type: ignore[arg-type]  # Task.with_defaults has filled it in
            return model_facts(
                network,
                build_optimizer(task, network),
                inputs,
                lambda output: loss(output, target),
                self._layouts,
                workers=plan.size,
                measures=self.chooses or self.limit is not None,
                raises=None if self.chooses else self._layout,
            )

    def check(self, known: ModelFacts) -> None:
        """`ConfigError` if the model does not have the layers or the cuts."""
        layout, size = self._layout, self._plan.size
        check_layers(layout, known, size)
        if layout.pipeline is not None and layout.pipeline.cut != "auto" and layout.grid(size).stages > 1:
            cut_of(layout.pipeline, known.units, layout.grid(size).stages, micro_batches=1)

    def forecast(self, known: ModelFacts) -> Forecast:
        """What the layout means for the run."""
        plan = self._plan
        return forecast(
            self._layout, known, workers=plan.size, batch=plan.batch, pieces=plan.accumulate, limit=self.limit
        )

    def look_at(self, known: ModelFacts) -> tuple[Candidate, ...]:
        """What each possible layout means for the run."""
        plan = self._plan
        return look_at(
            self._layouts, known, workers=plan.size, batch=plan.batch, pieces=plan.accumulate, limit=self.limit,
            check=self._check_run,
        )  # fmt: skip

    def _check_run(self, layout: Layout) -> None:
        """`ConfigError` if the run, whatever its model, cannot have this layout."""
        shares_memory = self._plan.collective != "process-group"
        conditions = RunConditions(workers=self._plan.size, shares_memory=shares_memory)
        layout.check(self._config.strategy, read_strategy(self._config.strategy).method, conditions)


def _with_layout(config: RunConfig, predicted: Forecast) -> RunConfig:
    """The settings with this layout and the micro-batches that a limit takes; `replicated` finds them by measuring."""
    layout, count = predicted.layout, predicted.micro_batches
    if config.memory_limit is not None and not layout.is_replicated:
        if layout.pipeline is None:
            config = config.replace(accumulate=max(count, config.accumulate))
        elif predicted.is_finer:
            layout = dataclasses.replace(layout, pipeline=dataclasses.replace(layout.pipeline, micro_batches=count))
    return config.replace(layout=str(layout))


def model_facts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: tuple[Any, ...],
    loss: Callable[[Any], torch.Tensor],
    layouts: Sequence[Layout],
    *,
    workers: int,
    measures: bool = True,
    raises: Layout | None = None,
) -> ModelFacts:
    """What these layouts need to know of a model; `inputs` are an example, `loss` makes a number of its output.

    Without `measures`, layers are found but not timed. If the model cannot have the layout `raises`: `ConfigError`.
    """
    named = {name: p.nbytes for name, p in model.named_parameters() if p.requires_grad}
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    layers = [sum(p.nbytes for p in m.parameters(recurse=False) if p.requires_grad) for m in model.modules()]
    grids = [layout.grid(workers) for layout in layouts]
    wanted = Layout().grid(workers) if raises is None else raises.grid(workers)
    why, chain = None, None
    if any(grid.stages > 1 for grid in grids):
        why, chain = _chain_of(model, inputs, raises=wanted.stages > 1)
    slices = sorted({grid.slices for grid in grids} - {1})
    divided = {n: _divided(model, n, inputs, raises=wanted.slices == n) for n in slices}
    if not measures:
        units = _unmeasured(chain)
    elif chain is not None:
        units = measure_costs(chain, inputs, loss=loss, seconds=_MEASURED_S)
    else:
        units = [measure_whole(model, inputs, loss=loss, seconds=_MEASURED_S)]
    return ModelFacts(
        parameters=named,
        largest_layer=max(layers, default=0),
        constants=frozen + sum(buffer.nbytes for buffer in model.buffers()),
        optimizer_state=optimizer_state(optimizer),
        units=tuple(units),
        uncut_because=why,
        divided=divided,
        has_batch_norm=any(isinstance(m, _BatchNorm) for m in model.modules()),
    )


def _chain_of(model: nn.Module, inputs: tuple[Any, ...], *, raises: bool) -> tuple[str | None, Chain | None]:
    """Why the model cannot be cut, or its units."""
    try:
        check_can_be_spread(model, read_layout("pipeline"))
        return None, trace_chain(model, inputs)
    except ConfigError as error:
        if raises:
            raise
        return str(error).partition(". ")[0], None


def _divided(model: nn.Module, slices: int, inputs: tuple[Any, ...], *, raises: bool) -> DividedFacts | str:
    try:
        check_can_be_spread(model, read_layout(f"tensor({slices})"))
        split = split_of(model, slices)
    except ConfigError as error:
        if raises:
            raise
        return str(error).partition(": ")[2].partition(". ")[0]
    numbers = [sum(piece.high - piece.low for piece in split.pieces(rank)) for rank in range(slices)]
    whole = sum(split.count(name) for name in split.shapes if name not in split.divided)
    divided = sum(split.count(name) for name in split.divided)
    return DividedFacts(
        largest_bytes=max(numbers) * split.item_bytes,
        computed_bytes=(whole + -(-divided // slices)) * split.item_bytes,
        divided=frozenset(split.divided),
        layers=len(split.layers),
        exchanged_bytes=_exchanged(model, split, inputs),
    )


def _exchanged(model: nn.Module, split: Split, inputs: tuple[Any, ...]) -> float:
    return exchanged_bytes(model, split, [x[:1] for x in inputs])


def _unmeasured(chain: Chain | None) -> list[UnitCost]:
    """The units by name."""
    if chain is None:
        return []
    return [UnitCost(name=unit.name, forward_s=0.0, backward_s=0.0) for unit in chain.units]


@contextmanager
def _own_threads(plan: Plan) -> Iterator[None]:
    """Compute with as many threads as a worker does."""
    before = torch.get_num_threads()
    torch.set_num_threads(plan.workers[0].threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
