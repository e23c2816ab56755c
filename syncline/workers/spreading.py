"""Deciding how the model is spread over the members of a View.

Here: `Spreader`, which all members use together, with the same result but for their ranks, and `describe_spread`, for
`syncline explain`. A pipeline is cut where the measured costs of its layers say. They are measured once: a new member
takes over what the others have measured, so that recovery does not wait for it. Not here: what layouts there are
(`layouts/`), and moving the model to where it is shared (`layouts/shared_model.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from syncline.comms.serialize import dump_state, load_state
from syncline.compute.dropout import Dropouts
from syncline.errors import ConfigError
from syncline.layouts.chain.chain import Chain
from syncline.layouts.chain.tracing import trace_chain
from syncline.layouts.chain.untouched import untouched
from syncline.layouts.cut import StageCut, UnitCost, best_cut, check_stage_count, cut_at
from syncline.layouts.forecast import room_for_stage, stage_state
from syncline.layouts.layout import Layout, read_layout
from syncline.layouts.optimizer_size import optimizer_state
from syncline.layouts.pipeline import Pipeline
from syncline.layouts.spread import ModelSpread
from syncline.layouts.stage_costs import measure_costs
from syncline.layouts.stage_runner import StagedModel
from syncline.layouts.tensor_split import split_of
from syncline.layouts.tensor_summary import describe as describe_split
from syncline.models.declared.network import penalty_of
from syncline.planning.plan import Plan
from syncline.task import Task
from syncline.telemetry.events import InfoMessage
from syncline.workers.build import Loss, build_loss, build_model, build_sources
from syncline.workers.forward import inputs_and_target, is_classification
from syncline.workers.session import Session
from syncline.workers.stages import is_staged

_MEASURED_S = 0.3
"""For how long the costs of layers are measured."""
_EQUAL = 1.25
"""Workers whose speeds differ by less than this factor count as equally fast: the rest is noise."""

Example = Callable[[int], Any]
"""A batch of so many samples."""


class Spreader:
    """Spreads the model of one worker's job over the members of each View."""

    def __init__(self, session: Session, loss: Loss) -> None:
        self._session, self._loss = session, loss
        self._chain: Chain | None = None
        self._dropouts: tuple[int, ...] = ()
        self._measured: dict[str, Any] | None = None

    def spread(
        self,
        model: torch.nn.Module,
        example: Example,
        *,
        micro_batch: int,
        micro_batches: int,
        optimizer: torch.optim.Optimizer,
    ) -> ModelSpread | None:
        """None if each member holds the whole model. A micro-batch has up to `micro_batch` samples."""
        session = self._session
        layout, grid = session.layout, session.place.grid
        if layout.is_replicated or session.collective.size == 1:
            return None
        spread = ModelSpread(grid, session.rank)
        if grid.per_team > 1:
            check_can_be_spread(model, layout)
        if grid.slices > 1:
            spread.split = split_of(model, grid.slices)
            named = dict(model.named_parameters())
            spread.divided = frozenset(id(named[name]) for name in spread.split.divided)
        if layout.pipeline is not None and grid.stages > 1:
            inputs, target = inputs_and_target(example(micro_batch))
            spread.has_accuracy = _is_classification(model, inputs, target)
            limits = StageLimits.of(session, model, optimizer)
            spread.staged = self._cut(layout.pipeline, model, inputs, target, micro_batches, limits)
        return spread

    def _cut(
        self,
        pipeline: Pipeline,
        model: torch.nn.Module,
        inputs: tuple[Any, ...],
        target: Any,
        micro_batches: int,
        limits: StageLimits,
    ) -> StagedModel:
        session = self._session
        if self._chain is None or self._chain.model is not model:
            self._chain = trace_chain(model, inputs)
            self._dropouts = _dropouts_of(self._chain, inputs)
        check_stage_count(session.place.grid.stages, len(self._chain), self._chain.kept_whole)
        costs, speeds = self._costs(self._chain, inputs, target)
        stages = session.place.grid.stages
        found = cut_of(pipeline, costs, stages, micro_batches=micro_batches, speeds=speeds, limits=limits)
        if session.rank == 0 and session.view == 1:
            lines = "; ".join(line.rstrip(".") for line in found.describe())
            session.recorder.emit(InfoMessage(message=f"pipeline: {lines}.", details={"stages": list(found.edges)}))
        largest = max((cost.sent_bytes * cost.samples for cost in costs), default=0)
        return StagedModel(self._chain, found.edges, pipeline.schedule, int(largest), self._dropouts)

    def _costs(self, chain: Chain, inputs: tuple[Any, ...], target: Any) -> tuple[list[UnitCost], list[float]]:
        """The costs of all units, and the speed of each stage of the first team, as all members know them."""
        session = self._session
        known = [load_state(data) for data in session.collective.all_gather(dump_state(self._measured))]
        if not any(known):
            costs = measure_costs(chain, inputs, loss=lambda output: self._loss(output, target), seconds=_MEASURED_S)
            mine = {"worker_id": session.worker_id, "costs": [dataclasses.asdict(cost) for cost in costs]}
            measured = [load_state(data) for data in session.collective.all_gather(dump_state(mine))]
            known = [{"costs": together([m["costs"] for m in measured]), "speeds": _speeds(measured)}]
        self._measured = next(k for k in known if k)
        speeds = [self._measured["speeds"].get(worker_id, 1.0) for worker_id in session.members]
        stages = speeds[: session.place.grid.per_team : session.place.grid.slices]
        return [UnitCost(**cost) for cost in self._measured["costs"]], stages


def check_can_be_spread(model: torch.nn.Module, layout: Layout) -> None:
    """`ConfigError` for a model of which no worker could compute a part by itself."""
    reasons = {
        "penalty": ("its layers have weight penalties, which are computed from all of them", penalty_of(model)),
        "stages": ("it trains one part of itself after another", is_staged(model) or None),
    }
    for reason, (why, found) in reasons.items():
        if found is not None:
            raise ConfigError(
                f"--layout {layout} cannot spread this model: {why}. Use --layout sharded or replicated.",
                code="layout", layout=str(layout), reason=reason, nearest="sharded",
            )  # fmt: skip


@dataclass(frozen=True)
class StageLimits:
    """What a stage may hold, in bytes, and how much it needs for each byte of parameters besides their gradients."""

    memory: int | None = None
    optimizer_state: float = 2.0

    @classmethod
    def of(cls, session: Session, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> StageLimits:
        limit = session.plan.memory_limit_bytes
        constants = sum(t.nbytes for t in (*model.parameters(), *model.buffers()) if not t.requires_grad)
        memory = None if limit is None else room_for_stage(limit, constants)
        return cls(memory, stage_state(optimizer_state(optimizer), session.place.grid.shards))


def cut_of(
    pipeline: Pipeline,
    costs: Sequence[UnitCost],
    stages: int,
    *,
    micro_batches: int,
    speeds: Sequence[float] = (),
    limits: StageLimits | None = None,
) -> StageCut:
    """Where the user says, or where a step is shortest; elsewhere while there are fewer workers than stages.

    With too few workers for a limit of memory, it is the cut whose largest stage is smallest.
    """
    limits = limits or StageLimits()
    if pipeline.cut != "auto":
        found = cut_at(costs, pipeline.cut.split("+"), micro_batches=micro_batches)
        if len(found.stages) == stages:
            return found
        if stages == pipeline.stages:
            raise ConfigError(
                f"--layout {pipeline} names {len(found.boundaries)} cuts, which makes {len(found.stages)} stages "
                f"instead of {stages}. Name {stages - 1}: the layer with which each stage but the first begins.",
                code="layout", layout=str(pipeline), reason="cut-count", nearest=f"pipeline({len(found.stages)})",
            )  # fmt: skip
    search = functools.partial(
        best_cut, costs, stages, speeds=speeds, micro_batches=micro_batches, optimizer_state=limits.optimizer_state
    )
    try:
        return search(memory_limit=limits.memory)
    except ConfigError as error:
        if error.facts.get("reason") != "memory":
            raise
        return search(memory_limit=error.facts["needed"])


def together(measured: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The costs that the workers agree on: of each unit the least time that one has measured, the least disturbed."""
    return [
        {**units[0], **{key: min(unit[key] for unit in units) for key in ("forward_s", "backward_s")}}
        for units in zip(*measured, strict=True)
    ]


def _speeds(measured: Sequence[dict[str, Any]]) -> dict[int, float]:
    """By worker_id, how fast each worker is, relative to the middle one."""
    times = {m["worker_id"]: sum(unit["forward_s"] + unit["backward_s"] for unit in m["costs"]) for m in measured}
    middle = statistics.median(times.values())
    speeds = {worker_id: middle / time if time else 1.0 for worker_id, time in times.items()}
    return {worker_id: speed if not 1 / _EQUAL < speed < _EQUAL else 1.0 for worker_id, speed in speeds.items()}


def _dropouts_of(chain: Chain, inputs: tuple[Any, ...]) -> tuple[int, ...]:
    """How often each unit drops out in a forward pass."""
    counts, values = [], inputs
    with untouched(chain.model), torch.no_grad():
        chain.model.train()
        for number in range(len(chain)):
            with Dropouts(0).of(0, range(len(inputs[0]))) as scope:
                values = chain.stage(number, number + 1)(*values)
            counts.append(scope.calls)
    return tuple(counts)


def _is_classification(model: torch.nn.Module, inputs: tuple[Any, ...], target: Any) -> bool:
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        output = model(*inputs)
    model.train(was_training)
    return is_classification(output, target)


def describe_spread(task: Task, plan: Plan) -> list[str]:
    """For `syncline explain`: which layers go where, measured on this machine; nothing if each worker holds all."""
    layout = read_layout(plan.layout)
    grid = layout.grid(plan.size)
    if grid.per_team == 1 or layout.is_replicated:
        return []
    source, _ = build_sources(task, plan.seed)
    model = build_model(task, source, plan.seed).train()
    check_can_be_spread(model, layout)
    lines = describe_split(split_of(model, grid.slices)) if grid.slices > 1 else []
    if layout.pipeline is None or grid.stages == 1:
        return lines
    samples = min(-(-plan.batch // grid.shares), len(source))
    count = pipeline_micro_batches(layout.pipeline, samples, model)
    inputs, target = inputs_and_target(source.fetch(np.arange(max(2, -(-samples // count)))))
    loss = build_loss(task.loss)  # type: ignore[arg-type]  # Task.with_defaults has filled it in
    chain = trace_chain(model, inputs)
    check_stage_count(grid.stages, len(chain), chain.kept_whole)
    costs = measure_costs(chain, inputs, loss=lambda output: loss(output, target), seconds=_MEASURED_S)
    return [*lines, *cut_of(layout.pipeline, costs, grid.stages, micro_batches=count).describe()]


def pipeline_micro_batches(pipeline: Pipeline, samples: int, model: torch.nn.Module) -> int:
    """Into how many micro-batches a pipeline divides so many samples; batch norm needs all of them at once."""
    return pipeline.micro_batches_of(samples, is_whole=any(isinstance(m, _BatchNorm) for m in model.modules()))
