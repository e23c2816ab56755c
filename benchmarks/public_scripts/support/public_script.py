"""What the public scripts get beside their own code: no noise, the result as a file, and a sign in the middle.

Here: what `check.py` puts into a copy of a script, none of which counts as a changed line.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_begun = time.perf_counter()


def save(*modules: torch.nn.Module) -> None:
    """Save the parameters, and how long it took from the script's imports on."""
    target = Path(os.environ["RESULT"])
    own = target.with_suffix(f".{os.getpid()}")
    state = [{name: value.clone() for name, value in module.state_dict().items()} for module in modules]
    torch.save({"state": state, "seconds": time.perf_counter() - _begun}, own)
    own.replace(target)


def add_vision() -> None:
    """Let the imports from here on find the stand-in for torchvision, which libraries would take for the real one."""
    sys.path.append(str(Path(__file__).parent / "vision"))


def sines() -> Any:
    """Data for time_sequence_prediction: 23 sine waves with different phases."""
    import numpy as np

    phases = np.random.RandomState(2).randint(-80, 80, (23, 1))
    return np.sin((np.arange(120) + phases) / 20.0)


def _without_noise() -> None:
    """Each worker draws its own noise for its part of a batch, so results with noise cannot be compared."""
    functional = torch.nn.functional
    functional.dropout = functional.dropout2d = lambda input, *_, **__: input
    attention = functional.scaled_dot_product_attention  # torch's Transformer drops attention weights in here

    def without_dropout(*tensors: Any, dropout_p: float = 0.0, **options: Any) -> torch.Tensor:
        del dropout_p
        if len(tensors) > 4:  # torch's own call passes the mask and the probability by position
            tensors = (*tensors[:4], 0.0, *tensors[5:])
        return attention(*tensors, **options)

    functional.scaled_dot_product_attention = without_dropout
    torch.randn_like = lambda tensor, **_: torch.zeros_like(tensor)


def _sign_after(steps: int, path: Path) -> None:
    done = 0

    def count(*_: Any) -> None:
        nonlocal done
        done += 1
        if done == steps and not path.exists():
            path.touch()
            time.sleep(1.0)

    register_optimizer_step_post_hook(count)


def _kill_after(steps: int, flag: Path) -> None:
    """Rank 1 kills itself, once."""
    done = 0

    def count(*_: Any) -> None:
        nonlocal done
        done += 1
        if done == steps and os.environ.get("RANK") == "1" and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(count)


if os.environ.get("DOUBLE"):  # is a difference rounding?
    torch.set_default_dtype(torch.float64)
if os.environ.get("WITHOUT_NOISE"):
    _without_noise()
if "SIGN_AFTER" in os.environ:
    _sign_after(int(os.environ["SIGN_AFTER"]), Path(os.environ["SIGN"]))
if "KILL_AFTER" in os.environ:
    _kill_after(int(os.environ["KILL_AFTER"]), Path(os.environ["KILLED"]))
