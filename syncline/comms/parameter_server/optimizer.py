"""A worker's optimizer on its way to the servers, and the optimizer's state on the way there and back.

Here: pickling an optimizer without its parameters and state; its hyperparameters, which follow the worker's schedule;
resharding its state by rows of the parameters. Not here: sending.

An optimizer is pickled with cloudpickle, so that classes from the user's script travel too. Unpickling executes code:
only unpickle what came over an authenticated connection.

Hooks and attributes patched onto the object (schedulers patch `step`) stay with the worker. An optimizer whose `step`
looks at more than one row at a time (Muon, trust ratios) sees only the chunk that a server holds; with one server that
is each whole parameter. One whose `step` needs a closure (LBFGS) cannot be used.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import torch
from torch import Tensor
from torch.optim import Optimizer

from syncline.comms.parameter_server.chunks import ParameterChunk, chunks_in

Hyperparameters = list[dict[str, Any]]
"""For each parameter group, its numeric settings by name."""


def dump_optimizer(optimizer: Optimizer) -> bytes:
    """The pickled optimizer, without parameters, state, hooks and patched attributes."""
    # Not `copy.copy`: that goes through torch's __getstate__, which drops attributes of the user's own.
    kept = {
        name: value
        for name, value in vars(optimizer).items()
        if not name.startswith("_optimizer_")
        and name not in ("state", "param_groups")
        and not (callable(value) and hasattr(type(optimizer), name))
    }
    groups = [{name: value for name, value in g.items() if name != "params"} for g in optimizer.param_groups]
    pickled: bytes = cloudpickle.dumps((type(optimizer), kept, groups))
    return pickled


def load_optimizer(pickled: bytes, members: Sequence[Sequence[Tensor]]) -> tuple[Optimizer, list[dict[str, Any]]]:
    """The optimizer over other parameters, given by group, and all its groups.

    The optimizer gets only the groups that have members, since not every `step` can handle an empty one. The returned
    list has all groups, in the worker's order.
    """
    kind, kept, groups = cloudpickle.loads(pickled)
    for group, mine in zip(groups, members, strict=True):
        group["params"] = list(mine)
    optimizer: Optimizer = kind.__new__(kind)
    optimizer.__setstate__({**kept, "state": {}, "param_groups": [g for g in groups if g["params"]]})
    optimizer.state = defaultdict(dict)  # as torch's constructor makes it; __setstate__ takes what it is given
    return optimizer, groups


def param_group_indices(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[list[int]]:
    """For each parameter group, the indices of its members in `parameters`; other members are left out."""
    index = {id(p): i for i, p in enumerate(parameters)}
    return [[index[id(p)] for p in group["params"] if id(p) in index] for group in optimizer.param_groups]


class HyperparameterChanges:
    """Finds out when a schedule has changed an optimizer's hyperparameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._last: Hyperparameters | None = None

    def take(self) -> Hyperparameters | None:
        """All hyperparameters if any has changed since the last call, and at the first call; else None."""
        present = _hyperparameters_of(self._optimizer)
        if present == self._last:
            return None
        self._last = present
        return present


def _hyperparameters_of(optimizer: Optimizer) -> Hyperparameters:
    """The numbers and tuples of numbers of each group: what schedules change."""
    found: Hyperparameters = []
    for group in optimizer.param_groups:
        numbers: dict[str, Any] = {}
        for name, value in group.items():
            plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if isinstance(plain, (int, float)):
                numbers[name] = plain
            elif (
                isinstance(plain, (tuple, list))
                and name != "params"
                and all(isinstance(v, (int, float)) for v in plain)
            ):
                numbers[name] = tuple(plain)
        found.append(numbers)
    return found


def set_hyperparameters(groups: Sequence[dict[str, Any]], values: Sequence[Mapping[str, Any]]) -> None:
    """Set the named hyperparameters of each group; the others stay."""
    for group, changed in zip(groups, values, strict=True):
        for name, value in changed.items():
            present = group.get(name)
            if isinstance(present, Tensor):
                present.fill_(value)  # a learning rate kept as a tensor stays one
            elif isinstance(value, (list, tuple)):
                group[name] = type(present)(value) if isinstance(present, (list, tuple)) else tuple(value)
            else:
                group[name] = value


def flatten(parameter: Tensor, tensor: Tensor | None = None) -> Tensor:
    """The values of `tensor` (by default the parameter's own) in the parameter's memory order."""
    tensor = parameter.detach() if tensor is None else tensor.detach()
    if parameter.is_contiguous() or parameter.dim() != 4:
        return tensor.reshape(-1)
    if parameter.is_contiguous(memory_format=torch.channels_last):
        return tensor.permute(0, 2, 3, 1).reshape(-1)
    return tensor.reshape(-1)


def optimizer_entries(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
    """A worker's optimizer state in the servers' format, as if one server held all parameters."""
    shapes = [tuple(p.shape) for p in parameters]
    entries = []
    for chunk in chunks_in(shapes, (0, sum(math.prod(s) for s in shapes))):
        parameter = parameters[chunk.parameter]
        state = optimizer.state.get(parameter, {})
        values = {
            name: flatten(parameter, v).view(parameter.shape)
            if isinstance(v, Tensor) and v.shape == parameter.shape
            else v
            for name, v in state.items()
        }
        if values:
            entries.append({"parameter": chunk.parameter, "first_row": 0, "rows": chunk.rows, "state": values})
    return entries


def reshard_state(entries: Sequence[Mapping[str, Any]], chunks: Sequence[ParameterChunk]) -> list[dict[str, Any]]:
    """The state for other chunks of the same parameters: tensors with a value for each row are split by rows.

    Other values (a step count, say) are the same for all rows, and come from the first entry.
    """
    found = []
    for chunk in chunks:
        end = chunk.first_row + chunk.rows
        parts = [
            e
            for e in entries
            if e["parameter"] == chunk.parameter
            and e["first_row"] < end
            and chunk.first_row < e["first_row"] + e["rows"]
        ]
        if not parts:
            continue
        parts.sort(key=lambda e: int(e["first_row"]))
        state = {name: _rows_of(name, parts, chunk) for name in parts[0]["state"]}
        found.append({"parameter": chunk.parameter, "first_row": chunk.first_row, "rows": chunk.rows, "state": state})
    return found


def _rows_of(name: str, parts: Sequence[Mapping[str, Any]], chunk: ParameterChunk) -> Any:
    first = parts[0]["state"][name]
    has_rows = isinstance(first, Tensor) and first.dim() > 0 and len(first) == parts[0]["rows"]
    if not has_rows or not chunk.shape:
        return first.clone() if isinstance(first, Tensor) else first
    cuts = []
    for part in parts:
        low = max(chunk.first_row, part["first_row"]) - part["first_row"]
        high = min(chunk.first_row + chunk.rows, part["first_row"] + part["rows"]) - part["first_row"]
        cuts.append(part["state"][name][low:high])
    return torch.cat(cuts)
