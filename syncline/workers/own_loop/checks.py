"""Noticing that workers do not do the same, before anything is trained on it.

Here: `Checks`: the mark that each worker adds to an exchange of gradients, and what follows if marks differ. Not here:
comparing marks (`workers/agreement.py`).
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from syncline.data.order import Share
from syncline.errors import ConfigError
from syncline.strategies.gradients import GradientBuffer, kind_of, kind_over_all
from syncline.workers.agreement import digest, mark_of
from syncline.workers.rounds import LoopRound
from syncline.workers.session import Session

OUT_OF_STEP = ("out-of-step", "different-groups")
"""The codes of errors that say that workers do different things, before anything was trained on it."""
_EVERY_UPDATES = 8
"""How often a part of the parameters is compared."""
_COMPARED = 256
"""How many numbers of each parameter are compared."""


class _Report(msgspec.Struct, frozen=True):
    """What a worker is doing, as far as it must be the same on all workers."""

    worker_id: int
    step: int
    batches: int
    ahead: int
    """How many batches were taken ahead of the step."""
    optimizer: int
    groups: int
    """How many parameter groups that optimizer has."""
    kinds: list[int]
    """What gradient each parameter has."""
    checksum: int
    samples: int
    """The checksum of the batch, as this worker has read it."""


class Checks:
    """One worker's side of the comparison."""

    def __init__(self, session: Session, round: LoopRound) -> None:
        self._session, self._round = session, round
        self._mine: _Report | None = None
        self._samples: tuple[list[int], list[torch.Tensor]] = ([], [])  # of each parameter: its address, some numbers

    def mark(
        self,
        number: int,
        share: Share | None,
        gradients: GradientBuffer,
        optimizer: torch.optim.Optimizer,
        *,
        is_due: bool,
    ) -> int | None:
        """The mark of an exchange of gradients by `optimizer`, which has this `number`; a worker alone needs none.

        `is_due`: compare parameters now, with those that were added to the optimizer.
        """
        if self._session.plan.size == 1:
            return None
        compared = [p for g in optimizer.param_groups for p in g["params"]] if is_due else gradients.parameters
        is_due = is_due or self._round.updates % _EVERY_UPDATES == 0
        self._mine = _Report(
            worker_id=self._session.worker_id,
            step=self._round.start if share is not None else self._round.updates,
            batches=self._round.taken.used,
            ahead=len(self._round.taken.ahead),
            optimizer=number,
            groups=len(optimizer.param_groups),
            kinds=[kind_of(p.grad) for p in gradients.parameters],
            checksum=self._checksum(compared) if is_due else 0,
            samples=share.checksum if share is not None else 0,
        )
        mine = self._mine
        counted = [mine.step, 7 * mine.batches, 13 * number, 5 * mine.groups, 11 * mine.ahead]
        return mark_of([*counted, digest(mine.kinds), mine.checksum, mine.samples])

    def settle(self, number: int, gradients: GradientBuffer) -> list[int]:
        """Marks differ: what gradient each parameter has over all workers, if only that differs; otherwise raises."""
        del number
        assert self._mine is not None
        gathered = self._session.collective.all_gather(msgspec.msgpack.encode(self._mine))
        try:
            reports = [msgspec.msgpack.decode(part, type=_Report) for part in gathered]
        except msgspec.DecodeError:  # another worker exchanges something else at this moment
            raise out_of_step(_doing(self._mine), "another worker is elsewhere", self._mine) from None
        problem = disagreement(reports)
        if problem is not None:
            raise problem
        by_parameter = [kind_over_all(kinds) for kinds in zip(*(r.kinds for r in reports), strict=True)]
        position = {id(p): n for n, p in enumerate(gradients.parameters)}
        return [by_parameter[position[id(p)]] for p in gradients.in_memory_order()]

    def _checksum(self, parameters: list[torch.nn.Parameter]) -> int:
        """A number that differs, most likely, if some of the compared numbers do."""
        addresses = [p.data_ptr() for p in parameters]
        if addresses != self._samples[0]:
            self._samples = addresses, [_as_bits(p) for p in parameters]
        return int(torch.cat(self._samples[1]).sum()) if addresses else 0


def _as_bits(parameter: torch.Tensor) -> torch.Tensor:
    """Some numbers of a parameter as integers, in its own memory where that is possible."""
    part = parameter.detach().reshape(-1)[:_COMPARED]
    if part.dtype == torch.float32:
        return part.view(torch.int32)
    return part.view(torch.uint8)


def disagreement(reports: list[Any]) -> ConfigError | None:
    """The error for workers that do different things; None if only their gradients are of different parameters."""
    first = reports[0]
    others = [r for r in reports if _place(r) != _place(first)]
    if others:
        return out_of_step(_doing(first), _doing(others[0]), others[0])
    strangers = [r for r in reports if r.samples != first.samples]
    if strangers:
        return _streams_differ(first, strangers[0])
    others = [r for r in reports if r.groups != first.groups]
    if others:
        other = others[0]
        return ConfigError(
            f"The optimizer of worker {first.worker_id} has {first.groups} parameter groups in step {first.step}, and "
            f"that of worker {other.worker_id} has {other.groups}. Call add_param_group on all workers in the same "
            "step. Conditions on counters must use values that replacements have: worker.step, worker.batch, "
            "worker.state.",
            code="different-groups",
            worker_id=other.worker_id,
            step=first.step,
            groups=other.groups,
        )
    different = [r for r in reports if r.checksum != first.checksum]
    if different:
        other = different[0]
        return ConfigError(
            f"The models of worker {first.worker_id} and worker {other.worker_id} differ at step {first.step}: the "
            "script changes parameters without optimizer.step(), or differently on each worker. Make such changes from "
            "values that all workers have (worker.mean, worker.any), and let only prepared optimizers update "
            "parameters.",
            code="models-differ",
            worker_id=other.worker_id,
            step=first.step,
        )
    return None


def _streams_differ(first: Any, other: Any) -> ConfigError:
    return ConfigError(
        f"Worker {first.worker_id} and worker {other.worker_id} read different samples from the stream at step "
        f"{first.step}. Each worker reads the whole stream and keeps its part, so all must read the same. Syncline "
        "seeds Python's, NumPy's and torch's generators for every epoch: let the dataset draw from these, sort what it "
        "lists, and not divide the data by rank, process or host.",
        code="streams-differ",
        worker_id=other.worker_id,
        step=first.step,
    )


def out_of_step(one: str, other: str, report: Any) -> ConfigError:
    return ConfigError(
        f"Workers are out of step: {one}, but {other}. One of them skipped a step that another took, for instance by "
        "'continue' or 'break' on a condition that only it met. Decide together: if worker.any(condition): continue. "
        "Conditions on counters must use values that replacements have: worker.step, worker.batch, worker.state.",
        code="out-of-step",
        worker_id=report.worker_id,
        step=report.step,
    )


def _place(report: Any) -> tuple[int, ...]:
    return report.step, report.batches, report.ahead, report.optimizer


def _doing(report: Any) -> str:
    batches = f" after {report.batches} batches" if report.batches != 1 else ""
    batches += f" with {report.ahead} taken ahead" if report.ahead else ""
    optimizer = f" of optimizer {report.optimizer}" if report.optimizer else ""
    return f"worker {report.worker_id} is in step {report.step}{optimizer}{batches}"
