"""What a script keeps besides its models, optimizers and schedulers.

Here: `SavedValues`, the `worker.state` of a script, and `ScriptParts`, which puts it into checkpoints together with
loss scalers, carried state and the number of steps. Not here: carried state itself (`carried.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from syncline.errors import ConfigError
from syncline.workers.own_loop.groups import ParameterGroups
from syncline.workers.rounds import LoopRound

_PLAIN = (bool, int, float, str, bytes, type(None), torch.Tensor)


class SavedValues:
    """Values by name, as attributes: `worker.state.best = 0.9`. Checkpoints save them, and replacements get them.

    Reading one that was never set raises AttributeError; `worker.state.get("best", 0.0)` has a default.
    """

    def __init__(self, before_use: Callable[[], None] = lambda: None) -> None:
        vars(self)["_values"] = {}
        vars(self)["_before_use"] = before_use

    def get(self, name: str, default: Any = None) -> Any:
        self._before_use()
        return self._values.get(name, default)

    def setdefault(self, name: str, default: Any) -> Any:
        """The value of `name`, which is set to `default` if it has none."""
        self._before_use()
        if name not in self._values:
            setattr(self, name, default)
        return self._values[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._before_use()
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(
                f"worker.state has no {name!r} yet. Use worker.state.get({name!r}, default)."
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._before_use()
        _check_plain(name, value)
        self._values[name] = value

    def __contains__(self, name: str) -> bool:
        self._before_use()
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        self._before_use()
        return iter(self._values)

    def __repr__(self) -> str:
        return f"worker.state({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"


def _check_plain(name: str, value: Any) -> None:
    """Refuse what a checkpoint cannot hold: only plain values are loaded without running code."""
    if isinstance(value, dict):
        for key, part in value.items():
            _check_plain(f"{name}[{key!r}]", key)
            _check_plain(f"{name}[{key!r}]", part)
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            _check_plain(f"{name}[{number}]", part)
    elif not isinstance(value, _PLAIN):
        raise ConfigError(
            f"worker.state.{name} is a {type(value).__name__}, which a checkpoint cannot hold. Keep numbers, strings, "
            "tensors, and lists or dicts of these; for NumPy values use float(), int() or torch.from_numpy().",
            code="state-value",
            name=name,
            type=type(value).__name__,
        )


class CarriedState(Protocol):
    """State that the script carries from batch to batch."""

    def state(self) -> list[dict[str, Any]]:
        """Plain values and tensors, which are not changed afterwards."""

    def load(self, state: list[dict[str, Any]]) -> None: ...


class ScriptParts:
    """A `ScriptValues` for checkpoints: `worker.state`, loss scalers, carried state, the number of steps, and which
    parameters are in which group of the optimizers."""

    def __init__(self, values: SavedValues, scalers: list[Any], round: LoopRound, groups: ParameterGroups) -> None:
        self._values, self._scalers, self._round, self._groups = values, scalers, round, groups
        self._carried: list[CarriedState] = []
        self._loaded: list[Any] = []  # the carried state of a checkpoint or of the others

    def add_carried(self, carried: CarriedState) -> None:
        """The script carries one more state; if it has joined already, what was saved of it is loaded."""
        self._carried.append(carried)
        if len(self._carried) <= len(self._loaded):
            carried.load(self._loaded[len(self._carried) - 1])

    def state_dict(self) -> dict[str, Any]:
        return {
            "values": copy.deepcopy(vars(self._values)["_values"]),
            "scalers": [scaler.state_dict() for scaler in self._scalers],
            "steps": self._round.steps,
            # Of what the script has not come to yet, what was loaded still holds.
            "carried": [carried.state() for carried in self._carried] + self._loaded[len(self._carried) :],
            **self._groups.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self._values)["_values"].update(copy.deepcopy(state["values"]))
        self._round.steps = state["steps"]
        self._loaded = state.get("carried", [])
        for carried, of_others in zip(self._carried, self._loaded, strict=False):
            carried.load(of_others)
        for scaler, saved in zip(self._scalers, state["scalers"], strict=False):
            scaler.load_state_dict(saved)
        self._groups.load_frozen(state)

    def fit_optimizer(self, saved: dict[str, Any], script: dict[str, Any] | None) -> dict[str, Any]:
        return self._groups.fit(saved, script)

    def groups_in(self, script: dict[str, Any] | None) -> list[dict[str, Any]]:
        return self._groups.in_state(script)
