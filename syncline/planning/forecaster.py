"""`Forecaster`: predicts a run before it starts, or else from its first steps, and keeps what the run has shown.

With the profile of an earlier run of the same task on this machine, everything is predicted before the start. Without
one, computing is measured in the run's first second of steps, and the rest is predicted. Either way it costs the run
nothing: events are read that the driver has anyway.

Here: when a run is predicted, and from what. Not here: the prediction itself (`cost/step.py`), its file
(`expected.py`), and what is kept (`profile_store.py`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence

from syncline.errors import plural
from syncline.planning.cost.network import DEFAULT_NETWORK, HostRates, Network, read_link
from syncline.planning.cost.profile import Profile, ProfileReader
from syncline.planning.cost.ranges import Range
from syncline.planning.cost.rates import loopback_rates, rates_seen
from syncline.planning.cost.step import Prediction, Workload, predict
from syncline.planning.expected import Expected
from syncline.planning.machine import Machine
from syncline.planning.plan import Plan
from syncline.planning.profile_store import Kept, closest, keep, key_of_task, key_of_transport, look_up
from syncline.strategies.method import Method, ModelShapes
from syncline.strategies.reading import read_strategy
from syncline.strategies.traffic import Traffic
from syncline.telemetry.events import Event, GroupTrains, Progress, Recovered, RunStarted, WorkerFailure, WorkerReady

_FIRST_INTERVALS = 4
"""So many quarters of a second of each worker's steps are measured if nothing is known of the task."""


class Forecaster:
    """Give it the events of a run, in order."""

    def __init__(self, plan: Plan, machine: Machine, network: str | None = None) -> None:
        self._plan, self._machine, self._link = plan, machine, network
        self._hosts = len({worker.host for worker in plan.workers})
        self._method = read_strategy(plan.strategy).method
        self._reader = ProfileReader()
        self._shapes: Mapping[str, Sequence[int]] = {}
        self._slots = 0
        self._expected: Expected | None = None
        self._is_disturbed = False

    def before_start(self) -> Expected | None:
        """The prediction, if enough is known of the task to make it now; or why there will be none."""
        if self._plan.layout != "replicated":
            why = f"steps with the layout {self._plan.layout} are not predicted; 'syncline explain' describes them"
            self._expected = self._without(why)
            return self._expected
        found = look_up(key_of_task(self._plan, self._machine))
        kept = closest(found, workers=self._per_host, share=self._share, strategy=self._plan.strategy)
        if kept is None:
            return None
        profile, when = kept.profile, time.strftime("%Y-%m-%d %H:%M", time.gmtime(kept.made_at))
        source = (
            f"a run of the same task on this machine ({profile.strategy}, {plural(profile.workers, 'worker')}, "
            f"{profile.share:g} samples each, {when} UTC)"
        )
        return self._settle(profile, kept.shapes, kept.optimizer_slots, source)

    def on_event(self, event: Event) -> Expected | None:
        """The prediction, at the event with which it can be made."""
        self._reader.add(event)
        match event:
            case RunStarted():
                self._is_disturbed = self._is_disturbed or event.resumed_from_step is not None
            case WorkerReady() if event.shapes:
                self._shapes, self._slots = event.shapes, event.optimizer_slots
            case WorkerFailure() | Recovered():
                self._is_disturbed = True
            case GroupTrains():
                self._expected = self._without("its script trains with torch.distributed itself, unseen")
                return self._expected
            case Progress() if self._expected is None and self._has_seen_first_steps():
                source = "the first steps of the run itself, in which computing was measured"
                profile = self._profile()
                assert profile is not None, "some intervals were seen"
                return self._settle(profile, self._shapes, self._slots, source, is_own=True)
        return None

    def at_end(self) -> Expected | None:
        """Keep what the run has shown for the next one; why nothing was predicted, if nothing was."""
        if self._expected is None:
            return self._without("it was too short to measure its first steps")
        profile = self._profile()
        is_usual = self._hosts == 1 and not self._is_disturbed and self._expected.is_prediction
        if profile is not None and profile.is_steady and self._shapes and is_usual:
            kept = Kept(profile=profile, shapes=self._shapes, optimizer_slots=self._slots)
            keep(key_of_task(self._plan, self._machine), kept)
            if rates_seen(HostRates(), profile, self._traffic()) != HostRates():
                keep(key_of_transport(self._plan, self._machine), kept)
        return None

    @property
    def _per_host(self) -> int:
        return math.ceil(self._plan.size / self._hosts)

    @property
    def _share(self) -> float:
        return self._plan.batch / self._plan.size

    def _has_seen_first_steps(self) -> bool:
        reader = self._reader
        return bool(self._shapes) and reader.workers >= self._plan.size and reader.intervals >= _FIRST_INTERVALS

    def _profile(self) -> Profile | None:
        """What the run has shown so far, as of one host."""
        found = self._reader.profile(self._plan)
        return None if found is None else dataclasses.replace(found, workers=self._per_host)

    def _traffic(self) -> tuple[Traffic, ...]:
        return self._method.traffic(ModelShapes(self._shapes), self._plan.size, self._slots) or ()

    def _without(self, why: str) -> Expected:
        plan = self._plan
        return Expected(
            strategy=plan.strategy, layout=plan.layout, workers=plan.size, batch=plan.batch,
            source=f"Nothing was predicted for this run: {why}.",
        )  # fmt: skip

    def _settle(
        self, profile: Profile, shapes: Mapping[str, Sequence[int]], slots: int, source: str, *, is_own: bool = False
    ) -> Expected:
        """The prediction of the run, once and for all."""
        why = f"{self._plan.strategy} declares neither bytes_per_step nor traffic"
        made: Expected | None = None
        try:
            made = self._made(profile, shapes, slots, source)
        except Exception as error:  # a user's own strategy may not be able to say what it sends
            why = f"what {self._plan.strategy} sends cannot be predicted, {type(error).__name__}: {error}"
        self._expected = self._without(why) if made is None else dataclasses.replace(made, is_from_own_steps=is_own)
        return self._expected

    def _made(self, profile: Profile, shapes: Mapping[str, Sequence[int]], slots: int, source: str) -> Expected | None:
        plan = self._plan
        workload = Workload(
            profile=profile, shapes=ModelShapes(shapes), optimizer_slots=slots, batch=plan.batch, workers=plan.size,
            held_out_samples=plan.held_out,
        )  # fmt: skip
        network = Network(
            link=read_link(self._link or DEFAULT_NETWORK), hosts=self._hosts, cores=self._machine.cores,
            rates=self._rates(workload.shapes.exact_bytes),
        )  # fmt: skip
        found = predict(workload, plan.strategy, self._method, network)
        if found is None:
            return None
        guess = "" if self._link else ", which is a guess: --network says what they are"
        link = f", and from links of {self._link or DEFAULT_NETWORK} between hosts{guess}" if self._hosts > 1 else ""
        made = expected_of(found, f"Predicted from {source}{link}.")
        return made if profile.memory_bytes else dataclasses.replace(made, memory_bytes=Range.exactly(0.0))

    def _rates(self, exact_bytes: int) -> HostRates:
        """What exchanges cost inside this machine: seen in earlier runs of any task, or else the usual."""
        rates = loopback_rates() if self._plan.collective == "process-group" else HostRates()
        for strategy in ("allreduce", "server-sync"):
            similar = dataclasses.replace(self._plan, strategy=strategy)
            seen = look_up(key_of_transport(similar, self._machine))
            if seen:
                one = min(seen, key=lambda kept: abs(math.log(max(kept.numbers, 1) * 4 / max(exact_bytes, 4))))
                method: Method = read_strategy(strategy).method
                traffic = method.traffic(ModelShapes(one.shapes), self._plan.size, one.optimizer_slots) or ()
                rates = rates_seen(rates, one.profile, traffic)
        return rates


def expected_of(prediction: Prediction, source: str) -> Expected:
    """A prediction as it is kept, with one value for each term."""
    terms: dict[str, Range] = {}
    for term in prediction.terms:
        terms[term.name] = terms.get(term.name, Range.exactly(0.0)) + term.seconds
    return Expected(
        strategy=prediction.strategy, layout=prediction.layout, workers=prediction.workers, batch=prediction.batch,
        terms=terms, bytes_per_step=prediction.bytes_per_step, memory_bytes=prediction.memory_bytes, source=source,
    )  # fmt: skip
