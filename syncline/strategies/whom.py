"""The third question: with whom? Answers as data.

Free of torch, so that a mistake is answered before any process starts: the names that torch and `comms/mixing.py`
know are repeated here, and tests compare the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from syncline.config.spec import Spec
from syncline.errors import ConfigError, UnknownName, check_options

__all__ = ["OPTIMIZERS", "TOPOLOGIES", "Everyone", "Memory", "Neighbors", "Rivals", "Server", "Whom", "optimizer_spec"]

TOPOLOGIES = ("exponential", "random", "ring", "static-exponential", "torus")
"""The graphs on which neighbors may be chosen."""

_COMMON = ("lr", "foreach", "maximize", "differentiable")
OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "ASGD": (*_COMMON, "lambd", "alpha", "t0", "weight_decay", "capturable"),
    "Adadelta": (*_COMMON, "rho", "eps", "weight_decay", "capturable"),
    "Adafactor": ("lr", "beta2_decay", "eps", "d", "weight_decay", "foreach", "maximize"),
    "Adagrad": (*_COMMON, "lr_decay", "weight_decay", "initial_accumulator_value", "eps", "fused"),
    "Adam": (
        *_COMMON, "betas", "eps", "weight_decay", "amsgrad", "capturable", "fused", "decoupled_weight_decay",
    ),
    "AdamW": (*_COMMON, "betas", "eps", "weight_decay", "amsgrad", "capturable", "fused"),
    "Adamax": (*_COMMON, "betas", "eps", "weight_decay", "capturable"),
    "LBFGS": (
        "lr", "max_iter", "max_eval", "tolerance_grad", "tolerance_change", "history_size", "line_search_fn",
    ),
    "Muon": ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
    "NAdam": (*_COMMON, "betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay", "capturable"),
    "RAdam": (*_COMMON, "betas", "eps", "weight_decay", "decoupled_weight_decay", "capturable"),
    "RMSprop": (*_COMMON, "alpha", "eps", "weight_decay", "momentum", "centered", "capturable"),
    "Rprop": (*_COMMON, "etas", "step_sizes", "capturable"),
    "SGD": (*_COMMON, "momentum", "dampening", "weight_decay", "nesterov", "fused"),
    "SparseAdam": ("lr", "betas", "eps", "maximize"),
}  # fmt: skip
"""The optimizers of torch.optim, as torch spells them, and the settings of each."""


@dataclass(frozen=True)
class Everyone:
    """With all other workers at once: an all-reduce."""


@dataclass(frozen=True)
class Server:
    """With processes that hold the parameters: each worker pushes to them and pulls from them."""

    shards: int = 1
    """Over how many server processes the parameters are spread."""
    optimizer: Spec | None = field(default=None, hash=False)
    """What the servers step with: an optimizer of torch.optim. None: the task's own."""

    def __post_init__(self) -> None:
        if isinstance(self.shards, bool) or not isinstance(self.shards, int) or self.shards < 1:
            raise ConfigError(f"server(shards={self.shards!r}): the number of server processes must be 1 or more.")
        if self.optimizer is not None:
            object.__setattr__(self, "optimizer", optimizer_spec(Spec.of(self.optimizer, what="optimizer")))


@dataclass(frozen=True)
class Neighbors:
    """With a few others on a graph: gossip. What one worker knows reaches all in a few rounds."""

    topology: str = "exponential"

    def __post_init__(self) -> None:
        name = str(self.topology).lower().replace("_", "-")
        if name not in TOPOLOGIES:
            raise UnknownName.among("topology", str(self.topology), TOPOLOGIES)
        object.__setattr__(self, "topology", name)


@dataclass(frozen=True)
class Memory:
    """With all workers of a host through one shared copy of the parameters, without any lock: Hogwild."""


@dataclass(frozen=True)
class Rivals:
    """With one other worker, drawn anew each time: a tournament."""


Whom = Everyone | Server | Neighbors | Memory | Rivals


def optimizer_spec(wanted: Spec) -> Spec:
    """An optimizer for a server, its name as torch spells it; `ConfigError` if there is none such."""
    by_lower = {name.lower(): name for name in OPTIMIZERS}
    name = by_lower.get(wanted.name.lower())
    if name is None:
        raise UnknownName.among("optimizer in torch.optim", wanted.name, OPTIMIZERS)
    if name == "LBFGS":
        raise ConfigError(
            "LBFGS cannot step at a server: it evaluates the loss several times in a step, and a server has neither "
            "model nor data. Use server(optimizer=sgd(lr=0.1, momentum=0.9)), for example."
        )
    check_options(f"The optimizer {name.lower()}", wanted.options, OPTIMIZERS[name], kind="setting")
    rate = wanted.options.get("lr", 1.0)
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate > 0:
        raise ConfigError(f"The learning rate of {name.lower()} is {rate!r}, but it must be a number above 0.")
    return Spec(name, dict(wanted.options))
