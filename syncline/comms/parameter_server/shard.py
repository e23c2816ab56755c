"""One server's part of the parameters, and how it applies what workers send. No sockets.

Three rules, one for a whole training run:

    apply      each gradient on arrival, as one optimizer step: asynchronous SGD, as in DistBelief (Dean et al. 2012)
               and, with the gate, in stale-synchronous training (Ho et al. 2013)
    collect    all workers' gradients of one step together: synchronous. Summed in rank order with the operations of
               `SharedMemory.all_reduce_`, so the parameters have the same bits as with an all-reduce
    elastic    no gradients: workers and the center move toward each other (EASGD, Zhang et al. 2015)

Here: parameters, optimizer, version, the rules, and the workers' clocks. Not here: gradients as they travel
(`gradient.py`), which workers wait for a reply (`server.py`).

`version` counts the updates applied. The staleness of an update is how far `version` has moved between the worker's
read and the update (`syncline.comms.staleness`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from syncline.comms.parameter_server.chunks import ParameterChunk
from syncline.comms.parameter_server.gradient import (
    Gradient,
    as_sparse,
    dense_gradient,
    gradient_of_rows,
    set_gradients,
)
from syncline.comms.parameter_server.optimizer import (
    Hyperparameters,
    load_optimizer,
    reshard_state,
    set_hyperparameters,
)
from syncline.comms.staleness import may_proceed, record, staleness
from syncline.compute.outer import elastic
from syncline.errors import ConfigError

Rule = Literal["apply", "collect", "elastic"]
RULES: Final = ("apply", "collect", "elastic")

_BLOCK_ELEMENTS = 32 * 1024  # a block of each worker's gradient fits into a core's own cache


class Collected(NamedTuple):
    """A step of all workers: the sum of their piggybacked values, and whether it was applied."""

    piggybacked: Tensor
    is_applied: bool


class _HeldGradient(NamedTuple):
    gradient: Gradient
    weight: float
    piggybacked: Tensor
    clip_norm: float | None


class Shard:
    """The part of the parameters that consists of `chunks`, with initial `values` (flat float32, owned from now on).

    `optimizer` is a pickled one (`dump_optimizer`), `groups` the parameters' indices in each of its groups.
    """

    def __init__(
        self,
        values: Tensor,
        chunks: Sequence[ParameterChunk],
        *,
        optimizer: bytes,
        groups: Sequence[Sequence[int]],
        rule: Rule,
        size: int,
        rate: float = 0.0,
        clock: int = 0,
    ) -> None:
        self.flat = values
        self.chunks = list(chunks)
        self.rule: Rule = rule
        self.size = size
        self.version = 0
        self.progress = WorkerProgress(size, clock)
        self.staleness: dict[int, int] = {}
        """How many updates had each staleness."""
        self._elastic = elastic(rate) if rule == "elastic" else None
        self._parameters = [nn.Parameter(values[slice(*c.span)].view(c.shape)) for c in chunks]
        of_parameter = {c.parameter: mine for c, mine in zip(chunks, self._parameters, strict=True)}
        members = [[of_parameter[i] for i in group if i in of_parameter] for group in groups]
        self._optimizer, self._groups = load_optimizer(optimizer, members)
        self._hyperparameters: dict[int, Hyperparameters] = {}  # by rank
        self._held: dict[int, _HeldGradient] = {}
        self._collecting = clock
        self._collected = Collected(torch.zeros(0), False)
        self._total = torch.zeros_like(values) if rule == "collect" else None

    def restart(self, size: int, clock: int) -> None:
        """Keep the parameters and the optimizer for other workers, who start at step `clock`."""
        self.size, self._collecting = size, clock
        self.progress = WorkerProgress(size, clock)
        self._hyperparameters, self._held = {}, {}

    def leave(self, rank: int) -> None:
        """A worker has finished or failed."""
        self.progress.leave(rank)
        self._held.pop(rank, None)

    def withdraw(self, rank: int) -> None:
        """Drop a gradient that waits to be collected."""
        self._held.pop(rank, None)

    def apply(
        self,
        rank: int,
        sequence: int,
        gradient: Gradient,
        *,
        weight: float,
        clock: int,
        read_version: int,
        hyperparameters: Hyperparameters | None = None,
    ) -> int:
        """Rule "apply": one step with `weight` times the gradient. Returns its staleness; -1 if it has no values here.

        A request that was applied before changes nothing and returns the same again.
        """
        self._check_rule("apply")
        if self.progress.has_applied(rank, sequence):
            return self.progress.last_staleness(rank)
        self._remember(rank, hyperparameters)
        is_for_us = gradient.is_whole or gradient.values.numel() > 0 or bool(gradient.rows)
        age = -1
        if is_for_us:
            age = staleness(self.version, read_version)
            if weight != 1.0:
                gradient.values.mul_(weight)
            set_gradients(gradient, self.chunks, self._parameters)
            self._step(rank)
            self.staleness = record(self.staleness, age)
        self.progress.record_request(rank, sequence, age)
        self.progress.advance(rank, clock)
        self.progress.record_steps(rank, clock)
        return age

    def collect(
        self,
        rank: int,
        sequence: int,
        gradient: Gradient,
        *,
        weight: float,
        clock: int,
        piggybacked: Sequence[float] = (),
        clip_norm: float | None = None,
        hyperparameters: Hyperparameters | None = None,
    ) -> Collected | None:
        """Rule "collect": None until every worker's gradient of step `clock` has arrived; then one step with their sum.

        If the first of the summed piggybacked values, the loss, is not finite, nothing is applied.
        """
        self._check_rule("collect")
        if self.progress.has_applied(rank, sequence):
            return self._collected
        if gradient.spans is not None:
            raise ValueError("Rule 'collect' takes whole gradients or rows of them, not ranges.")
        if self._held and clock != self._collecting:
            others = ", ".join(map(str, sorted(self._held)))
            raise ValueError(
                f"The worker of rank {rank} sent its gradient of step {clock}, but the server is collecting step "
                f"{self._collecting} (received from ranks {others}). All workers must make the same steps."
            )
        self._remember(rank, hyperparameters)
        self._collecting = clock
        self._held[rank] = _HeldGradient(
            gradient, weight, torch.tensor(list(piggybacked), dtype=torch.float32), clip_norm
        )
        if len(self._held) < self.size:
            return None
        held = [self._held[r] for r in range(self.size)]
        piggybacked_sum = _weighted_sum([h.piggybacked for h in held], [h.weight for h in held])
        is_finite = not piggybacked_sum.numel() or math.isfinite(piggybacked_sum[0].item())
        if is_finite:
            self._sum_gradients(held)
            clip_norms = {h.clip_norm for h in held}
            if len(clip_norms) > 1:
                raise ValueError(f"The workers clip at different norms: {sorted(map(str, clip_norms))}.")
            if (limit := clip_norms.pop()) is not None:
                torch.nn.utils.clip_grad_norm_([p for p in self._parameters if p.grad is not None], limit)
            self._step(0)
        self._collected = Collected(piggybacked_sum, is_finite)
        self._held.clear()
        for r in range(self.size):
            self.progress.advance(r, clock)
            self.progress.record_steps(r, clock)
        return self._collected

    def exchange(self, rank: int, sequence: int, worker: Tensor, clock: int = 0) -> None:
        """Rule "elastic": move the center, and overwrite `worker`, the worker's values, by how far it moves.

        d = rate (x_k - x~) from the values before either changed; x~ <- x~ + d here, x_k <- x_k - d at the worker.
        """
        self._check_rule("elastic")
        assert self._elastic is not None
        delta = worker.sub_(self.flat)
        center, _ = self._elastic.step(self.flat, delta, {})
        self.flat.copy_(center)
        delta.mul_(self._elastic.rate)
        self.version += 1
        self.progress.record_steps(rank, clock)
        self.progress.record_request(rank, sequence)

    # Checkpoints

    def state(self) -> dict[str, Any]:
        """The optimizer's state of each chunk, the version and the clocks, without the parameters.

        Shares memory with the shard: save it before the next update.
        """
        entries = []
        for chunk, parameter in zip(self.chunks, self._parameters, strict=True):
            if state := self._optimizer.state.get(parameter):
                entry = {"parameter": chunk.parameter, "first_row": chunk.first_row, "rows": chunk.rows}
                entries.append({**entry, "state": dict(state)})
        return {"version": self.version, "clocks": dict(self.progress.clocks), "chunks": entries}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a `state`, of these or other chunks of the same parameters. The clocks stay: all start together."""
        self.version = int(state["version"])
        of_chunk = {(e["parameter"], e["first_row"]): e["state"] for e in reshard_state(state["chunks"], self.chunks)}
        in_groups = {id(p) for group in self._groups for p in group["params"]}
        for chunk, parameter in zip(self.chunks, self._parameters, strict=True):
            found = of_chunk.get((chunk.parameter, chunk.first_row))
            if found and id(parameter) in in_groups:
                self._optimizer.state[parameter] = {
                    k: v.view(chunk.shape) if isinstance(v, Tensor) and v.numel() == chunk.numel and v.dim() else v
                    for k, v in found.items()
                }

    # How a step is made

    def _check_rule(self, rule: Rule) -> None:
        if rule != self.rule:
            raise ConfigError(
                f"This server trains by rule '{self.rule}', but a worker sent a request for rule '{rule}'. All workers "
                "must call begin with the rule that they use.",
                code="wrong-rule",
                rule=self.rule,
                requested=rule,
            )

    def _remember(self, rank: int, hyperparameters: Hyperparameters | None) -> None:
        """A worker sends its hyperparameters only when its schedule has changed them."""
        if hyperparameters is not None:
            self._hyperparameters[rank] = hyperparameters

    def _step(self, rank: int) -> None:
        """One step with the gradients that are set, with the hyperparameters of this worker."""
        if rank in self._hyperparameters:
            set_hyperparameters(self._groups, self._hyperparameters[rank])
        if self._optimizer.param_groups:
            self._optimizer.step()
        self.version += 1

    def _sum_gradients(self, held: Sequence[_HeldGradient]) -> None:
        assert self._total is not None
        numel = self.flat.numel()
        for h in held:
            if h.gradient.is_whole and h.gradient.values.numel() != numel:
                raise ValueError(f"This shard has {numel} values, but a gradient has {h.gradient.values.numel()}.")
        terms = [
            h.gradient.values if h.gradient.is_whole else dense_gradient(h.gradient, self.chunks, numel) for h in held
        ]
        weights = [h.weight for h in held]
        for start in range(0, numel, _BLOCK_ELEMENTS):
            block = slice(start, start + _BLOCK_ELEMENTS)
            self._total[block] = _weighted_sum([t[block] for t in terms], weights)
        for index, (chunk, parameter) in enumerate(zip(self.chunks, self._parameters, strict=True)):
            total = self._total[slice(*chunk.span)].view(chunk.shape)
            rows = [h.gradient.rows.get(index) for h in held]
            known = [r for r in rows if r is not None]
            if chunk.is_sparse and len(known) == len(rows):
                touched = torch.cat(known).unique()  # type: ignore[no-untyped-call]  # torch gives it no types
                parameter.grad = gradient_of_rows(chunk, touched, total[touched].view(-1))
            else:
                parameter.grad = as_sparse(chunk, total)


def _weighted_sum(terms: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = terms[0] * weights[0]
    for term, weight in zip(terms[1:], weights[1:], strict=True):
        total.add_(term, alpha=weight)
    return total


class WorkerProgress:
    """The clocks of `size` workers, which all start at `clock`."""

    def __init__(self, size: int, clock: int) -> None:
        self.clocks = dict.fromkeys(range(size), clock)
        """How many steps each member has finished."""
        self.applied_steps = dict(self.clocks)
        """How many steps of each worker the parameters contain; failed workers included."""
        self._start = clock
        self._requests: dict[int, tuple[int, int]] = {}  # rank -> its last applied request, that update's staleness

    @property
    def slowest(self) -> int:
        """The slowest worker's clock; where all started if no worker is left."""
        return min(self.clocks.values(), default=self._start)

    def join(self, rank: int, clock: int) -> int:
        """Add a replacement. Returns its clock: at least the slowest's, so that no worker has to wait for it."""
        self.clocks[rank] = max([clock, *([min(self.clocks.values())] if self.clocks else [])])
        return self.clocks[rank]

    def leave(self, rank: int) -> None:
        """Remove a worker that has finished or failed: its clock holds up no other worker."""
        self.clocks.pop(rank, None)

    def advance(self, rank: int, clock: int) -> None:
        """A worker has finished `clock` steps."""
        if rank in self.clocks:
            self.clocks[rank] = max(self.clocks[rank], clock)

    def may_proceed(self, clock: int, bound: int) -> bool:
        """Whether a worker that has finished `clock` steps may begin another."""
        return may_proceed(clock, self.clocks.values(), bound)

    def record_request(self, rank: int, sequence: int, staleness: int = 0) -> None:
        """The worker's request `sequence` was applied."""
        self._requests[rank] = (sequence, staleness)

    def record_steps(self, rank: int, clock: int) -> None:
        """The parameters contain the worker's first `clock` steps."""
        self.applied_steps[rank] = max(self.applied_steps.get(rank, 0), clock)

    def has_applied(self, rank: int, sequence: int) -> bool:
        """Whether this worker's requests up to `sequence` were applied."""
        return sequence <= self._requests.get(rank, (0, 0))[0]

    def last_staleness(self, rank: int) -> int:
        """Of the worker's last applied request."""
        return self._requests[rank][1]

    def forget_requests(self, rank: int) -> None:
        """A new process for this rank numbers its requests from 1 again."""
        self._requests.pop(rank, None)
