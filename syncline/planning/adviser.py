"""`Adviser`: says in the middle of a run which other strategy would bring it to its end sooner.

It compares what the latest steps took with what they should take: exchanges that take longer mean a slower network, and
one worker whose computing takes longer is a straggler. All presets are then predicted under these conditions. One is
advised if, several times in a row, it would take at most 80% of the time that is left, even if its step is as slow and
its samples are as many as their ranges allow.

Here: a state machine, fed with events. Not here: predictions (`cost/`), and switching (`syncline/driver.py`).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from syncline.planning.cost.choice import make_training_plan
from syncline.planning.cost.network import DEFAULT_NETWORK, HostRates, Link, Network, read_link
from syncline.planning.cost.profile import COMPUTE, Profile
from syncline.planning.cost.ranges import ZERO, Range
from syncline.planning.cost.rates import loopback_rates
from syncline.planning.cost.samples import samples_factor
from syncline.planning.cost.step import Prediction, Workload, predict
from syncline.planning.machine import Machine
from syncline.planning.plan import Plan
from syncline.strategies.method import ModelShapes, RunConditions
from syncline.strategies.reading import read_strategy
from syncline.telemetry.events import WAITING, Event, Progress, WorkerReady

_WINDOW = 8
"""So many reports of each worker are looked at: two seconds, or as many steps if those are longer."""
_WORTH = 0.8
_IN_A_ROW = 3
_SWITCHING_S = 10.0
"""What saving, starting the workers again and resuming takes, at most."""
_STRAGGLES = 1.3
"""A worker that computes so many times as long as the median is a straggler."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Another strategy, and why."""

    strategy: str
    step: int
    text: str


class Adviser:
    """Give it the events of a run, in order."""

    def __init__(self, plan: Plan, machine: Machine, candidates: Sequence[str], network: str | None = None) -> None:
        self._plan, self._machine, self._candidates = plan, machine, list(candidates)
        self._hosts = len({worker.host for worker in plan.workers})
        self._link = read_link(network or DEFAULT_NETWORK)
        self._method = read_strategy(plan.strategy).method
        self._shapes: Mapping[str, Sequence[int]] = {}
        self._slots = 0
        self._last_step: dict[int, int] = {}
        self._seen: dict[int, deque[tuple[int, dict[str, float]]]] = {}
        self._found: list[str] = []

    def on_event(self, event: Event) -> Advice | None:
        """The advice, if these are the steps that call for one."""
        match event:
            case WorkerReady() if event.shapes:
                self._shapes, self._slots = event.shapes, event.optimizer_slots
            case Progress():
                before = self._last_step.get(event.worker_id)
                self._last_step[event.worker_id] = event.step
                if before is not None and event.step > before and event.phases:
                    seen = self._seen.setdefault(event.worker_id, deque(maxlen=_WINDOW))
                    seen.append((event.step - before, event.phases))
                    return self._look(event.step)
        return None

    def _look(self, step: int) -> Advice | None:
        is_full = len(self._seen) == self._plan.size and all(len(seen) == _WINDOW for seen in self._seen.values())
        if not is_full or not self._shapes:
            return None
        best, now_s = self._best()
        for seen in self._seen.values():
            seen.clear()
        self._found = [*self._found, best.strategy][-_IN_A_ROW:] if best is not None else []
        if best is None or self._found != [best.strategy] * _IN_A_ROW:
            return None
        left, factor = self._plan.total_steps - step, _most_samples(best, self._plan.strategy)
        saved_s = left * (now_s - factor * best.step_s.high)
        if saved_s <= 2 * _SWITCHING_S:
            return None
        text = (
            f"A step with {self._plan.strategy} takes {_ms(now_s)} now. With {best.strategy} it should take "
            f"{_ms(best.step_s.mid)}, and end the run at least {saved_s:.0f} s sooner, even if it needs {factor:.2g} "
            "times as many samples."
        )
        return Advice(strategy=best.strategy, step=step, text=text)

    def _best(self) -> tuple[Prediction | None, float]:
        """The best other strategy, if it is worth it, and what a step takes now."""
        workload, now_s, exchange_s = self._workload()
        usual = predict(workload, self._plan.strategy, self._method, self._network(1.0))
        if usual is None:
            return None, now_s
        expected_s = usual.term("exchange").mid + usual.term("waiting").mid + usual.term("encoding").mid
        slower = max(1.0, exchange_s / expected_s) if expected_s else 1.0
        made = make_training_plan(
            workload, self._network(slower), model="", data="", strategies=[self._plan.strategy, *self._candidates],
            conditions=RunConditions(workers=self._plan.size, hosts=self._hosts),
        )  # fmt: skip
        worth = [
            each for each in made.predictions
            if each.strategy != self._plan.strategy and each.samples is not None
            and _most_samples(each, self._plan.strategy) * each.step_s.high <= _WORTH * now_s
        ]  # fmt: skip
        return min(worth, key=lambda p: p.step_s.high * (p.samples or ZERO).mid, default=None), now_s

    def _workload(self) -> tuple[Workload, float, float]:
        """The latest steps as a workload; what one takes, and what of it is not computing."""
        per_worker = [_means(seen) for seen in self._seen.values()]
        computing = [sum(mean.get(name, 0.0) for name in COMPUTE) for mean in per_worker]
        middle = statistics.median_low(computing)
        typical = per_worker[computing.index(middle)]
        ratio = max(computing) / middle if middle else 1.0
        profile = Profile(
            phases={name: Range.exactly(typical[name]) for name in COMPUTE if name in typical},
            waiting_s=ZERO,
            noise_s=0.0,
            share=self._plan.batch / self._plan.size,
            workers=math.ceil(self._plan.size / self._hosts),
            threads=self._plan.workers[0].threads,
            strategy=self._plan.strategy,
            intervals=_WINDOW,
        )
        workload = Workload(
            profile=profile, shapes=ModelShapes(self._shapes), optimizer_slots=self._slots, batch=self._plan.batch,
            workers=self._plan.size, held_out_samples=self._plan.held_out,
            slowest=ratio if ratio >= _STRAGGLES else 1.0,
        )  # fmt: skip
        now_s = statistics.fmean(sum(mean.values()) for mean in per_worker)
        # The slowest worker waits for nobody, so what it does not compute is the exchange itself.
        slowest = per_worker[computing.index(max(computing))]
        return workload, now_s, slowest.get("exchange", 0.0) + slowest.get(WAITING, 0.0)

    def _network(self, slower: float) -> Network:
        """The network as it was described, but so many times slower."""
        link = Link(bytes_per_s=self._link.bytes_per_s / slower, latency_s=self._link.latency_s * slower)
        rates = loopback_rates() if self._plan.collective == "process-group" else HostRates()
        rates = dataclasses.replace(
            rates,
            memory_round_s=rates.memory_round_s * slower, memory_s_per_byte=rates.memory_s_per_byte * slower,
        )  # fmt: skip
        return Network(link=link, hosts=self._hosts, cores=self._machine.cores, rates=rates)


def _most_samples(prediction: Prediction, current: str) -> float:
    """How many times as many samples as the current strategy it may need at most."""
    is_exact = read_strategy(current).method.sums_exact_gradients
    now = samples_factor(current, is_exact=is_exact) or Range.exactly(1.0)
    return (prediction.samples or Range.exactly(1.0)).high / now.mid


def _means(seen: Sequence[tuple[int, dict[str, float]]] | deque[tuple[int, dict[str, float]]]) -> dict[str, float]:
    steps = sum(count for count, _ in seen)
    names = {name for _, phases in seen for name in phases}
    return {name: sum(phases.get(name, 0.0) for _, phases in seen) / steps for name in names}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g} ms"
