"""One strategy after another: `allreduce until epoch 1, then sparknet(10)`.

Here: `SwitchingExchange`, which delegates to the exchange of the current phase. A phase ends at a step that all workers
know; before the next forward pass every replica takes the shared model and rank 0's optimizer, as in a resumed run, and
the next exchange begins from there. (Workers that sum gradients stay equal only if their optimizers are.) That is also
how a run warms up in full precision before its gradients are encoded.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, cast

from syncline.errors import ConfigError
from syncline.strategies.exchange import Exchange, Replica
from syncline.strategies.method import Method, ModelShapes, RunConditions
from syncline.strategies.methods.local_sgd import adopt_optimizer
from syncline.strategies.traffic import Traffic


@dataclass(frozen=True)
class MethodPhase:
    """A method, and until when it is used; the last one has no end."""

    method: Method
    name: str
    unit: Literal["epoch", "step"] = "step"
    number: int | None = None

    def end(self, replica: Replica) -> int | None:
        """The step at which it ends."""
        if self.number is None or self.unit == "step":
            return self.number
        if replica.steps_per_epoch is None:
            raise ConfigError("A strategy that changes after an epoch needs a run whose epochs have a known length.")
        return self.number * replica.steps_per_epoch


@dataclass(frozen=True)
class SwitchingMethod(Method):
    """Methods one after the other. A run must offer what any of them needs."""

    phases: tuple[MethodPhase, ...]

    title = "A switch"

    @property
    def methods(self) -> list[Method]:
        return [phase.method for phase in self.phases]

    @property
    def servers(self) -> int:
        return max(method.servers for method in self.methods)

    @property
    def is_asynchronous(self) -> bool:
        return any(method.is_asynchronous for method in self.methods)

    @property
    def is_lock_step(self) -> bool:
        return all(method.is_lock_step for method in self.methods)

    @property
    def held_out(self) -> float:
        return max(method.held_out for method in self.methods)

    @property
    def committed(self) -> str:
        """Each phase has its own sentence in `explain`."""
        return ""

    def check_run(self, run: RunConditions) -> None:
        for method in self.methods:
            method.check_run(run)

    def bytes_per_step(self, model: ModelShapes, workers: int, optimizer_slots: int = 0) -> float | None:
        return self.methods[-1].bytes_per_step(model, workers, optimizer_slots)

    def traffic(self, model: ModelShapes, workers: int, optimizer_slots: int = 0) -> tuple[Traffic, ...] | None:
        """That of the last phase, in which most steps are."""
        return self.methods[-1].traffic(model, workers, optimizer_slots)

    def memory_copies(self, optimizer_slots: int = 0) -> float:
        return max(method.memory_copies(optimizer_slots) for method in self.methods)

    def explain(self, model: ModelShapes, workers: int) -> list[str]:
        lines = []
        for phase in self.phases:
            lines.append("Then:" if phase.number is None else f"Until {phase.unit} {phase.number}:")
            lines += [f"  {line}" for line in [*phase.method.explain(model, workers), phase.method.committed]]
        return lines

    def exchange(self, replica: Replica) -> Exchange:
        return cast(Exchange, SwitchingExchange(replica, self.phases))


class SwitchingExchange:
    """An `Exchange` made of several, one at a time. What it does not define, the current one does."""

    def __init__(self, replica: Replica, phases: tuple[MethodPhase, ...]) -> None:
        self._replica = replica
        self._phases = [(phase, phase.end(replica)) for phase in phases]
        self._step = replica.step
        self._index = self._index_at(self._step)
        self._current = self._phases[self._index][0].method.exchange(replica)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._current, name)

    def before_forward(self) -> None:
        """Switch, if the phase has ended with the last step."""
        if self._index_at(self._step) != self._index:
            self._switch()
        self._current.before_forward()

    def after_update(self, weight: float) -> bool:
        self._step += 1
        return self._current.after_update(weight)

    def must_meet(self, step: int) -> bool:
        return step == self._phases[self._index][1] or self._current.must_meet(step)

    def private_state(self) -> dict[str, Any]:
        return {"phase": self._index, "state": self._current.private_state()}

    def load_private_state(self, state: dict[str, Any]) -> None:
        """Load it, unless it is from a phase that had just ended: the next one begins without it."""
        if state["phase"] == self._index and state["state"] is not None:
            self._current.load_private_state(state["state"])

    def carried_state(self) -> dict[str, Any]:
        return {"phase": self._index, "state": self._current.carried_state()}

    def replacement_state(self) -> dict[str, Any]:
        return {"phase": self._index, "state": self._current.replacement_state()}

    def close(self) -> None:
        """Close the current one. Defined here, because a caller may hold this method for longer than a phase."""
        self._current.close()

    def _index_at(self, step: int) -> int:
        return next(i for i, (_, end) in enumerate(self._phases) if end is None or step < end)

    def _switch(self) -> None:
        self._current.settle()
        self._current.close()
        adopt_optimizer(self._replica.optimizer, self._replica.collective)
        self._index = self._index_at(self._step)
        phase, _ = self._phases[self._index]
        self._replica.log.switched(self._step, phase.name)
        self._current = phase.method.exchange(dataclasses.replace(self._replica, step=self._step))
        self._current.begin()
