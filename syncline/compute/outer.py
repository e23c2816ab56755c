"""Outer optimizers: how the shared model moves after workers have trained independently for some steps.

Here: pure functions of flat tensors, each a frozen dataclass that prints as it is written in a run file. Not here: when
workers synchronize and how their changes are averaged (`strategies`), and the inner optimizer, which is the user's.

Notation and sign, for all of them:

    theta~          the anchor: where every worker started after the last exchange
    theta_k         where worker k is now, k = 1 .. K
    delta           mean_k theta_k - theta~, the workers' mean displacement

`step(anchor, delta, state)` returns the next anchor and state. `delta` is a descent direction, so it is added; DiLoCo's
outer gradient is -delta, BMUF's G is delta. Plain averaging moves to theta~ + delta, the mean.

In floating point theta~ + (theta - theta~) may differ from theta in the last bit, so a single worker should keep its
parameters instead of calling `average`. Non-finite values propagate to the anchor; since neither anchor nor state is
modified in place, a step is undone by keeping the previous ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from syncline.errors import ConfigError

if TYPE_CHECKING:  # tensors are used here only through their own methods, so that a strategy is read without torch
    from torch import Tensor

__all__ = ["OuterOptimizer", "State", "average", "block_momentum", "elastic", "nesterov", "sgd"]

State: TypeAlias = "Mapping[str, Tensor]"
"""The state of an outer optimizer between exchanges, by name; part of checkpoints."""


class OuterOptimizer(Protocol):
    """How the anchor moves."""

    def initial_state(self, like: Tensor) -> State:
        """The state before the first exchange of a model whose flat parameters are `like`."""

    def step(self, anchor: Tensor, delta: Tensor, state: State) -> tuple[Tensor, State]:
        """The next anchor and state."""


# The classes below have lower-case names, as `range` and `slice` do: they are read and written as calls.


@dataclass(frozen=True)
class average:
    """All workers continue from their mean: local SGD, SparkNet (Moritz et al. 2015). The same as `sgd(lr=1)`.

    theta~ <- theta~ + delta
    """

    def initial_state(self, like: Tensor) -> State:
        del like
        return {}

    def step(self, anchor: Tensor, delta: Tensor, state: State) -> tuple[Tensor, State]:
        return anchor + delta, state


@dataclass(frozen=True)
class sgd:
    """A fraction of the way to the mean, or beyond it.

    theta~ <- theta~ + lr delta
    """

    lr: float

    def __post_init__(self) -> None:
        _check_lr("sgd", self.lr)

    def initial_state(self, like: Tensor) -> State:
        del like
        return {}

    def step(self, anchor: Tensor, delta: Tensor, state: State) -> tuple[Tensor, State]:
        return anchor.add(delta, alpha=self.lr), state


@dataclass(frozen=True)
class nesterov:
    """DiLoCo (Douillard et al. 2023), whose authors use lr 0.7 and momentum 0.9.

    b <- momentum b + delta
    theta~ <- theta~ + lr (delta + momentum b)

    This is torch.optim.SGD(nesterov=True) on the gradient -delta.
    """

    lr: float
    momentum: float

    def __post_init__(self) -> None:
        _check_lr("nesterov", self.lr)
        _check_momentum("nesterov", self.momentum)

    def initial_state(self, like: Tensor) -> State:
        return {"momentum": like.new_zeros(like.shape)}

    def step(self, anchor: Tensor, delta: Tensor, state: State) -> tuple[Tensor, State]:
        momentum = delta.add(state["momentum"], alpha=self.momentum)
        direction = delta.add(momentum, alpha=self.momentum)
        return anchor.add(direction, alpha=self.lr), {"momentum": momentum}


@dataclass(frozen=True)
class block_momentum:
    """BMUF, blockwise model-update filtering (Chen & Huo 2016), CNTK's block momentum.

    With W_g(t-1) the model that workers start block t from, W-(t) the mean of where they end, eta the block momentum
    (here `momentum`) and zeta the block learning rate (here `lr`):

        G(t)     = W-(t) - W_g(t-1)
        Delta(t) = eta Delta(t-1) + zeta G(t)
        W(t)     = W(t-1) + Delta(t)
        W_g(t)   = W(t)                         classical block momentum
        W_g(t)   = W(t) + eta Delta(t)          Nesterov block momentum

    The anchor is W_g, G is delta, and the state holds Delta. In the Nesterov form W(t-1) = W_g(t-1) - eta Delta(t-1)
    is not stored, because it cancels:  W_g(t) = W_g(t-1) + zeta G(t) + eta Delta(t). That also shows that
    `block_momentum(m, lr, nesterov=True)` and `nesterov(lr, m)` are the same, with Delta = lr b.

    The paper sets eta = 1 - 1/K for K workers (`momentum_for`) and zeta = 1: momentum multiplies the step by
    1 / (1 - eta) = K in the long run, which compensates for averaging K updates instead of adding them.
    """

    momentum: float
    lr: float = 1.0
    nesterov: bool = True

    def __post_init__(self) -> None:
        _check_lr("block_momentum", self.lr)
        _check_momentum("block_momentum", self.momentum)

    @staticmethod
    def momentum_for(workers: int) -> float:
        """The paper's momentum for K workers: 1 - 1/K."""
        return 1.0 - 1.0 / workers

    def initial_state(self, like: Tensor) -> State:
        return {"momentum": like.new_zeros(like.shape)}

    def step(self, anchor: Tensor, delta: Tensor, state: State) -> tuple[Tensor, State]:
        momentum = (self.momentum * state["momentum"]).add(delta, alpha=self.lr)
        if not self.nesterov:
            return anchor + momentum, {"momentum": momentum}
        ahead = delta.mul(self.lr).add(momentum, alpha=self.momentum)
        return anchor + ahead, {"momentum": momentum}

    def model(self, anchor: Tensor, state: State) -> Tensor:
        """W(t), the paper's result of training: the anchor without the step ahead that Nesterov's form takes."""
        return anchor.sub(state["momentum"], alpha=self.momentum) if self.nesterov else anchor


@dataclass(frozen=True)
class elastic:
    """EASGD (Zhang, Choromanska & LeCun 2015): each worker keeps its own parameters, elastically tied to a center.

    With alpha the moving rate (here `rate`), x_k worker k and x~ the center, both sides of

        x_k <- x_k - alpha (x_k - x~)           `pull`
        x~  <- x~  + alpha (x_k - x~)           `step`, one worker at a time: asynchronous
        x~  <- x~  + alpha sum_k (x_k - x~)     `step_of_all`, K workers at once: synchronous

    computed from the values before either changed, so that their sum is preserved. The anchor is x~. The
    synchronous center moves by beta = K alpha of the way to the mean; the paper recommends beta = 0.9.
    """

    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ConfigError(f"The rate of elastic is {self.rate}, but it must be above 0 and at most 1.")

    def initial_state(self, like: Tensor) -> State:
        del like
        return {}

    def step(self, anchor: Tensor, delta: Tensor, state: State) -> tuple[Tensor, State]:
        """The center after one worker, `delta` away from it, has pulled it."""
        return anchor.add(delta, alpha=self.rate), state

    def step_of_all(self, anchor: Tensor, delta: Tensor, workers: int) -> Tensor:
        """The center after `workers` workers, on average `delta` away from it, have pulled it at the same time."""
        if workers * self.rate > 1:
            raise ConfigError(
                f"With {workers} workers and rate {self.rate} the center would move {workers * self.rate:g} times the "
                f"distance to their mean, past it. Set the rate to 1/{workers} or less; 0.9/{workers} is usual."
            )
        return anchor.add(delta, alpha=workers * self.rate)

    def pull(self, worker: Tensor, anchor: Tensor) -> Tensor:
        """A worker after the center, as it was before this exchange, has pulled it."""
        return worker.lerp(anchor, self.rate)


def _check_lr(name: str, lr: float) -> None:
    if not lr > 0:
        raise ConfigError(f"The lr of {name} is {lr}, but it must be above 0; 1 is plain averaging.")


def _check_momentum(name: str, momentum: float) -> None:
    if not 0 <= momentum < 1:
        raise ConfigError(f"The momentum of {name} is {momentum}, but it must be at least 0 and below 1.")
