"""Calls of `load_state_dict` by a script: a layout may keep the model's parameters in memory that all workers share.

Here: `watch_loading_calls`, which notifies the training before parameters are overwritten. Only scripts that prepare
something are affected; the function does the same as before otherwise.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from syncline.workers.own_loop.training import LoopTraining

_training: LoopTraining | None = None


def watch_loading_calls(training: LoopTraining) -> None:
    """Notify `training` of models that load parameters; called again, for another training."""
    global _training
    is_first, _training = _training is None, training
    if not is_first:
        return
    original = nn.Module.load_state_dict

    @functools.wraps(original)
    def load_state_dict(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        if _training is not None and _training.stepper is not None:
            for exchange in _training.stepper.exchanges:
                _training.stepper.session.layout.before_loading(exchange, self)
        return original(self, *arguments, **options)

    nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]
