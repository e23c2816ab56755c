"""The parameter groups of a script's optimizers, some of which it may add in the middle of the training.

Here: `ParameterGroups`: which parameters have their gradients laid out, so that all workers lay them out alike; groups
that a checkpoint or the other workers have, and this worker's script has not added yet. Not here: when they are laid
out anew (`updates.py`).

A replacement, and every worker of a resumed run, runs the script from the top. Its optimizer gets the groups that the
others had when their round began: the script may be past the line that adds them (`worker.epochs`), or still come to
it; then the group is there already. Groups that were added later in the round are left to the script. If an update has
used them, their state is kept until the script adds them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from syncline.comms.collective import Collective
from syncline.errors import ConfigError

if TYPE_CHECKING:
    from syncline.workers.own_loop.parts import PreparedParts


class ParameterGroups:
    """The groups of all optimizers of a script."""

    def __init__(self, parts: PreparedParts) -> None:
        self._parts = parts
        self._laid_out: list[list[torch.Tensor]] | None = None  # of each optimizer, as all workers have agreed
        self._current: dict[int, int] = {}  # of each optimizer, with how many groups that is all of it
        self._restored: set[tuple[int, int]] = set()  # optimizer and number of groups that the script has not added yet
        self._kept: dict[tuple[int, int], list[Any]] = {}  # of groups to come: the state of each parameter
        self._leftover: dict[int, torch.Tensor] = {}  # gradients of earlier steps, of parameters in no optimizer
        self._seen: tuple[list[int], list[list[list[str]]], list[torch.Tensor]] | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}

    # Adding

    def add(self, number: int, group: dict[str, Any], add: Callable[[dict[str, Any]], None]) -> None:
        """The script adds `group` to optimizer `number`, after the training has begun."""
        given = group["params"]
        group["params"] = [given] if isinstance(given, torch.Tensor) else list(given)
        parameters = [p[1] if isinstance(p, tuple) else p for p in group["params"]]
        optimizer = self._parts.optimizers[number]
        for restored in sorted(self._restored):
            if restored[0] == number and _is_same(optimizer.param_groups[restored[1]]["params"], parameters):
                group.update(optimizer.param_groups[restored[1]])
                optimizer.param_groups[restored[1]] = group  # the script may keep a reference to its own
                self._restored.remove(restored)
                return
        self._check_known(parameters)
        add(group)
        kept = self._kept.pop((number, len(optimizer.param_groups) - 1), None)
        if kept is not None:
            state, first = optimizer.state_dict(), _count(optimizer.param_groups[:-1])
            state["state"].update({first + n: slots for n, slots in enumerate(kept) if slots is not None})
            optimizer.load_state_dict(state)

    def _check_known(self, parameters: list[torch.Tensor]) -> None:
        unknown = [p for p in parameters if id(p) not in self._name_of()]
        if unknown:
            raise ConfigError(
                f"{len(unknown)} of the parameters that were added to an optimizer belong to no prepared model, or "
                "were made after the training had begun. A replacement or a resumed run could not load them. Build "
                "all layers before worker.prepare, and add their parameters to the optimizer when they are to train.",
                code="unknown-parameters",
                parameters=len(unknown),
            )

    # Laying out gradients

    def agree(self, collective: Collective) -> list[list[torch.Tensor]]:
        """The parameters of each optimizer whose gradients are laid out; all members call this together.

        A member may have heard that all have added a group, and another not: then it counts.
        """
        if self._laid_out is None:
            self._laid_out = [_parameters(optimizer) for optimizer in self._parts.optimizers]
        if collective.size == 1:
            return self._laid_out
        names = self._name_of()
        mine = [[names[id(p)] for p in laid_out] for laid_out in self._laid_out]
        gathered = [json.loads(part) for part in collective.all_gather(json.dumps(mine).encode())]
        longest = [max(of_all, key=len) for of_all in zip(*gathered, strict=False)]
        by_name = self._tensors
        for rank, theirs in enumerate(gathered):
            is_part = [own == whole[: len(own)] for own, whole in zip(theirs, longest, strict=False)]
            is_known = all(name in by_name for own in theirs for name in own)
            if len(theirs) != len(mine) or not all(is_part) or not is_known:
                raise ConfigError(
                    f"The optimizers of rank {rank} have other parameters than those of rank {collective.rank}. Make "
                    "models and optimizers in the same way on all workers, and add parameters in the same order.",
                    code="different-parameters",
                    rank=rank,
                )
        self._laid_out = [[by_name[name] for name in names] for names in longest]
        return self._laid_out

    def is_outdated(self, number: int) -> bool:
        """Whether the script has added parameters to optimizer `number` whose gradients are not laid out."""
        assert self._laid_out is not None, "all workers have agreed"
        optimizer = self._parts.optimizers[number]
        if self._current.get(number) == len(optimizer.param_groups):
            return False
        known = set(map(id, self._laid_out[number]))
        if any(id(p) not in known for p in _parameters(optimizer)):
            return True
        self._current[number] = len(optimizer.param_groups)
        return False

    def lay_out(self, number: int, lay_out: Callable[[list[torch.Tensor]], None]) -> None:
        """Include the parameters that the script has added; all workers do so together."""
        assert self._laid_out is not None, "all workers have agreed"
        known = set(map(id, self._laid_out[number]))
        added = [p for p in _parameters(self._parts.optimizers[number]) if id(p) not in known]
        leftover = [p for p in added if p.grad is not None and self._leftover.get(id(p)) is p.grad]
        if leftover:
            raise ConfigError(
                f"{len(leftover)} of the parameters that were added to an optimizer have gradients of earlier steps, "
                "which a replacement or a resumed run would not have. Call optimizer.zero_grad() after "
                "add_param_group, or freeze the parameters before (requires_grad_(False)).",
                code="leftover-gradients",
                parameters=len(leftover),
            )
        parameters = [*self._laid_out[number], *added]
        lay_out(parameters)
        self._laid_out[number] = parameters  # not before: it may fail, and all workers must have the same

    def begin_round(self) -> None:
        """Remember which parameters in no optimizer have gradients now: they are of earlier steps."""
        for p in self._groups()[1]:
            if p.grad is not None:
                self._leftover[id(p)] = p.grad

    def zero_grad(self, number: int) -> None:
        """The script has set the gradients of this optimizer to zero."""
        if self._leftover:
            for p in _parameters(self._parts.optimizers[number]):
                self._leftover.pop(id(p), None)

    # Saving and loading

    def state(self) -> dict[str, Any]:
        """The names of the parameters in each group of each optimizer, and of those that are frozen."""
        names = self._name_of()
        frozen = [names[id(p)] for p in self._parts.parameters() if not p.requires_grad]
        return {"groups": self._groups()[0], "frozen": frozen}

    def load_frozen(self, state: dict[str, Any]) -> None:
        """Freeze and unfreeze as the others have, or as it was when the checkpoint was saved."""
        if "frozen" not in state:
            return
        frozen, names = set(state["frozen"]), self._name_of()
        for p in self._parts.parameters():
            p.requires_grad_(names[id(p)] not in frozen)

    def fit(self, saved: dict[str, Any], script: dict[str, Any] | None) -> dict[str, Any]:
        """The state of the optimizers as `load_state_dict` takes it: for the groups that this script has.

        `script` is what `state` returned. Groups in it that are missing here are added; without it, none are.
        """
        optimizers = self._parts.optimizers
        states = saved["optimizers"] if len(optimizers) > 1 else [saved]
        wanted = (script or {}).get("groups", [])
        if wanted:
            self._kept.clear()
        fitted = [self._fitted(n, state, wanted[n] if n < len(wanted) else []) for n, state in enumerate(states)]
        return {"optimizers": fitted} if len(optimizers) > 1 else fitted[0]

    def _fitted(self, number: int, saved: dict[str, Any], wanted: list[list[str]]) -> dict[str, Any]:
        if number >= len(self._parts.optimizers):
            return saved  # which is refused
        self._name_of()
        optimizer, groups = self._parts.optimizers[number], saved["param_groups"]
        for names, settings in list(zip(wanted, groups, strict=False))[len(optimizer.param_groups) :]:
            group = {**settings, "params": [self._tensors[name] for name in names]}
            self._restored.add((number, len(optimizer.param_groups)))
            torch.optim.Optimizer.add_param_group(optimizer, group)
        mine = optimizer.state_dict()
        own = mine["param_groups"]
        common = min(len(groups), len(own))
        first = _count(groups[:common])
        for n in range(common, len(groups)) if wanted else ():
            start = _count(groups[:n])
            self._kept[number, n] = [saved["state"].get(start + k) for k in range(len(groups[n]["params"]))]
        state = {k: slots for k, slots in saved["state"].items() if k < first}
        state.update({k: slots for k, slots in mine["state"].items() if k >= first})
        return {**saved, "state": state, "param_groups": [*groups[:common], *own[common:]]}

    def counts(self) -> list[int]:
        """How many groups each optimizer has."""
        return [len(optimizer.param_groups) for optimizer in self._parts.optimizers]

    def in_state(self, script: dict[str, Any] | None) -> list[dict[str, Any]]:
        """The groups of all optimizers that were there when `script` was saved."""
        counts = [len(groups) for groups in (script or {}).get("groups", [])] or self.counts()
        return [
            group
            for optimizer, count in zip(self._parts.optimizers, counts, strict=False)
            for group in optimizer.param_groups[:count]
        ]

    def _groups(self) -> tuple[list[list[list[str]]], list[torch.Tensor]]:
        """The names of the parameters in each group of each optimizer, and the parameters in none."""
        counts = self.counts()
        if self._seen is None or self._seen[0] != counts:
            names = self._name_of()
            named = [[[names[id(p)] for p in g["params"]] for g in o.param_groups] for o in self._parts.optimizers]
            held = set(map(id, self._parts.parameters()))
            outside: list[torch.Tensor] = [p for p in self._parts.model.parameters() if id(p) not in held]
            self._seen = counts, named, outside  # it is asked for in every step
        return self._seen[1], self._seen[2]

    def _name_of(self) -> dict[int, str]:
        """The name of each parameter of the prepared models and optimizers as the training began, by its id."""
        if not self._names:
            model = self._parts.model
            self._tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            self._names = {id(tensor): name for name, tensor in self._tensors.items()}
        return self._names


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _count(groups: list[dict[str, Any]]) -> int:
    return sum(len(group["params"]) for group in groups)


def _is(one: object, other: object) -> bool:
    return one is other


def _is_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(_is, one, other))
