"""Two strategies of your own that clip each worker's gradient, so that one bad batch cannot spoil a step.

syncline train lenet --workers 2 --data digits --strategy "examples/clipped.py:ClippedPush(limit=1.0)"
syncline train lenet --workers 4 --data digits \
    --strategy "hierarchy(inside_host=examples/clipped.py:ClippedSum(limit=1.0), across_hosts=sparknet)"

`ClippedPush` uses a parameter server. `ClippedSum` sums in lock-step, so it works inside a hierarchy, in a switch such
as 'examples/clipped.py:ClippedSum until epoch 1, then allreduce', and with global batch norm.
"""

from dataclasses import dataclass

import torch

from syncline import LocalExchange, Method, Replica, ServerExchange


@dataclass(frozen=True)
class ClippedPush(Method):
    """Each worker, at its own pace, pushes its clipped gradient to a server and pulls the parameters."""

    limit: float = 1.0

    servers = 1
    is_asynchronous = True
    recovery = "merge"
    committed = "If a worker fails, the server keeps the parameters; steps that it has not pushed are repeated."

    def exchange(self, replica: Replica) -> "Pushing":
        return Pushing(replica, self)


class Pushing(ServerExchange):
    has_gradient = False

    def before_forward(self) -> None:
        super().before_forward()  # starts the server
        self.flat.write(self.pull())

    def update(self) -> None:  # not called if the loss is not finite
        self.has_gradient = True

    def after_update(self, weight: float) -> bool:
        if self.has_gradient:
            torch.nn.utils.clip_grad_norm_(self.replica.gradients.parameters, self.method.limit)
            self.servers.push(self.gradient, weight=weight)
        else:
            self.servers.tick(1)  # the server counts the step
        self.has_gradient = False
        self.report()
        return False


@dataclass(frozen=True)
class ClippedSum(Method):
    """All workers sum their clipped gradients in every step."""

    limit: float = 1.0

    is_lock_step = True
    fits_inside_group = True
    recovery = "equal"

    def exchange(self, replica: Replica) -> "Summing":
        return Summing(replica, self)


class Summing(LocalExchange):
    def before_update(self, weight: float) -> bool:
        gradients = self.replica.gradients
        torch.nn.utils.clip_grad_norm_(gradients.parameters, self.method.limit)
        for flat in gradients.flats:  # the piggybacked values are part of the first
            self.replica.collective.all_reduce_(flat, weight)
        self.replica.log.exchanged()
        return True
