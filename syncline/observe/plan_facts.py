"""`PlanFacts`: what the views need of a run's plan.

Here: reading it leniently, because another version may have written the plan. Not here: the plan (`planning/plan.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from syncline.observe.formatting import clean


@dataclass(frozen=True, kw_only=True)
class PlanFacts:
    """Everything is optional: the plan of an older run may lack some fields."""

    kind: str = "train"
    model: str = "model"
    data: str = "data"
    strategy: str = ""
    workers: int = 0
    epochs: int = 0
    train_samples: int = 0
    steps_per_epoch: int = 0
    total_steps: int = 0
    is_cut_short: bool = False
    notes: tuple[str, ...] = ()
    layout: str = ""
    """Empty for the usual one, in which each worker holds all."""

    def name_of(self, worker_id: int) -> str:
        """`worker 1` or `server 0`: parameter servers are numbered after the workers."""
        return f"server {worker_id - self.workers}" if 0 < self.workers <= worker_id else f"worker {worker_id}"

    @classmethod
    def of(cls, plan: dict[str, Any]) -> PlanFacts:
        steps_per_epoch, total_steps = _count(plan, "steps_per_epoch"), _count(plan, "total_steps")
        epochs = _count(plan, "epochs")
        is_cut_short = total_steps < steps_per_epoch * epochs
        if steps_per_epoch and total_steps:  # --steps may end the run before its last epochs begin
            epochs = min(epochs, -(-total_steps // steps_per_epoch)) or 1
        return cls(
            kind=str(plan.get("kind", "train")),
            model=clean(str(plan.get("model") or "model")),
            data=clean(str(plan.get("data") or "data")),
            strategy=str(plan.get("strategy") or ""),
            workers=len(workers) if isinstance(workers := plan.get("workers"), list | tuple) else 0,
            epochs=epochs,
            train_samples=_count(plan, "train_samples"),
            steps_per_epoch=steps_per_epoch,
            total_steps=total_steps,
            is_cut_short=is_cut_short,
            layout=layout if (layout := clean(str(plan.get("layout") or ""))) != "replicated" else "",
            notes=tuple(map(str, notes)) if isinstance(notes := plan.get("notes"), list | tuple) else (),
        )

    @property
    def is_own_loop(self) -> bool:
        """Whether a script, a fit or a vertex program defines what a step is and ends the run."""
        return self.kind in ("own-loop", "fit", "graph")

    @property
    def title(self) -> str:
        """`lenet on mnist`, or the name of the script."""
        return self.model if self.kind == "own-loop" or self.model == self.data else f"{self.model} on {self.data}"


def _count(plan: dict[str, Any], name: str) -> int:
    """The number in this field; 0 if the plan has none there."""
    value = plan.get(name)
    return value if isinstance(value, int) and 0 <= value < 2**63 else 0
