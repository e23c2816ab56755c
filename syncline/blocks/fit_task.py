"""`BlockFit`: what is fitted, with its data, as one object that the workers of a run read from the task file.

Not here: how it runs (`loop.py`), and on how many workers (`config/run.py`).
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from syncline.blocks.app import App, Arrays
from syncline.blocks.apps import make_app
from syncline.blocks.schedule import Blocks
from syncline.errors import ConfigError

__all__ = ["BlockFit"]


@dataclass(frozen=True, kw_only=True)
class BlockFit:
    """An app, its data, and how its blocks are scheduled."""

    app: App
    problem: Arrays
    title: str
    """What the data is called."""
    blocks: Blocks
    """With every default filled in."""
    tolerance: float
    max_rounds: int
    seed: int = 0
    warm: Arrays | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """What else is known of the data, such as the names of columns."""

    @classmethod
    def make(
        cls, model: object, data: Any, *, title: str, workers: int, schedule: Blocks | None = None,
        tolerance: float | None = None, max_rounds: int | None = None, seed: int = 0, warm: Arrays | None = None,
        facts: dict[str, Any] | None = None,
    ) -> BlockFit:  # fmt: skip
        """Check everything that can be wrong before a process starts."""
        app = make_app(model)
        if tolerance is not None and not 0 <= tolerance < np.inf:
            raise ConfigError.for_setting("tolerance", tolerance, "0 or a positive number")
        if max_rounds is not None and (type(max_rounds) is not int or max_rounds < 1):
            raise ConfigError.for_setting("max_rounds", max_rounds, "1 or more")
        problem = app.prepare(data)
        return cls(
            app=app, problem=problem, title=title, blocks=_settled(schedule or Blocks(), app, problem, workers),
            tolerance=app.tolerance if tolerance is None else tolerance,
            max_rounds=app.max_rounds if max_rounds is None else max_rounds, seed=seed, warm=warm, facts=facts or {},
        )  # fmt: skip

    @property
    def name(self) -> str:
        """The app with the options that are not their defaults."""
        usual = self.app.options()
        given = {name: getattr(self.app, name) for name in usual if getattr(self.app, name) != usual[name]}
        options = ", ".join(f"{name}={value!r}" for name, value in given.items())
        return f"{self.app.name}({options})" if given else self.app.name

    def run_facts(self) -> dict[str, Any]:
        """What the plan of a run says about it."""
        known = self.fingerprint
        return {"kind": "fit", "model": self.name, "data": self.title, "fingerprint": known, "data_fingerprint": known}

    @property
    def fingerprint(self) -> str:
        """Of the app, its options and the schedule, and the shapes and sums of the data."""
        known = [f"{self.app!r} {self.blocks} {self.tolerance} {self.seed}"]
        for name, array in self.problem.items():
            known.append(f"{name} {array.shape} {array.sum() if array.dtype.kind in 'biuf' else ''}")
        return hashlib.sha256("\n".join(known).encode()).hexdigest()[:16]


def _settled(schedule: Blocks, app: App, problem: Arrays, workers: int) -> Blocks:
    count = app.count(problem)
    lanes = min(schedule.lanes or workers, count)
    by = schedule.by or app.orders[0]
    if by not in app.orders:
        raise ConfigError.for_setting(
            "by", by, f"{' or '.join(map(repr, app.orders))} for {app.name}", allowed=list(app.orders)
        )
    size = schedule.size or app.size(problem, lanes)
    return dataclasses.replace(schedule, lanes=lanes, by=by, size=max(1, min(size, count)))
