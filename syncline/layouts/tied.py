"""Gradients of parameters that several stages of a pipeline use, such as an embedding that is also the output layer.

Here: `TiedGradients`. Each stage computes its part of the gradient; the stage that updates the parameter adds the
others' to its own before the lanes sum. Not here: which stage updates it (`stage_runner.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from syncline.comms.collective import Collective
from syncline.layouts.stage_runner import StagedModel
from syncline.strategies.flat import dense_strides


class TiedGradients:
    """The tied parameters of a team's model, of which this worker computes `stage`."""

    def __init__(
        self, staged: StagedModel | None, parameters: Sequence[nn.Parameter], stage: int, team: Collective
    ) -> None:
        self._team, self._stage = team, stage
        self._mailboxes: list[tuple[nn.Parameter, int, int, torch.Tensor]] = []
        """Each tied parameter with the stage that updates it, another that uses it, and the latter's gradient."""
        for number, owner, other in staged.tied(parameters) if staged is not None else ():
            p = parameters[number]
            memory = team.allocate_shared(p.numel(), p.dtype)
            self._mailboxes.append((p, owner, other, memory.as_strided(p.shape, dense_strides(p))))

    def gather(self) -> None:
        """Add what other stages have computed to the gradients of those that update; all of the team call this."""
        if not self._mailboxes:
            return
        for p, _, other, mailbox in self._mailboxes:
            if other == self._stage:
                mailbox.copy_(p.grad) if p.grad is not None else mailbox.zero_()
                p.grad = None
        self._team.barrier()
        for p, owner, _, mailbox in self._mailboxes:
            if owner == self._stage:
                p.grad = mailbox.clone() if p.grad is None else p.grad.add_(mailbox)
        # The mailboxes are written again in the next step, after the barrier at which it is committed.
