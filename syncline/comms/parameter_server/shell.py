"""A worker's optimiser on its way to the servers, and its state on the way there and back.

Here: the *shell* of an optimiser, which is all of it but parameters and state; its groups' settings, which follow the
worker's schedule; and the state of some rows of a parameter, cut and put together. Not here: sending.

A shell is written with cloudpickle, so that optimisers of the user's own script travel too. Reading one executes what
it says: only ever read one that came over an authenticated connection.

Not taken along: hooks, and whatever was patched onto the object (schedulers patch `step`); they belong to the worker.
An optimiser whose `step` looks at more than one row at a time (Muon, trust ratios) sees only the piece that a server
has; with one server that is each whole parameter. One whose `step` needs a closure (LBFGS) cannot be used.
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

from syncline.comms.parameter_server.pieces import Piece, pieces_of

__all__ = [
    "Settings",
    "change_settings",
    "cut_state",
    "flatten",
    "group_members",
    "read_shell",
    "settings_of",
    "state_of",
    "write_shell",
]

Settings = list[dict[str, Any]]
"""For each group, its numeric settings by name."""


def write_shell(optimizer: Optimizer) -> bytes:
    """The optimiser without parameters, state, hooks and patches."""
    # Not `copy.copy`: that goes through torch's __getstate__, which drops attributes of the user's own.
    kept = {
        name: value
        for name, value in vars(optimizer).items()
        if not name.startswith("_optimizer_")
        and name not in ("state", "param_groups")
        and not (callable(value) and hasattr(type(optimizer), name))
    }
    groups = [{name: value for name, value in g.items() if name != "params"} for g in optimizer.param_groups]
    shell: bytes = cloudpickle.dumps((type(optimizer), kept, groups))
    return shell


def read_shell(shell: bytes, members: Sequence[Sequence[Tensor]]) -> tuple[Optimizer, list[dict[str, Any]]]:
    """The optimiser over other parameters, given by group, and all its groups.

    The optimiser itself gets only groups that have members, since not every `step` bears an empty one. The list that is
    returned has all of them, in the worker's order.
    """
    kind, kept, groups = cloudpickle.loads(shell)
    for group, mine in zip(groups, members, strict=True):
        group["params"] = list(mine)
    optimizer: Optimizer = kind.__new__(kind)
    optimizer.__setstate__({**kept, "state": {}, "param_groups": [g for g in groups if g["params"]]})
    optimizer.state = defaultdict(dict)  # as torch's constructor makes it; __setstate__ takes what it is given
    return optimizer, groups


def group_members(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[list[int]]:
    """For each group, which of the parameters are in it; those that are no parameters here are left out."""
    index = {id(p): i for i, p in enumerate(parameters)}
    return [[index[id(p)] for p in group["params"] if id(p) in index] for group in optimizer.param_groups]


def settings_of(optimizer: Optimizer) -> Settings:
    """The numbers of each group, and pairs of them: what schedules change."""
    found: Settings = []
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


def change_settings(groups: Sequence[dict[str, Any]], settings: Sequence[Mapping[str, Any]]) -> None:
    """Give each group the settings named for it; what is not named stays."""
    for group, changed in zip(groups, settings, strict=True):
        for name, value in changed.items():
            present = group.get(name)
            if isinstance(present, Tensor):
                present.fill_(value)  # a learning rate kept as a tensor stays one
            elif isinstance(value, (list, tuple)):
                group[name] = type(present)(value) if isinstance(present, (list, tuple)) else tuple(value)
            else:
                group[name] = value


def flatten(parameter: Tensor, tensor: Tensor | None = None) -> Tensor:
    """The values of `tensor` (by default the parameter's own) in the order in which the parameter's memory has them."""
    tensor = parameter.detach() if tensor is None else tensor.detach()
    if parameter.is_contiguous() or parameter.dim() != 4:
        return tensor.reshape(-1)
    if parameter.is_contiguous(memory_format=torch.channels_last):
        return tensor.permute(0, 2, 3, 1).reshape(-1)
    return tensor.reshape(-1)


def state_of(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
    """A worker's own optimiser state, in the form in which servers save theirs: as if from one server of everything."""
    shapes = [tuple(p.shape) for p in parameters]
    entries = []
    for piece in pieces_of(shapes, (0, sum(math.prod(s) for s in shapes))):
        parameter = parameters[piece.parameter]
        state = optimizer.state.get(parameter, {})
        values = {
            name: flatten(parameter, v).view(parameter.shape)
            if isinstance(v, Tensor) and v.shape == parameter.shape
            else v
            for name, v in state.items()
        }
        if values:
            entries.append({"parameter": piece.parameter, "first_row": 0, "rows": piece.rows, "state": values})
    return entries


def cut_state(entries: Sequence[Mapping[str, Any]], pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """The state of other pieces of the same parameters: tensors with a value for each row are cut along the rows.

    Whatever else there is (a count of steps, say) is the same for all rows and is taken from the first.
    """
    found = []
    for piece in pieces:
        end = piece.first_row + piece.rows
        parts = [
            e
            for e in entries
            if e["parameter"] == piece.parameter
            and e["first_row"] < end
            and piece.first_row < e["first_row"] + e["rows"]
        ]
        if not parts:
            continue
        parts.sort(key=lambda e: int(e["first_row"]))
        state = {name: _rows_of(name, parts, piece) for name in parts[0]["state"]}
        found.append({"parameter": piece.parameter, "first_row": piece.first_row, "rows": piece.rows, "state": state})
    return found


def _rows_of(name: str, parts: Sequence[Mapping[str, Any]], piece: Piece) -> Any:
    first = parts[0]["state"][name]
    has_rows = isinstance(first, Tensor) and first.dim() > 0 and len(first) == parts[0]["rows"]
    if not has_rows or not piece.shape:
        return first.clone() if isinstance(first, Tensor) else first
    cuts = []
    for part in parts:
        low = max(piece.first_row, part["first_row"]) - part["first_row"]
        high = min(piece.first_row + piece.rows, part["first_row"] + part["rows"]) - part["first_row"]
        cuts.append(part["state"][name][low:high])
    return torch.cat(cuts)
