"""What a layout needs and how long a step takes, predicted from facts of the model. Pure.

Here: `Need`, the bytes of one worker, counted tensor by tensor, `needs_of`, and `forecast`, which adds the time of a
step. Not here: the facts (`model_facts.py`), the choice between layouts (`choice.py`), the cut itself (`cut.py`).

What counts for a worker. The parameters of a replica lie once in memory that its n workers share: its part of them
counts, so the needs of all workers of a host add up to what the host needs. The same holds for summed gradients and the
optimizer's state. Private, and counted whole: gradients that wait to be summed, activations, buffers, frozen
parameters. While it starts, each worker holds the whole model before it moves to shared memory, whatever the layout;
with more than two or three workers this is often the most that it ever needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from syncline.errors import ConfigError
from syncline.layouts.cut import StageCut, StageLink, UnitCost, best_cut, cut_at
from syncline.layouts.grid import Grid
from syncline.layouts.layout import Layout
from syncline.layouts.model_facts import DividedFacts, ModelFacts

PROGRAM_BYTES = 210_000_000
"""A worker before it has a model: Python, torch, and this program. Its resident memory, seen with torch 2.13."""
_ROUND_BYTES = 2 * 2**20
"""How much is summed at a time (`shared_model.py`), with two slots for each worker."""
_CHUNK_NUMBERS = 2**20
"""How many numbers are updated at a time (`optimizer_shards.py`), of which a log keeps the state before."""
_BYTES_PER_S = 5e9
_BARRIER_S = 1e-4
"""What waiting for one another costs, on a machine whose cores are busy."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """The bytes that one worker needs."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    exchange: int = 0
    """Buffers through which workers exchange, and the log of the update."""
    start: int = 0
    """The most that it holds before the first step: the whole model, before it moves to shared memory."""
    stage: int = 0
    """Which stage of the pipeline it computes."""

    @property
    def state(self) -> int:
        """Parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All that is counted, the program included."""
        return PROGRAM_BYTES + max(self.start, self.state + self.activations + self.exchange)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a layout means for one model on so many workers."""

    layout: Layout
    grid: Grid
    needs: tuple[Need, ...]
    """Of the first worker of each stage."""
    micro_batches: int
    """Into how many micro-batches each share of a step is divided."""
    is_finer: bool = False
    """Whether these are more than without a limit of memory."""
    compute_s: float
    """Forward and backward passes; in a pipeline, with the bubble."""
    update_s: float
    exchange_s: float
    bubble: float = 0.0
    balance: float = 1.0
    moved_bytes: int = 0
    """What a worker sends in a step, inside its replica and between replicas."""

    @property
    def step_s(self) -> float:
        return self.compute_s + self.update_s + self.exchange_s

    @property
    def largest(self) -> Need:
        """The worker that needs the most."""
        return max(self.needs, key=lambda need: need.total)

    @property
    def host_bytes(self) -> int:
        """All workers, without their programs."""
        return self.grid.workers // self.grid.stages * sum(need.total - PROGRAM_BYTES for need in self.needs)

    def fits(self, limit: int | None) -> bool:
        """Whether each worker stays within so many bytes."""
        return limit is None or self.largest.total <= limit


def forecast(
    layout: Layout, facts: ModelFacts, *, workers: int, batch: int, pieces: int = 1, limit: int | None = None
) -> Forecast:
    """The prediction for a run with this layout; `ConfigError` if the model cannot have it.

    With a `limit` in bytes per worker, a share is divided into as many micro-batches as it takes, but at least
    `pieces`. If that does not suffice, the smallest need is predicted, which is above the limit.
    """
    check_layers(layout, facts, workers)
    grid = layout.grid(workers)
    share = max(1, -(-batch // grid.shares))
    cannot_divide = facts.has_batch_norm and not layout.is_replicated  # it would change the result
    count = _first_count(layout, facts, grid, share, pieces)
    looked = [_predict(layout, facts, grid, share, count, limit)]
    while not looked[-1].fits(limit) and count < share and not cannot_divide:
        count = min(share, 2 * count)
        looked.append(_predict(layout, facts, grid, share, count, limit))
    found = looked[-1] if looked[-1].fits(limit) else min(looked, key=lambda one: one.largest.total)
    return replace(found, is_finer=found.micro_batches > looked[0].micro_batches)


def check_layers(layout: Layout, facts: ModelFacts, workers: int) -> None:
    """`ConfigError` if the model does not have the layers that the layout divides, with the nearest layout."""
    grid, found = layout.grid(workers), facts.divided.get(layout.grid(workers).slices)
    if grid.slices > 1 and isinstance(found, str):
        raise _refusal(layout, found, "nothing-to-divide", "sharded")
    if grid.stages == 1:
        return
    if facts.uncut_because is not None:
        raise _refusal(layout, facts.uncut_because, "untraceable", "sharded")
    units = len(facts.units)
    if grid.stages > units:
        nearest = nearest_pipeline(units, workers)
        why = f"the model has {units} units that can be a stage, fewer than {grid.stages}"
        raise _refusal(layout, why, "too-many-stages", nearest, stages=grid.stages, possible=units)


def nearest_pipeline(units: int, workers: int) -> str:
    """The pipeline with the most stages that a model with so many units can have on so many workers."""
    stages = max((n for n in range(2, units + 1) if workers % n == 0), default=0)
    return f"pipeline({stages})" if stages else "sharded"


def _refusal(layout: Layout, why: str, reason: str, nearest: str, **facts: int) -> ConfigError:
    return ConfigError(
        f'--layout {layout} is not possible: {why.rstrip(".")}. Use --layout "{nearest}", or replicated.',
        code="layout", layout=str(layout), reason=reason, nearest=nearest, **facts,
    )  # fmt: skip


def _first_count(layout: Layout, facts: ModelFacts, grid: Grid, share: int, pieces: int) -> int:
    if layout.pipeline is not None and grid.stages > 1:
        return layout.pipeline.micro_batches_of(share, is_whole=facts.has_batch_norm)
    return min(share, pieces)


def _predict(layout: Layout, facts: ModelFacts, grid: Grid, share: int, count: int, limit: int | None) -> Forecast:
    cut = _cut_of(layout, facts, grid, share, count, limit)
    needs = needs_of(layout, facts, grid, samples=-(-share // count), micro_batches=count, cut=cut)
    spent = _step(layout, facts, grid, share, needs, cut)
    even = cut is None
    return Forecast(
        layout=layout, grid=grid, needs=needs, micro_batches=count, compute_s=spent.compute_s, update_s=spent.update_s,
        exchange_s=spent.exchange_s, moved_bytes=spent.moved_bytes,
        bubble=0.0 if even else cut.bubble, balance=1.0 if even else cut.balance,  # type: ignore[union-attr]
    )  # fmt: skip


def _cut_of(
    layout: Layout, facts: ModelFacts, grid: Grid, share: int, count: int, limit: int | None
) -> StageCut | None:
    if layout.pipeline is None or grid.stages == 1:
        return None
    samples = -(-share // count)
    costs = [_scaled(unit, samples) for unit in facts.units]
    if layout.pipeline.cut != "auto":
        return cut_at(costs, layout.pipeline.cut.split("+"), micro_batches=count)
    state = stage_state(facts.optimizer_state, grid.shards)
    room = None if limit is None else room_for_stage(limit, facts.constants)
    try:
        return best_cut(costs, grid.stages, micro_batches=count, memory_limit=room, optimizer_state=state)
    except ConfigError as error:
        if error.facts.get("reason") != "memory":
            raise
        # The cut with the smallest largest stage: its need is what a refusal names.
        return best_cut(
            costs, grid.stages, micro_batches=count, memory_limit=error.facts["needed"], optimizer_state=state
        )


def stage_state(optimizer_state: float, shards: int) -> float:
    """What a stage holds besides its parameters and their gradients once, for `best_cut`, in units of parameters.

    Of parameters, summed gradients and optimizer state a worker's part counts; its own gradients are whole.
    """
    return (2 + optimizer_state) / shards + 1 - 2


def room_for_stage(limit: int, constants: int) -> int:
    """What is left of a limit for a stage's layers."""
    return max(1, limit - PROGRAM_BYTES - constants - 2 * _ROUND_BYTES)


def _scaled(unit: UnitCost, samples: int) -> UnitCost:
    """The cost of a micro-batch of another size."""
    by = samples / unit.samples
    return replace(unit, forward_s=unit.forward_s * by, backward_s=unit.backward_s * by, samples=samples)


def needs_of(
    layout: Layout, facts: ModelFacts, grid: Grid, *, samples: int, micro_batches: int, cut: StageCut | None = None
) -> tuple[Need, ...]:
    """What the first worker of each stage needs with micro-batches of so many samples."""
    stages = [(0, len(facts.units))] if cut is None else list(cut.stages)
    return tuple(
        _need(layout, facts, grid, stage, facts.units[low:high], samples, micro_batches)
        for stage, (low, high) in enumerate(stages)
    )


def _need(
    layout: Layout, facts: ModelFacts, grid: Grid, stage: int, units: Sequence[UnitCost], samples: int, count: int
) -> Need:
    owned, computed = _bytes_of_lane(facts, grid, units)
    whole, slots, shards = facts.parameter_bytes, facts.optimizer_state, grid.shards
    in_flight = min(count, _in_flight(layout, grid.stages, stage, count)) if grid.stages > 1 else 1
    activations = round(in_flight * samples * activation_bytes(units))
    if layout.is_replicated or grid.per_replica == 1:
        return Need(
            parameters=whole + facts.constants,
            gradients=whole,
            optimizer=round(slots * whole),
            activations=activations,
            exchange=whole if grid.workers > 1 else 0,  # all workers add up parts of all gradients
            start=whole + facts.constants,
        )
    # Summed as soon as a layer has them, unless micro-batches add to each other's or a stage is computed in pieces.
    waits = grid.per_team > 1 or count > 1
    waiting = computed if waits else min(whole, facts.largest_layer + _ROUND_BYTES)
    measured = samples * activation_bytes(facts.units) if grid.stages > 1 else 0.0  # each worker measures all layers
    lane = grid.replicas * shards
    log = 8 * (1 + slots) * min(_CHUNK_NUMBERS, -(-owned // (4 * shards)))
    return Need(
        parameters=-(-owned // shards) + facts.constants,
        gradients=-(-owned // shards) + waiting,
        optimizer=round(slots * owned / shards),
        activations=activations,
        exchange=round(log + (2 * min(_ROUND_BYTES, owned) if lane > 1 else 0)),
        start=round(whole + facts.constants + whole / grid.per_replica + measured),
        stage=stage,
    )


def _bytes_of_lane(facts: ModelFacts, grid: Grid, units: Sequence[UnitCost]) -> tuple[int, int]:
    """The parameters that a stage and slice updates, and those whose gradients it computes."""
    names = {name for unit in units for name in unit.parameters} if grid.stages > 1 else set(facts.parameters)
    owned = sum(facts.parameters.get(name, 0) for name in names)
    found = facts.divided.get(grid.slices)
    if grid.slices == 1 or not isinstance(found, DividedFacts):
        return owned, owned
    divided = sum(facts.parameters.get(name, 0) for name in names & found.divided)
    computed = owned - divided + -(-divided // grid.slices)
    part = found.largest_bytes if grid.stages == 1 else -(-owned // grid.slices)
    return part, computed


def _in_flight(layout: Layout, stages: int, stage: int, count: int) -> int:
    assert layout.pipeline is not None, "only a pipeline has stages"
    return count if layout.pipeline.schedule == "gpipe" else stages - stage


def activation_bytes(units: Sequence[UnitCost]) -> float:
    """What the backward pass of these units needs, per sample; a crossing tensor that several keep counts once."""
    kept: dict[int, float] = {}
    for unit in units:
        kept.update(unit.kept)
    sent = max((unit.sent_bytes for unit in units), default=0.0)
    return sum(unit.saved_bytes for unit in units) + max(sum(kept.values()), sent)


class _Spent(NamedTuple):
    """The seconds of a step, and the bytes that a worker sends in it."""

    compute_s: float
    update_s: float
    exchange_s: float
    moved_bytes: int


def _step(
    layout: Layout, facts: ModelFacts, grid: Grid, share: int, needs: Sequence[Need], cut: StageCut | None
) -> _Spent:
    most = max(needs, key=lambda need: need.parameters)
    held = most.parameters - facts.constants
    moves = 3 + 2 * facts.optimizer_state
    if not layout.is_replicated:
        moves += 2 * (1 + facts.optimizer_state)  # to the log from which another worker could complete the update
    update = held * moves / _BYTES_PER_S
    lane = grid.replicas * (1 if layout.is_replicated else grid.shards)
    summed = held * grid.shards if lane > 1 else 0
    rounds = 1 if layout.is_replicated else -(-summed // _ROUND_BYTES)
    barriers = (rounds + (1 if layout.is_replicated else 3)) * _BARRIER_S * (grid.workers > 1)
    exchange = 2 * summed / _BYTES_PER_S + barriers
    if cut is not None:
        crossing = [facts.units[high - 1].sent_bytes + facts.units[high - 1].returned_bytes for high in cut.boundaries]
        return _Spent(cut.step_s, update, exchange, summed + round(share * max(crossing, default=0.0)))
    found = facts.divided.get(grid.slices)
    if grid.slices == 1 or not isinstance(found, DividedFacts):
        return _Spent(share * facts.seconds_per_sample, update, exchange, summed)
    compute = share * _divided_seconds(facts, found, grid.slices)
    gathered = round(share * found.exchanged_bytes)
    exchange += StageLink().seconds(gathered) + 4 * found.layers * _BARRIER_S
    return _Spent(compute, update, exchange, summed + gathered)


def _divided_seconds(facts: ModelFacts, found: DividedFacts, slices: int) -> float:
    """Forward and backward of a sample, if the work of a unit is divided as its parameters are."""
    seconds = 0.0
    for unit in facts.units:
        size = unit.parameter_bytes
        part = sum(count for name, count in unit.parameters.items() if name in found.divided) / size if size else 0.0
        seconds += unit.seconds / unit.samples * (1 - part + part / slices)
    return seconds if math.isfinite(seconds) else 0.0
