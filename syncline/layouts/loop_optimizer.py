"""The optimizer of a user's own loop, each worker's update a part of the whole.

Here: `LoopOptimizer`. The script's optimizer holds whole parameters at all times, so that its settings, `zero_grad` and
`state_dict` are what the script expects. Only while a worker updates does it hold the pieces that the worker owns. What
it remembers of each number (momentum, squares) lies in tables that all workers share. What it remembers of a whole
parameter, such as a count of steps, is the same for all parameters that were updated in the same steps: each worker
learns it from a piece that it owns, or from a stand-in. A parameter without a gradient is left out, as in one process.

An update is made in chunks. Before each, what it changes is copied to a log, and the progress is noted where all
workers see it. If a worker dies in the middle, another one restores the chunk and makes the rest (`complete`).

Not here: the memory of the parameters, and when a step counts (`own_loop_shards.py`).
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from syncline.errors import ConfigError
from syncline.layouts.gradient_rounds import in_memory_order
from syncline.layouts.optimizer_shards import Allocate, check_by_number, settings_of, step_with, twin_of
from syncline.layouts.shards import Piece, chunks_of, pieces_by_rank, whole_leaves
from syncline.strategies.flat import views_of

_CHUNK_NUMBERS = 2**18
"""How many numbers are updated at a time: few enough that the log stays small, enough that calls are few."""
_DONE, _SAVED = 0, 1
"""Columns of the progress: how many chunks are updated, and how many were copied to the log."""

State = dict[str, Any]


@dataclass
class _LoopPart:
    """What the optimizer holds as a parameter: a piece of one, or a stand-in for one of which this worker has none."""

    parameter: nn.Parameter
    number: int
    """Which parameter it is a part of."""
    tables: dict[str, torch.Tensor]
    """Its part of each table."""
    state: State
    place: slice | None = None
    """Where it is in its parameter; a stand-in is nowhere."""


class _LoopChunk(NamedTuple):
    parts: list[_LoopPart]
    changed: list[torch.Tensor]
    """What an update of the chunk changes."""
    log: list[torch.Tensor]
    """Where that is copied before."""


class _Remembered(NamedTuple):
    """What the optimizer remembers of a parameter."""

    tables: tuple[str, ...]
    """Of each number: the names."""
    values: State
    """Of the parameter as a whole."""


class OptimizerOffer(msgspec.Struct, frozen=True):
    """What a worker's optimizer has, when all begin."""

    is_complete: bool
    """Whether it has all parameters: a replacement may not have come to where the others have added some."""
    tables: list[str]
    """What it remembers of each number."""

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> OptimizerOffer:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return cls(all(id(p) in held for p in parameters), _table_names(optimizer, parameters[0].dtype))


def refusal(why: str, reason: str, **facts: Any) -> ConfigError:
    """The error for a script that cannot have this layout."""
    return ConfigError(
        f"--layout sharded is not possible: {why}. Use --layout replicated.",
        code="layout", layout="sharded", reason=reason, nearest="replicated", **facts,
    )  # fmt: skip


class LoopOptimizer:
    """One worker's side of the updates of the `parameters`, which lie in `memory` one after another."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        memory: torch.Tensor,
        *,
        rank: int,
        size: int,
        offers: Sequence[OptimizerOffer],
        allocate: Allocate,
    ) -> None:
        """All workers hold the same state, and call this together; the first that has all of it fills the tables."""
        check_optimizer(optimizer)
        self._optimizer, self._parameters, self._memory, self._rank = optimizer, list(parameters), memory, rank
        sizes = [p.numel() for p in self._parameters]
        self._starts = [0, *itertools.accumulate(sizes)]
        owned = pieces_by_rank([whole_leaves(sizes)], size, _CHUNK_NUMBERS * size)
        self._pieces = [chunks_of(pieces, _CHUNK_NUMBERS) for pieces in owned]
        names = sorted({name for offer in offers for name in offer.tables})
        self._tables = {name: allocate(memory.numel(), memory.dtype) for name in names}
        self._check_known(optimizer.state.values())
        self._views = {name: views_of(table, self._parameters) for name, table in self._tables.items()}
        longest = max((sum(p.high - p.low for p in chunk) for own in self._pieces for chunk in own), default=0)
        self._row = max(1, longest)
        self._log = allocate(size * (1 + len(self._tables)) * self._row, memory.dtype)
        self._progress = allocate(2 * size, torch.int64).view(-1, 2).numpy()
        self._ids = itertools.count()
        self._history: dict[int, int] = {}
        """Of each parameter: a number that parameters have in common which were updated in the same steps."""
        self._remembered: dict[int, _Remembered] = {}
        """By this number."""
        if rank == next((rank for rank, offer in enumerate(offers) if offer.is_complete), 0):
            self._fill_tables()

    def confirm(self) -> None:
        """All workers have come this far, and the tables are filled: they count from now on."""
        for number, p in enumerate(self._parameters):
            state = self._optimizer.state.get(p) or {}
            for name in self._split(state).tables:
                state[name] = self._views[name][number]
        numbers = {id(p): number for number, p in enumerate(self._parameters)}
        groups = enumerate(self._optimizer.param_groups)
        self._group_of = {numbers[id(p)]: n for n, group in groups for p in group["params"] if id(p) in numbers}
        self._find_histories()
        self._own = self._chunks(self._rank, lambda number: self._remembered[self._history[number]])
        self._before = self._history, self._remembered

    def find_groups(self) -> None:
        """A replacement's script may add groups that the others have had all along, and load their state."""
        if len(self._group_of) < sum(len(group["params"]) for group in self._optimizer.param_groups):
            self.confirm()

    def begin_update(self) -> None:
        """Note that no chunk is updated yet; before any worker can begin to update."""
        self._progress[self._rank] = (0, 0)

    def update(self) -> None:
        """Step with what this worker owns."""
        present = self._present()
        self._before = dict(self._history), dict(self._remembered)
        self._update_chunks(self._rank, self._own, present)
        self._count(present)

    def complete_others(self) -> None:
        """Make the rest of the updates of workers that have died in them; this worker has made its own."""
        history, remembered = self._before
        for rank, pieces in enumerate(self._pieces):
            if self._progress[rank, _DONE] < len(pieces):
                chunks = self._chunks(rank, lambda number: remembered[history[number]])
                self._update_chunks(rank, chunks, self._present())

    @property
    def is_intact(self) -> bool:
        """Whether what the optimizer remembers is where all workers share it: the script has not replaced it."""
        state, name = self._optimizer.state, next(iter(self._tables), None)
        if name is None:
            return True
        known = {number: name in self._remembered[h].tables for number, h in self._history.items()}
        return all(
            (state.get(self._parameters[number]) or {}).get(name) is (self._views[name][number] if is_known else None)
            for number, is_known in known.items()
        )

    # Updating

    def _present(self) -> dict[int, int]:
        """The parameters with a gradient, each with its history."""
        return {number: h for number, h in self._history.items() if self._parameters[number].grad is not None}

    def _update_chunks(self, rank: int, chunks: Sequence[_LoopChunk], present: dict[int, int]) -> None:
        done, saved = (int(n) for n in self._progress[rank])
        for number, chunk in enumerate(chunks):
            if number < done:
                continue
            if number < saved:
                torch._foreach_copy_(chunk.changed, chunk.log)
            else:
                torch._foreach_copy_(chunk.log, chunk.changed)
                self._progress[rank, _SAVED] = number + 1
            self._step([part for part in chunk.parts if part.number in present])
            self._progress[rank, _DONE] = number + 1

    def _step(self, parts: Sequence[_LoopPart]) -> None:
        """Step while the optimizer holds these parts."""
        if not parts:
            return
        optimizer, by_group = self._optimizer, defaultdict[int, list[nn.Parameter]](list)
        for part in parts:
            part.parameter.grad = self._gradient(part)
            by_group[self._group_of[part.number]].append(part.parameter)
        groups, states = optimizer.param_groups, optimizer.state
        optimizer.param_groups = [{**groups[number], "params": params} for number, params in by_group.items()]
        optimizer.state = defaultdict(dict, {part.parameter: part.state for part in parts if part.state})
        try:
            step_with(optimizer)
            for part in parts:
                part.state = _in_tables(part, optimizer.state[part.parameter])
        finally:
            optimizer.param_groups, optimizer.state = groups, states

    def _gradient(self, part: _LoopPart) -> torch.Tensor:
        if part.place is None:
            return torch.zeros_like(part.parameter)
        return in_memory_order(self._parameters[part.number])[part.place]

    def _count(self, present: dict[int, int]) -> None:
        """After the update: show in the script's optimizer what it remembers of whole parameters."""
        updated: dict[int, _LoopPart] = {}
        for chunk in self._own:
            for part in chunk.parts:
                if part.number in present:
                    updated.setdefault(present[part.number], part)
        missing = {h: number for number, h in present.items() if h not in updated}
        stand_ins = {h: self._stand_in(number, self._remembered[h]) for h, number in missing.items()}
        self._step(list(stand_ins.values()))
        updated.update(stand_ins)
        now = {h: (next(self._ids), part.state) for h, part in updated.items()}
        for number, h in present.items():
            self._history[number], state = now[h]
            if state:
                self._show(number, state)
        self._remembered.update({new: self._split(state) for new, state in now.values()})
        used = set(self._history.values())
        self._remembered = {h: remembered for h, remembered in self._remembered.items() if h in used}

    def _show(self, number: int, state: State) -> None:
        shown = self._optimizer.state[self._parameters[number]]
        for name, value in state.items():
            if name in self._tables and isinstance(value, torch.Tensor):
                shown[name] = self._views[name][number]
            elif isinstance(value, torch.Tensor) and isinstance(shown.get(name), torch.Tensor):
                shown[name].copy_(value)
            else:
                shown[name] = copy.deepcopy(value)  # each parameter counts by itself

    def _stand_in(self, number: int, remembered: _Remembered) -> _LoopPart:
        """One number with a gradient of zero, of which the optimizer remembers as much as of a parameter."""
        tables = {name: torch.zeros(1, dtype=table.dtype) for name, table in self._tables.items()}
        parameter = nn.Parameter(torch.zeros(1, dtype=self._memory.dtype))
        return _LoopPart(parameter, number, tables, _state_of(tables, remembered))

    # What the optimizer remembers

    def _fill_tables(self) -> None:
        for number, p in enumerate(self._parameters):
            for name, value in (self._optimizer.state.get(p) or {}).items():
                if name in self._tables and isinstance(value, torch.Tensor):
                    self._views[name][number].copy_(value)

    def _find_histories(self) -> None:
        """Give parameters of which the optimizer remembers the same one number; `_count` keeps that true."""
        self._history.clear()
        known: list[tuple[int, _Remembered, int]] = []
        for number, group in self._group_of.items():
            mine = self._split(self._optimizer.state.get(self._parameters[number]) or {})
            found = next((h for g, theirs, h in known if g == group and theirs == mine), None)
            if found is None:
                found = next(self._ids)
                known.append((group, mine, found))
                self._remembered[found] = mine
            self._history[number] = found

    def _split(self, state: State) -> _Remembered:
        tables = tuple(n for n, value in state.items() if n in self._tables and isinstance(value, torch.Tensor))
        return _Remembered(tables, copy.deepcopy({n: value for n, value in state.items() if n not in tables}))

    def _check_known(self, states: Iterable[State]) -> None:
        for name in {name for state in states for name in state} - set(self._tables):
            if any(isinstance(s.get(name), torch.Tensor) and s[name].dim() for s in states):
                raise _of_other_kind(name)

    def _chunks(self, rank: int, remembered: Callable[[int], _Remembered]) -> list[_LoopChunk]:
        """What a worker updates, with what the optimizer remembers of each parameter."""
        vectors = [self._memory, *self._tables.values()]
        rows = self._log.view(-1, len(vectors), self._row)[rank]
        chunks = []
        for pieces in self._pieces[rank]:
            pieces = [piece for piece in pieces if piece.parameter in self._group_of]
            parts = [self._part(piece, remembered(piece.parameter)) for piece in pieces]
            sizes = [piece.high - piece.low for piece in pieces]
            changed = [vector[piece.low : piece.high] for vector in vectors for piece in pieces]
            logs = [torch.split(row[: sum(sizes)], sizes) for row in rows]
            chunks.append(_LoopChunk(parts, changed, [part for log in logs for part in log]))
        return chunks

    def _part(self, piece: Piece, remembered: _Remembered) -> _LoopPart:
        number, low, high, _ = piece
        start = self._starts[number]
        tables = {name: table[low:high] for name, table in self._tables.items()}
        state = _state_of(tables, remembered)
        return _LoopPart(nn.Parameter(self._memory[low:high]), number, tables, state, slice(low - start, high - start))


def _state_of(tables: dict[str, torch.Tensor], remembered: _Remembered) -> State:
    return {**{name: tables[name] for name in remembered.tables}, **copy.deepcopy(remembered.values)}


def _in_tables(part: _LoopPart, state: State) -> State:
    """Move what the optimizer has made anew, in the first update of a parameter or in each, to the tables."""
    for name, value in state.items():
        own = part.tables.get(name)
        if not isinstance(value, torch.Tensor) or value is own:
            continue
        if own is not None:
            own.copy_(value)
            state[name] = own
        elif value.dim():
            raise _of_other_kind(name)
    return state


def _of_other_kind(name: str) -> ConfigError:
    why = f"the optimizer remembers {name!r}, which it would not with its present settings"
    return refusal(why, "optimizer-state", name=name)


def _table_names(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> list[str]:
    """What the optimizer remembers of each number."""
    found: set[str] = set()
    for group in optimizer.param_groups:
        p = nn.Parameter(torch.ones(2, dtype=dtype))
        twin = twin_of(optimizer, [{**settings_of(group), "params": [p]}])
        for _ in range(2):
            p.grad = torch.ones_like(p)
            step_with(twin)
        by_number = {name: v for name, v in twin.state[p].items() if isinstance(v, torch.Tensor) and v.dim()}
        if any(value.dtype != dtype for value in by_number.values()):
            raise refusal("the optimizer's state is of another type than the parameters", "state-dtype")
        found.update(by_number)
    return sorted(found)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """`ConfigError` unless parts of an update give the same as the whole."""
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    if any(vars(optimizer).get(name) for name in hooks):
        raise refusal("the optimizer has hooks on its step, which would see parts of parameters", "step-hooks")
    check_by_number(optimizer)
