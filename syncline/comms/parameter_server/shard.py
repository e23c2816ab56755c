"""One server's part of the parameters: what it holds, and what becomes of what workers send. No sockets.

Three rules, one for a whole training:

    apply      each gradient on arrival, as one step of the optimiser: asynchronous SGD, as in DistBelief (Dean et al.
               2012) and, with the gate, in stale-synchronous training (Ho et al. 2013)
    collect    all workers' gradients of one step together: synchronous. Summed in rank order with the operations of
               `SharedMemory.sum_`, so that parameters come out with the same bits as with an all-reduce
    elastic    no gradients: workers and the centre pull at each other (EASGD, Zhang et al. 2015)

Here: parameters, optimiser, version, clocks, and which requests were met already. Not here: who waits for what
(`server.py`), how bytes become tensors (`connection.py`, `server.py`).

`version` counts the updates that were applied; its difference between a worker's reading and the applying of what it
computed from that is the update's staleness (`syncline.algorithms.staleness`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from syncline.algorithms.outer import elastic
from syncline.algorithms.staleness import may_proceed, record, staleness
from syncline.comms.parameter_server.pieces import Piece, Span, overlap
from syncline.comms.parameter_server.shell import Settings, change_settings, cut_state, read_shell
from syncline.errors import ConfigError

__all__ = ["RULES", "Collected", "Gradient", "Rule", "Shard"]

Rule = Literal["apply", "collect", "elastic"]
RULES: Final = ("apply", "collect", "elastic")

_CHUNK_ELEMENTS = 32 * 1024  # a piece of this size and its partners stay in a core's own cache


@dataclass(frozen=True)
class Gradient:
    """A worker's gradient for one part, as it travelled. The memory is the shard's to overwrite."""

    values: Tensor
    """Flat float32: for each piece, in order, its named rows, or else what the spans have of it."""
    rows: Mapping[int, Tensor] = field(default_factory=dict)
    """By index of the piece, the rows that are given (int64, each once); other rows of it are untouched."""
    spans: Sequence[Span] | None = None
    """The ranges of the part that are given, ascending and apart; None is all of it."""

    @property
    def is_whole(self) -> bool:
        """Every value of the part is there, in order."""
        return not self.rows and self.spans is None


class Collected(NamedTuple):
    """A step of all workers: the sum of their riders, and whether the parameters moved."""

    riders: Tensor
    is_applied: bool


class _Held(NamedTuple):
    gradient: Gradient
    weight: float
    riders: Tensor
    clip_norm: float | None


class Shard:
    """The part of the parameters that consists of `pieces`, starting from `values` (flat float32, taken over)."""

    def __init__(
        self,
        values: Tensor,
        pieces: Sequence[Piece],
        *,
        shell: bytes,
        groups: Sequence[Sequence[int]],
        rule: Rule,
        size: int,
        rate: float = 0.0,
        clock: int = 0,
    ) -> None:
        self.flat = values
        self.pieces = list(pieces)
        self.rule: Rule = rule
        self.size = size
        self.version = 0
        self.clocks = dict.fromkeys(range(size), clock)
        self.staleness: dict[int, int] = {}
        """How many updates had each staleness."""
        self.reached: dict[int, int] = dict(self.clocks)
        """Of which worker how many steps are in the parameters; also of those who are gone."""
        self._start = clock
        self._elastic = elastic(rate) if rule == "elastic" else None
        self._parameters = [nn.Parameter(values[slice(*p.span)].view(p.shape)) for p in pieces]
        of_parameter = {p.parameter: mine for p, mine in zip(pieces, self._parameters, strict=True)}
        members = [[of_parameter[i] for i in group if i in of_parameter] for group in groups]
        self._optimizer, self._groups = read_shell(shell, members)
        self._settings: dict[int, Settings] = {}
        self._met: dict[int, tuple[int, int]] = {}  # rank -> its last request that changed something, what came of it
        self._held: dict[int, _Held] = {}
        self._collecting = clock
        self._collected = Collected(torch.zeros(0), False)
        self._total = torch.zeros_like(values) if rule == "collect" else None

    # Who takes part

    def join(self, rank: int, clock: int) -> int:
        """A worker takes the place of one that was lost. Its clock, which holds up nobody: at least the slowest's."""
        self.clocks[rank] = max([clock, *([min(self.clocks.values())] if self.clocks else [])])
        return self.clocks[rank]

    def leave(self, rank: int) -> None:
        """A worker is done or gone: nobody waits for its clock any more."""
        self.clocks.pop(rank, None)
        self._held.pop(rank, None)

    def restart(self, size: int, clock: int) -> None:
        """Other workers go on with what is here, from step `clock`."""
        self.size, self._start, self._collecting = size, clock, clock
        self.clocks = dict.fromkeys(range(size), clock)
        self.reached = dict(self.clocks)
        self._settings, self._met, self._held = {}, {}, {}

    def withdraw(self, rank: int) -> None:
        """A worker no longer waits for its gradient to be collected."""
        self._held.pop(rank, None)

    def forget_requests(self, rank: int) -> None:
        """A new life of a worker counts its requests anew."""
        self._met.pop(rank, None)

    # Clocks

    @property
    def slowest(self) -> int:
        """The slowest worker's clock; with nobody left, where all started."""
        return min(self.clocks.values(), default=self._start)

    def advance(self, rank: int, clock: int) -> None:
        """A worker has finished `clock` steps."""
        if rank in self.clocks:
            self.clocks[rank] = max(self.clocks[rank], clock)

    def may_proceed(self, clock: int, bound: int) -> bool:
        """Whether a worker that has finished `clock` steps may begin another."""
        return may_proceed(clock, self.clocks.values(), bound)

    def has_met(self, rank: int, sequence: int) -> bool:
        """Whether this worker's requests up to `sequence` have had their effect."""
        return sequence <= self._met.get(rank, (0, 0))[0]

    # The rules

    def apply(
        self,
        rank: int,
        sequence: int,
        gradient: Gradient,
        *,
        weight: float,
        clock: int,
        read_version: int,
        settings: Settings | None = None,
    ) -> int:
        """Rule "apply": one step with `weight` times the gradient. Its staleness; -1 if it has nothing for this part.

        A sequence that was met before changes nothing and has the same answer again.
        """
        self._check_rule("apply")
        if self.has_met(rank, sequence):
            return self._met[rank][1]
        self._learn(rank, settings)
        is_for_us = gradient.is_whole or gradient.values.numel() > 0 or bool(gradient.rows)
        age = -1
        if is_for_us:
            age = staleness(self.version, read_version)
            if weight != 1.0:
                gradient.values.mul_(weight)
            self._set_gradients(gradient)
            self._step(rank)
            self.staleness = record(self.staleness, age)
        self._met[rank] = (sequence, age)
        self.advance(rank, clock)
        self.reached[rank] = max(self.reached.get(rank, 0), clock)
        return age

    def collect(
        self,
        rank: int,
        sequence: int,
        gradient: Gradient,
        *,
        weight: float,
        clock: int,
        riders: Sequence[float] = (),
        clip_norm: float | None = None,
        settings: Settings | None = None,
    ) -> Collected | None:
        """Rule "collect": None until every worker's gradient for `clock` is there; then one step with their sum.

        If the first of the summed riders, the loss, is not finite, nothing moves.
        """
        self._check_rule("collect")
        if self.has_met(rank, sequence):
            return self._collected
        if gradient.spans is not None:
            raise ValueError("Rule 'collect' takes whole gradients or rows of them, not ranges.")
        if self._held and clock != self._collecting:
            others = ", ".join(map(str, sorted(self._held)))
            raise ValueError(
                f"Worker {rank} sent its gradient of step {clock}, but those of step {self._collecting} are being "
                f"collected (there: workers {others}). All workers must make the same steps."
            )
        self._learn(rank, settings)
        self._collecting = clock
        self._held[rank] = _Held(gradient, weight, torch.tensor(list(riders), dtype=torch.float32), clip_norm)
        if len(self._held) < self.size:
            return None
        held = [self._held[r] for r in range(self.size)]
        riders_sum = _weighted_sum([h.riders for h in held], [h.weight for h in held])
        is_sound = not riders_sum.numel() or math.isfinite(riders_sum[0].item())
        if is_sound:
            self._sum_gradients(held)
            clip_norms = {h.clip_norm for h in held}
            if len(clip_norms) > 1:
                raise ValueError(f"The workers clip at different norms: {sorted(map(str, clip_norms))}.")
            if (limit := clip_norms.pop()) is not None:
                torch.nn.utils.clip_grad_norm_([p for p in self._parameters if p.grad is not None], limit)
            self._step(0)
        self._collected = Collected(riders_sum, is_sound)
        self._held.clear()
        for r in range(self.size):
            self.advance(r, clock)
            self.reached[r] = clock
        return self._collected

    def met_collect(self, rank: int, sequence: int) -> None:
        """This worker's gradient was part of the last step that was collected."""
        self._met[rank] = (sequence, 0)

    def exchange(self, rank: int, sequence: int, worker: Tensor, clock: int = 0) -> None:
        """Rule "elastic": move the centre, and overwrite `worker`, where the worker is, by how far it is to move.

        d = rate (x_k - x~) from the values before either changed; x~ <- x~ + d here, x_k <- x_k - d at the worker.
        """
        self._check_rule("elastic")
        assert self._elastic is not None
        delta = worker.sub_(self.flat)
        centre, _ = self._elastic.step(self.flat, delta, {})
        self.flat.copy_(centre)
        delta.mul_(self._elastic.rate)
        self.version += 1
        self.reached[rank] = max(self.reached.get(rank, 0), clock)
        self._met[rank] = (sequence, 0)

    # Checkpoints

    def state(self) -> dict[str, Any]:
        """What the optimiser remembers of each piece, the version and the clocks; the parameters are not in it.

        Shares memory with the shard: save it before anything else is applied.
        """
        entries = []
        for piece, parameter in zip(self.pieces, self._parameters, strict=True):
            if state := self._optimizer.state.get(parameter):
                entry = {"parameter": piece.parameter, "first_row": piece.first_row, "rows": piece.rows}
                entries.append({**entry, "state": dict(state)})
        return {"version": self.version, "clocks": dict(self.clocks), "pieces": entries}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up a `state`, of this or other pieces of the same parameters. The clocks stay: all start together."""
        self.version = int(state["version"])
        of_piece = {(e["parameter"], e["first_row"]): e["state"] for e in cut_state(state["pieces"], self.pieces)}
        in_groups = {id(p) for group in self._groups for p in group["params"]}
        for piece, parameter in zip(self.pieces, self._parameters, strict=True):
            found = of_piece.get((piece.parameter, piece.first_row))
            if found and id(parameter) in in_groups:
                self._optimizer.state[parameter] = {
                    k: v.view(piece.shape) if isinstance(v, Tensor) and v.numel() == piece.numel and v.dim() else v
                    for k, v in found.items()
                }

    # How a step is made

    def _check_rule(self, rule: Rule) -> None:
        if rule != self.rule:
            raise ConfigError(
                f"These parameters are trained by rule '{self.rule}', but a worker asked for rule '{rule}'. "
                "All workers must call begin with the rule that they use."
            )

    def _learn(self, rank: int, settings: Settings | None) -> None:
        """Remember the worker's settings: it sends them only when its schedule has changed them."""
        if settings is not None:
            self._settings[rank] = settings

    def _step(self, rank: int) -> None:
        """One step with the gradients that are set, by the settings of worker `rank`."""
        if rank in self._settings:
            change_settings(self._groups, self._settings[rank])
        if self._optimizer.param_groups:
            self._optimizer.step()
        self.version += 1

    def _set_gradients(self, gradient: Gradient) -> None:
        taken = 0
        values = gradient.values
        for index, (piece, parameter) in enumerate(zip(self.pieces, self._parameters, strict=True)):
            rows = gradient.rows.get(index)
            if rows is not None:
                count = len(rows) * piece.row_numel
                parameter.grad = _of_rows(piece, rows, values[taken : taken + count])
                taken += count
                continue
            spans = [piece.span] if gradient.spans is None else _within(gradient.spans, piece.span)
            count = sum(high - low for low, high in spans)
            if not spans:
                parameter.grad = None  # as torch has it for a parameter that took no part
            elif count == piece.numel:
                parameter.grad = _as_sparse(piece, values[taken : taken + count].view(piece.shape))
            else:
                dense = torch.zeros(piece.numel)
                for low, high in spans:
                    dense[low - piece.offset : high - piece.offset] = values[taken : taken + high - low]
                    taken += high - low
                parameter.grad = _as_sparse(piece, dense.view(piece.shape))
                continue
            taken += count
        if taken != values.numel():
            raise ValueError(f"A gradient of {taken} values was announced, but {values.numel()} came.")

    def _sum_gradients(self, held: Sequence[_Held]) -> None:
        assert self._total is not None
        for h in held:
            if h.gradient.is_whole and h.gradient.values.numel() != self.flat.numel():
                raise ValueError(
                    f"This part has {self.flat.numel()} values, but a gradient has {h.gradient.values.numel()}."
                )
        terms = [h.gradient.values if h.gradient.is_whole else self._dense(h.gradient) for h in held]
        weights = [h.weight for h in held]
        for start in range(0, self.flat.numel(), _CHUNK_ELEMENTS):
            chunk = slice(start, start + _CHUNK_ELEMENTS)
            self._total[chunk] = _weighted_sum([t[chunk] for t in terms], weights)
        for index, (piece, parameter) in enumerate(zip(self.pieces, self._parameters, strict=True)):
            total = self._total[slice(*piece.span)].view(piece.shape)
            rows = [h.gradient.rows.get(index) for h in held]
            known = [r for r in rows if r is not None]
            if piece.is_sparse and len(known) == len(rows):
                touched = torch.cat(known).unique()  # type: ignore[no-untyped-call]  # torch gives it no types
                parameter.grad = _of_rows(piece, touched, total[touched].view(-1))
            else:
                parameter.grad = _as_sparse(piece, total)

    def _dense(self, gradient: Gradient) -> Tensor:
        """Zeros where nothing came."""
        dense = torch.zeros_like(self.flat)
        taken = 0
        for index, piece in enumerate(self.pieces):
            mine = dense[slice(*piece.span)]
            rows = gradient.rows.get(index)
            count = piece.numel if rows is None else len(rows) * piece.row_numel
            came = gradient.values[taken : taken + count]
            taken += count
            if rows is None:
                mine.copy_(came)
            else:
                mine.view(piece.rows, -1).index_copy_(0, rows, came.view(-1, piece.row_numel))
        return dense


def _weighted_sum(terms: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = terms[0] * weights[0]
    for term, weight in zip(terms[1:], weights[1:], strict=True):
        total.add_(term, alpha=weight)
    return total


def _of_rows(piece: Piece, rows: Tensor, values: Tensor) -> Tensor:
    """The gradient of a piece of which only some rows were touched."""
    shape = (len(rows), *piece.shape[1:])
    if piece.is_sparse:
        return torch.sparse_coo_tensor(
            rows.unsqueeze(0), values.view(shape), piece.shape, check_invariants=True, is_coalesced=True
        )
    return torch.zeros(piece.shape).index_copy_(0, rows, values.view(shape))


def _as_sparse(piece: Piece, gradient: Tensor) -> Tensor:
    """What a piece's optimiser expects: for sparse ones, a sparse gradient of all rows."""
    return _of_rows(piece, torch.arange(piece.rows), gradient.reshape(-1)) if piece.is_sparse else gradient


def _within(spans: Sequence[Span], whole: Span) -> list[Span]:
    return [common for span in spans if (common := overlap(span, whole))]
