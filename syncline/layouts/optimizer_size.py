"""How much memory an optimizer's state takes, before it has any.

Not here: dividing the state (`optimizer_shards.py`), and what follows for a worker (`forecast.py`).
"""

from __future__ import annotations

import torch
from torch import nn

from syncline.compute.memory import optimizer_slots
from syncline.layouts.optimizer_shards import settings_of, step_with, twin_of

_NUMBERS = 16


def optimizer_state(optimizer: torch.optim.Optimizer) -> float:
    """The size of the state relative to the parameters, as seen in two steps with a few numbers.

    >>> weight = nn.Parameter(torch.zeros(3))
    >>> optimizer_state(torch.optim.AdamW([weight])), optimizer_state(torch.optim.AdamW([weight], amsgrad=True))
    (2.0, 3.0)
    """
    if not isinstance(optimizer, torch.optim.Optimizer):  # several as one, which cannot be copied
        return float(optimizer_slots(optimizer))
    parameter = nn.Parameter(torch.zeros(_NUMBERS))
    parameter.grad = torch.full((_NUMBERS,), 0.1)
    twin = twin_of(optimizer, [{**settings_of(optimizer.param_groups[0]), "params": [parameter]}])
    try:
        for _ in range(2):  # momentum appears in the first or in the second
            step_with(twin)
    except (RuntimeError, TypeError, ValueError, KeyError):
        return float(optimizer_slots(optimizer))
    kept = [value for value in twin.state[parameter].values() if isinstance(value, torch.Tensor) and value.dim()]
    return sum(value.nbytes for value in kept) / parameter.nbytes
