"""An optimizer that steps with pieces of parameters, its state in memory that all workers share.

Here: `OptimizerShards`. While a View lasts, the groups of a worker's optimizer hold the pieces that the worker owns.
What the optimizer remembers of each number (momentum, squares) lies in tables as long as the parameters, of which each
worker writes its own part; what it remembers of a whole parameter, such as a count of steps, is the same for all pieces
of a group. `whole` gives the optimizer the form that it has without this layout, which is what checkpoints hold.

An update is made in chunks. Before each, what it changes is copied to a log, and the progress is noted where all
workers see it. If a worker dies in the middle, another one restores the chunk and makes the rest of the update
(`complete`).

Not here: gradients and parameters (`shared_model.py`), and who owns what (`shards.py`).
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from syncline.errors import ConfigError
from syncline.layouts.shards import Piece, chunks_of
from syncline.strategies.flat import views_of

_CHUNK_NUMBERS = 2**20
"""How many numbers are updated at a time: few enough that the log stays small, enough that calls are few."""
_DONE, _SAVED, _STEP = 0, 1, 2
"""Columns of the progress: how many chunks are updated, how many were copied to the log, and in which step."""

Allocate = Callable[[int, torch.dtype], torch.Tensor]
"""A zeroed tensor that all workers share; all of them call it together."""


class _Part(NamedTuple):
    """What the optimizer holds as a parameter: a piece, or a stand-in for a group of which this worker owns none."""

    parameter: nn.Parameter
    group: int
    where: slice


class _Chunk(NamedTuple):
    parts: list[_Part]
    changed: list[torch.Tensor]
    """What an update of the chunk changes."""
    log: list[torch.Tensor]
    """Where that is copied before."""


class OptimizerShards:
    """One worker's part of an optimizer of the `parameters` that lie in `flat`, and their gradients in `gradients`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        flat: torch.Tensor,
        gradients: torch.Tensor,
        pieces: Sequence[Sequence[Piece]],
        *,
        rank: int,
        allocate: Allocate,
    ) -> None:
        """`pieces` are those of every worker of the replica. All hold the same state, and call this together."""
        check_by_number(optimizer)
        self._optimizer, self._parameters, self._rank, self._allocate = optimizer, list(parameters), rank, allocate
        self._flat, self._gradients = flat, gradients
        places = {id(p): number for number, p in enumerate(self._parameters)}
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._group_of = {
            places[id(p)]: number for number, group in enumerate(self._groups) for p in group if id(p) in places
        }
        self._chunks = [chunks_of([p for p in own if p.parameter in self._group_of], _CHUNK_NUMBERS) for own in pieces]
        self._progress = allocate(3 * len(pieces), torch.int64).view(-1, 3).numpy()
        self._tables: dict[str, torch.Tensor] = {}
        self._log = torch.empty(0)
        self._scalars: list[dict[str, Any]] = [{} for _ in self._groups]
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Of each group, its settings and scalars before the last update."""
        self._is_split = False
        self._original: dict[Any, Any] | None = dict(optimizer.state)
        self._load()

    def confirm(self) -> None:
        """All workers have come this far: the tables are filled, and count from now on."""
        self._original = None

    @property
    def is_split(self) -> bool:
        """Whether the optimizer holds pieces, and not whole parameters."""
        return self._is_split

    @property
    def is_recoverable(self) -> bool:
        """Whether another worker can complete an update. In the first one, what the optimizer remembers is new."""
        return bool(self._log.numel())

    def update(self) -> None:
        """Step with what this worker owns."""
        self._before, progress = self._settings(), self._progress[self._rank]
        for number, chunk in enumerate(self._own):
            if chunk.log:
                torch._foreach_copy_(chunk.log, chunk.changed)
                progress[_SAVED] = number + 1
            self._step(self._optimizer, chunk.parts)
            progress[_DONE] = number + 1
        self._step(self._optimizer, self._stand_ins)
        if not self.is_recoverable:
            self._share_state()

    def begin_update(self, step: int) -> None:
        """Note that no chunk is updated yet; before any worker can begin to update."""
        self._progress[self._rank] = (0, 0, step)

    def complete(self, rank: int) -> None:
        """Make the rest of the update of a worker that has died in it, with the settings of this worker's last one."""
        done, saved = (int(self._progress[rank, column]) for column in (_DONE, _SAVED))
        optimizer, chunks = self._twin(), self._parts_of(rank)
        for number, chunk in enumerate(chunks):
            if number < done:
                continue
            if number < saved:
                torch._foreach_copy_(chunk.changed, chunk.log)
            elif chunk.log:
                torch._foreach_copy_(chunk.log, chunk.changed)
                self._progress[rank, _SAVED] = number + 1
            for part in chunk.parts:
                optimizer.state[part.parameter] = self._state_of(part, self._before[part.group][1])
            self._step(optimizer, chunk.parts)
            self._progress[rank, _DONE] = number + 1

    def ranks_to_complete(self, step: int) -> list[int]:
        """The workers that have not updated all of their chunks in a step that counts."""
        return [
            rank
            for rank, chunks in enumerate(self._chunks)
            if self._progress[rank, _STEP] == step and self._progress[rank, _DONE] < len(chunks)
        ]

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A context in which the optimizer holds whole parameters, as without this layout."""
        kept = dict(self._optimizer.state)
        self.leave()
        try:
            yield
        finally:
            self._optimizer.state.clear()
            self._optimizer.state.update(kept)
            _hold(self._optimizer, [part for chunk in self._own for part in chunk.parts] + self._stand_ins)
            self._is_split = True

    def leave(self) -> None:
        """Give the optimizer whole parameters for good. Their state stays in the shared memory."""
        if not self._is_split:
            return
        self._is_split = False
        for now, params in zip(self._optimizer.param_groups, self._groups, strict=True):
            now["params"] = list(params)
        if self._original is not None:
            self._optimizer.state.clear()
            self._optimizer.state.update(self._original)
            return
        scalars = [self._scalars_of(number) for number in range(len(self._groups))]
        views = {name: views_of(table, self._parameters) for name, table in self._tables.items()}
        state = self._optimizer.state
        state.clear()
        for number, p in enumerate(self._parameters):
            group = self._group_of.get(number)
            if group is not None and (views or scalars[group]):
                # Each parameter counts by itself again.
                state[p] = {**{name: view[number] for name, view in views.items()}, **copy.deepcopy(scalars[group])}

    def _load(self) -> None:
        """Take over the state that the optimizer has; worker 0 fills the tables."""
        state = self._optimizer.state
        of_parameters = [state.get(p) or {} for p in self._parameters]
        known = next((s for p, s in zip(self._parameters, of_parameters, strict=True) if s and p.dim()), {})
        by_number = {name: value for name, value in known.items() if isinstance(value, torch.Tensor) and value.dim()}
        for number in range(len(self._groups)):
            found = [of_parameters[n] for n, group in self._group_of.items() if group == number and of_parameters[n]]
            self._scalars[number] = {k: v for k, v in found[0].items() if k not in by_number} if found else {}
            _check_trained_together(self._scalars[number], found, by_number)
        if known:
            self._make_tables({name: value.dtype for name, value in by_number.items()})
        if self._rank == 0:
            for name, table in self._tables.items():
                for view, own in zip(views_of(table, self._parameters), of_parameters, strict=True):
                    if name in own:
                        view.copy_(own[name])
        self._split()

    def _make_tables(self, dtypes: dict[str, torch.dtype]) -> None:
        self._tables = {name: self._allocate(self._flat.numel(), dtype) for name, dtype in dtypes.items()}
        longest = max((sum(p.high - p.low for p in chunk) for own in self._chunks for chunk in own), default=0)
        rows = 1 + len(dtypes)
        # Bytes, because the tables may be of several types.
        self._row_bytes = 8 * max(1, longest)
        self._log = self._allocate(len(self._chunks) * rows * self._row_bytes, torch.uint8)

    def _split(self) -> None:
        """Give the optimizer the pieces that this worker owns."""
        self._own = self._parts_of(self._rank)
        owned = {part.group for chunk in self._own for part in chunk.parts}
        dtype = self._flat.dtype  # a worker that owns nothing learns from stand-ins what types the tables have
        self._stand_ins = [
            _Part(_with_gradient(torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=dtype)), group, slice(0, 1))
            for group in sorted(set(self._group_of.values()) - owned)
        ]
        parts = [part for chunk in self._own for part in chunk.parts] + self._stand_ins
        self._optimizer.state.clear()
        for part in parts:
            if state := self._state_of(part, self._scalars[part.group]):
                self._optimizer.state[part.parameter] = state
        _hold(self._optimizer, parts)
        self._is_split = True

    def _parts_of(self, rank: int) -> list[_Chunk]:
        chunks = []
        for pieces in self._chunks[rank]:
            wheres = [slice(piece.low, piece.high) for piece in pieces]
            gradients = [self._gradients[p.gradient : p.gradient + p.high - p.low] for p in pieces]
            parts = [
                _Part(_with_gradient(self._flat[where], gradient), self._group_of[piece.parameter], where)
                for piece, where, gradient in zip(pieces, wheres, gradients, strict=True)
            ]
            changed, log = [], []
            if self.is_recoverable:
                for row, vector in enumerate([self._flat, *self._tables.values()]):
                    start = (rank * (1 + len(self._tables)) + row) * self._row_bytes
                    kept = self._log[start : start + self._row_bytes].view(vector.dtype)
                    offset = 0
                    for where in wheres:
                        size = where.stop - where.start
                        changed.append(vector[where])
                        log.append(kept[offset : offset + size])
                        offset += size
            chunks.append(_Chunk(parts, changed, log))
        return chunks

    def _state_of(self, part: _Part, scalars: dict[str, Any]) -> dict[str, Any]:
        if not self._tables and not scalars:
            return {}
        is_piece = part.parameter.untyped_storage().data_ptr() == self._flat.untyped_storage().data_ptr()
        by_number = {
            name: table[part.where] if is_piece else torch.zeros(1, dtype=table.dtype)
            for name, table in self._tables.items()
        }
        return {**by_number, **copy.deepcopy(scalars)}

    def _share_state(self) -> None:
        """After the first update: move what the optimizer remembers to shared memory; all workers do so together."""
        parts = [part for chunk in self._own for part in chunk.parts] + self._stand_ins
        states = {id(part.parameter): dict(self._optimizer.state.get(part.parameter) or {}) for part in parts}
        known = next((state for state in states.values() if state), {})
        self._scalars = [self._scalars_of(number) for number in range(len(self._groups))]
        self._make_tables({k: v.dtype for k, v in known.items() if isinstance(v, torch.Tensor) and v.dim()})
        for part in parts[: len(parts) - len(self._stand_ins)]:
            for name, table in self._tables.items():
                table[part.where] = states[id(part.parameter)][name]
        self._split()

    def _scalars_of(self, group: int) -> dict[str, Any]:
        """What the optimizer remembers of whole parameters of a group."""
        parts = [part for chunk in self._own for part in chunk.parts] + self._stand_ins
        state = next((self._optimizer.state.get(part.parameter) for part in parts if part.group == group), None) or {}
        return {name: value for name, value in state.items() if not (isinstance(value, torch.Tensor) and value.dim())}

    def _settings(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Of each group, its settings and its scalars, as they are now."""
        return [
            ({k: v for k, v in group.items() if k != "params"}, copy.deepcopy(self._scalars_of(number)))
            for number, group in enumerate(self._optimizer.param_groups)
        ]

    def _twin(self) -> torch.optim.Optimizer:
        """An optimizer with the settings of this worker's last update, and no parameters."""
        return twin_of(self._optimizer, [{**settings, "params": []} for settings, _ in self._before])

    def _step(self, optimizer: torch.optim.Optimizer, parts: Sequence[_Part]) -> None:
        if not parts:
            return
        _hold(optimizer, parts)
        step_with(optimizer)


def _check_trained_together(scalars: dict[str, Any], states: list[dict[str, Any]], by_number: Container[str]) -> None:
    """Parameters of a group that were not always trained together have counted different steps."""
    for state in states:
        others = {name: value for name, value in state.items() if name not in by_number}
        if any(bool(others.get(name) != value) for name, value in scalars.items()):
            raise ConfigError(
                "This layout needs parameters that have all been trained from the beginning; some of this model were "
                "frozen for a time. Use --layout replicated.",
                code="layout", layout="sharded", reason="frozen", nearest="replicated",
            )  # fmt: skip


def _hold(optimizer: torch.optim.Optimizer, parts: Sequence[_Part]) -> None:
    """Let the groups of `optimizer` hold these parts."""
    for number, group in enumerate(optimizer.param_groups):
        group["params"] = [part.parameter for part in parts if part.group == number]


def twin_of(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer of the same kind with other parameters. `copy.copy` would leave out what a subclass has added."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.param_groups, twin.state = groups, defaultdict(dict)
    return twin


def step_with(optimizer: torch.optim.Optimizer) -> None:
    """Step by the class's own method: a scheduler may have replaced the object's, to count the calls."""
    type(optimizer).step(optimizer)


def check_by_number(optimizer: torch.optim.Optimizer) -> None:
    """`ConfigError` unless the optimizer treats each number by itself, so that parts give the same as the whole."""
    if all(_is_by_number(optimizer, settings_of(group)) for group in optimizer.param_groups):
        return
    name = type(optimizer).__name__
    raise ConfigError(
        f"This layout updates parts of parameters, and {name} looks at whole ones: the result would differ. "
        "Use an optimizer that treats each number by itself, such as SGD or AdamW, or --layout replicated.",
        code="layout", layout="sharded", reason="optimizer", optimizer=name, nearest="replicated",
    )  # fmt: skip


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def _is_by_number(optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> bool:
    """Whether two workers, one of which updates two parts one after another, do what one does with the whole.

    What the optimizer remembers of whole parameters must not depend on the numbers in them, either.
    """
    weight, *gradients = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))

    def trained(*parts: slice, shape: tuple[int, ...] = (-1,)) -> tuple[torch.Tensor, list[dict[str, Any]]]:
        parameters = [nn.Parameter(weight[part].clone().view(shape)) for part in parts]
        of_steps = [[gradient[part].view(shape) for part in parts] for gradient in gradients]
        return _trained(optimizer, settings, parameters, of_steps)

    try:
        whole, remembered = trained(slice(0, 12), shape=(4, 3))
        (first, of_first), (second, of_second) = trained(slice(0, 3), slice(3, 5)), trained(slice(5, 12))
        is_same = torch.allclose(whole, torch.cat([first, second]), rtol=1e-5, atol=1e-7)
        return is_same and all(state == remembered[0] for state in of_first + of_second)
    except (RuntimeError, TypeError, ValueError, KeyError):
        return False


def _trained(
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    parameters: list[nn.Parameter],
    steps: list[list[torch.Tensor]],
) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """The parameters after some steps, each updated by itself, and what is remembered of each as a whole."""
    twin = twin_of(optimizer, [{**settings, "params": []}])
    for gradients in steps:
        for p, gradient in zip(parameters, gradients, strict=True):
            twin.param_groups[0]["params"], p.grad = [p], gradient
            step_with(twin)
    remembered = [
        {name: value for name, value in twin.state[p].items() if not (isinstance(value, torch.Tensor) and value.dim())}
        for p in parameters
    ]
    return torch.cat([p.detach().flatten() for p in parameters]), remembered


def _with_gradient(values: torch.Tensor, gradient: torch.Tensor) -> nn.Parameter:
    made = nn.Parameter(values)
    made.grad = gradient
    return made
