"""Measuring a task for a prediction, with short real runs, and predicting every strategy from that.

Here: `answer`, for `syncline plan`, and `choose`, for `--strategy auto`. They get the function that runs a task,
because the driver, which has it, uses this module. Not here: the prediction itself, which is pure (`planning/cost/`),
the choice (`planning/cost/auto.py`), and showing either (`cli/plan.py`).
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from syncline.config.run import RunConfig
from syncline.errors import ConfigError, plural
from syncline.layouts.choice import Candidate
from syncline.layouts.layout import REPLICATED, is_auto, read_layout
from syncline.observe.observer import Observer
from syncline.planning.cost.auto import cannot_choose, pick, read_mode
from syncline.planning.cost.choice import TrainingPlan, all_strategies, make_training_plan
from syncline.planning.cost.network import DEFAULT_NETWORK, HostRates, Network, read_link
from syncline.planning.cost.profile import Fact, Profile, ProfileReader, profile_of
from syncline.planning.cost.ranges import Range
from syncline.planning.cost.rates import rates_seen
from syncline.planning.cost.step import Workload
from syncline.planning.cost.target import Point, Target, samples_to_target
from syncline.planning.machine import Machine
from syncline.planning.plan import Plan
from syncline.planning.planner import TaskFacts, held_out_samples, make_plan
from syncline.planning.profile_store import Kept, closest, keep, key_of_task, key_of_transport, look_up
from syncline.strategies.how import Exact
from syncline.strategies.method import ModelShapes, RunConditions
from syncline.strategies.reading import read_strategy
from syncline.strategies.traffic import Traffic
from syncline.task import Task
from syncline.telemetry.events import Evaluated, Event, Progress, RunStarted, WarningMessage, WorkerReady

Run = Callable[[Task, RunConfig, Observer], object]
"""Trains a task, and shows it to an observer."""
Say = Callable[[str], None]

ALL = "all"
_WITHOUT_END = 100_000
_LONGEST_S = 120.0
_FEWEST_REPORTS = 6
"""Of each worker; the first of them warms up."""
_SECONDS_OF_CHOICE = 2.0
"""How long `--strategy auto` measures a step."""
_TRIALS = 3
"""How often a profile is measured at most until two agree."""
_QUICK_S = 1.0
"""Who gives less time than this wants a quick look, and gets one measurement."""
_AGREE = 0.1
"""Profiles whose steps differ by less than this part agree."""
_CODING_ROUNDS = 9


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be planned."""

    task: Task
    config: RunConfig
    hosts: int = 1
    network: str | None = None
    seconds: float = 3.0
    layouts: tuple[str, ...] = ()
    """Layouts to look at besides `replicated`; `all` for every one that the model can have."""
    target: float | None = None
    """An accuracy on the test data; how long it takes is predicted from a probe."""
    probe_s: float = 60.0
    may_know: bool = False
    """Whether a profile that was kept of an earlier run of the same task will do."""

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.config.workers % self.hosts:
            raise ConfigError(
                f"--hosts is {self.hosts}, but {self.config.workers} workers cannot be divided among so many hosts "
                "equally. Set --workers to a multiple of --hosts.",
                code="hosts", hosts=self.hosts, workers=self.config.workers,
            )  # fmt: skip
        if not 0 < self.seconds <= 600:
            raise ConfigError.for_setting("seconds", self.seconds, "more than 0 and at most 600")
        if not 0 < self.probe_s <= 3600:
            raise ConfigError.for_setting("probe", self.probe_s, "more than 0 and at most 3600 seconds")
        if self.asked_layouts and self.hosts > 1:
            raise ConfigError(
                "Layouts are planned for one host, because the workers of a replica must be on one machine. Leave out "
                "--layout, or --hosts.",
                code="plan-layout", layouts=list(self.asked_layouts), hosts=self.hosts,
            )  # fmt: skip
        for layout in self.asked_layouts:
            if layout != ALL:
                read_layout(layout)

    @property
    def asked_layouts(self) -> tuple[str, ...]:
        """The settings of the run may name one, too."""
        if is_auto(self.config.layout):
            return (*self.layouts, ALL)
        return self.layouts if self.config.layout == REPLICATED else (*self.layouts, self.config.layout)

    @property
    def usual(self) -> RunConfig:
        """The settings of a run that is measured: synchronous, with the whole model on each worker."""
        return self.config.replace(strategy="allreduce", layout=REPLICATED)

    @property
    def per_host(self) -> int:
        return self.config.workers // self.hosts


def hosts_asked(hosts: int | None, network: str | None, workers: int) -> int:
    """How many hosts are meant: with a network and no number, each worker is on one of its own."""
    if hosts is None:
        return workers if network is not None else 1
    if hosts == 1 and network is not None:
        raise ConfigError(
            f"--network {network} describes the links between hosts, and --hosts 1 leaves none. Leave out --network, "
            "or --hosts for one worker on each.",
            code="hosts", hosts=hosts, workers=workers, network=network,
        )  # fmt: skip
    return hosts


def answer(question: Question, strategies: Sequence[str] | None, say: Say, run: Run) -> TrainingPlan:
    """Measure, and predict."""
    names = list(strategies or all_strategies())
    methods = {name: read_strategy(name).method for name in names}  # an invalid one fails before anything is measured
    link = read_link(question.network or DEFAULT_NETWORK)
    measuring = Measuring(question, say, run)
    shapes, slots = measuring.shapes_and_slots()
    profile = measuring.profile(shapes, slots)
    rates = measuring.rates(profile, methods, shapes)
    machine, facts = measuring.machine, measuring.facts
    largest_part = max(method.held_out for method in methods.values())
    workload = Workload(
        profile=profile,
        shapes=shapes,
        optimizer_slots=slots,
        batch=measuring.batch,
        workers=question.config.workers,
        held_out_samples=held_out_samples(largest_part, facts.train_samples, question.config.workers),
    )
    target = measuring.target()
    conditions = RunConditions(workers=question.config.workers, hosts=question.hosts, clip_norm=facts.clip_norm)
    network = Network(link=link, hosts=question.hosts, cores=machine.cores, rates=rates)
    return make_training_plan(
        workload, network, model=facts.model, data=facts.data, strategies=names, conditions=conditions,
        layouts=measuring.layouts(), target=target,
        notes=[*_notes(question, measuring, profile), *_target_note(target)],
    )  # fmt: skip


def choose(task: Task, config: RunConfig, say: Say, run: Run, *, hosts: int = 1) -> tuple[RunConfig, tuple[str, ...]]:
    """The settings with the strategy that `--strategy auto` chooses, and what to say of the choice.

    This machine is measured; so many hosts are taken to be like it.
    """
    asked = config.strategy
    exact_only = read_mode(asked) == "exact"
    if config.layout != "replicated":
        raise cannot_choose(asked, f"it chooses for the layout replicated, not for {config.layout}", "layout")
    facts, machine = task.facts(), Machine.here()
    possible = possible_strategies(facts, config, machine, [f"host {number}" for number in range(hosts)])
    if not possible:
        make_plan(facts, config.replace(strategy="allreduce"), machine)  # says what is wrong
    if config.workers == 1:
        return config.replace(strategy="allreduce"), ("With one worker there is nothing to exchange.",)
    config = config.replace(strategy="allreduce")
    question = Question(
        task=task, config=config, hosts=hosts, network=config.network, seconds=_SECONDS_OF_CHOICE, may_know=True
    )
    chosen = pick(answer(question, possible, say, run), exact_only=exact_only)
    return config.replace(strategy=chosen.chosen.strategy), tuple(chosen.describe())


def possible_strategies(facts: TaskFacts, config: RunConfig, machine: Machine, hosts: Sequence[str]) -> list[str]:
    """Those that a run with these settings can have."""
    found = []
    for name in all_strategies():
        with suppress(ConfigError):
            make_plan(facts, config.replace(strategy=name), machine, hosts)
            found.append(name)
    return found


def _target_note(target: Target | None) -> list[str]:
    if target is None:
        return []
    found = f"{target.source} "
    if target.samples is None:
        return [
            f"{found}It does not lead to {100 * target.accuracy:g}% as far as the probe shows: probe longer (--probe)."
        ]
    low, mid, high = (f"{value:,.0f}" for value in (target.samples.low, target.samples.mid, target.samples.high))
    return [f"{found}{100 * target.accuracy:g}% takes one process {mid} samples ({low} to {high})."]


def _notes(question: Question, measuring: Measuring, profile: Profile) -> list[str]:
    link = f", each with a link of {question.network or DEFAULT_NETWORK}" if question.hosts > 1 else ""
    where = "this machine" if question.hosts == 1 else f"{question.hosts} hosts like this machine{link}"
    notes = [
        f"For {question.config.workers} workers on {where}, batch size {measuring.batch}, {profile.threads} thread(s) "
        f"each. A step was measured with {profile.workers} worker(s) on {profile.intervals} intervals of a run."
    ]
    if not profile.is_steady:
        notes.append(
            f"The measured times vary by {100 * profile.compute_s.spread:.0f}%: something else is using this machine. "
            "Plan again when it is idle, or believe the order more than the times."
        )
    return notes


class Measuring:
    """Short runs on this machine, with as many workers as one host will have, but not more than cores."""

    def __init__(self, question: Question, say: Say, run: Run) -> None:
        self._question, self._say, self._run = question, say, run
        self.machine, self.facts = Machine.here(), question.task.facts()
        self._whole = whole = make_plan(self.facts, question.usual, self.machine)
        self.batch = whole.batch
        self._count = max(1, min(question.per_host, self.machine.cores))
        self._threads = question.config.threads or max(1, self.machine.cores // question.per_host)
        self._tune: Literal["auto", "off"] = "auto" if whole.measured else "off"
        """As in the run that is planned: a short one is not tuned."""
        self._share = max(1, round(self.batch / question.config.workers))

    def shapes_and_slots(self) -> tuple[ModelShapes, int]:
        """The parameters' shapes, and how many numbers the optimizer keeps for each."""
        from torch import nn

        from syncline.compute.memory import optimizer_slots
        from syncline.workers.build import build_optimizer
        from syncline.workers.entry import parameter_shapes

        self._say("Examining the model.")
        task = self._question.task
        return ModelShapes(parameter_shapes(task)), optimizer_slots(build_optimizer(task, nn.Linear(1, 1)))

    def target(self) -> Target | None:
        """What the accuracy that was asked for takes, from training towards it for a while."""
        question = self._question
        if question.target is None:
            return None
        if not self.facts.test_samples:
            raise ConfigError(
                f"--target needs test data, and {self.facts.data} has none. Leave out --target.",
                code="no-test-data", data=self.facts.data,
            )  # fmt: skip
        self._say(f"Training towards {100 * question.target:g}% for at most {question.probe_s:g} s.")
        probing = Probing(question.target, question.probe_s, self.facts.train_samples)
        with tempfile.TemporaryDirectory(prefix="syncline-plan-") as folder:
            config = dataclasses.replace(
                question.usual, workers=self._count, batch=self.batch, threads=self._threads, max_steps=None,
                evaluate_every=1, out=folder, name="probe", checkpoint_every_s=1e6, checkpoint_every_steps=None,
                resume=None, engine="local", tune=self._tune,
            )  # fmt: skip
            with suppress(Enough):
                self._run(question.task, config, probing)
        points = probing.points
        samples = samples_to_target(points, question.target)
        seen = (
            f"{plural(len(points), 'evaluation')}, the last one {100 * points[-1].accuracy:.2f}%" if points else "none"
        )
        return Target(accuracy=question.target, samples=samples, source=f"A probe with allreduce: {seen}.")

    def layouts(self) -> tuple[Candidate, ...]:
        """What the layouts that were asked for mean for the run."""
        asked = self._question.asked_layouts
        if not asked or self._question.config.workers == 1:
            return ()
        from syncline.workers.layout_facts import look_at_layouts

        self._say("Timing the layers of the model, for other layouts.")
        wanted = {str(read_layout(layout)) for layout in asked if layout != ALL}
        more = [read_layout(layout) for layout in wanted]
        found = look_at_layouts(self._question.task, self.facts, self._question.usual, self.machine, more)
        return tuple(each for each in found if ALL in asked or each.layout.is_replicated or str(each.layout) in wanted)

    def profile(self, shapes: ModelShapes, slots: int) -> Profile:
        """Of a synchronous run. Measured again while two measurements disagree; the faster of those that agree counts.

        Something else on the machine only ever makes a step slower.
        """
        if (known := self._known("allreduce")) is not None:
            self._say(f"Using what an earlier run of {self.facts.model} has shown on this machine.")
            return known
        found: list[Profile] = []
        trials = _TRIALS if self._question.seconds >= _QUICK_S else 1
        for trial in range(trials):
            again = f" again, because the times vary ({trial + 1} of at most {trials})" if trial else ""
            self._say(f"Measuring a step with {plural(self._count, 'worker')}{again}.")
            found.append(self._measured("allreduce", self._question.seconds))
            found.sort(key=lambda profile: profile.compute_s.mid)
            if found[0].is_steady and (len(found) == 1 or _agree(found[0], found[1])):
                break
        self._keep(found[0], shapes, slots)
        return found[0]

    def _known(self, strategy: str) -> Profile | None:
        """What is kept of a run with the same load, if that will do."""
        if not self._question.may_know:
            return None
        kept = [one for one in look_up(self._key(strategy)) if one.profile.strategy == strategy]
        found = closest(kept, workers=self._count, share=self._share)
        is_same = found is not None and (found.profile.workers, found.profile.share) == (self._count, self._share)
        return found.profile if found is not None and is_same else None

    def _keep(self, profile: Profile, shapes: ModelShapes, slots: int) -> None:
        """For the prediction of the run itself, and for the next choice."""
        if profile.is_steady:
            named = {name: list(shape) for name, shape in shapes.by_name.items()}
            kept = Kept(profile=profile, shapes=named, optimizer_slots=slots)
            keep(self._key(profile.strategy), kept)
            if profile.workers > 1:
                keep(key_of_transport(self._plan_of(profile.strategy), self.machine), kept)

    def _key(self, strategy: str) -> str:
        return key_of_task(self._plan_of(strategy), self.machine)

    def _plan_of(self, strategy: str) -> Plan:
        """That of a measuring run, as far as what is kept depends on it."""
        return dataclasses.replace(self._whole, strategy=strategy, workers=self._whole.workers[: self._count])

    def rates(self, profile: Profile, methods: Mapping[str, Any], shapes: ModelShapes) -> HostRates:
        """What exchanges cost inside a host, from the time that they took here."""
        rates = HostRates(
            coding_s=measure_coding(methods, shapes, self._question.config.workers, self._say, threads=self._threads)
        )
        rates = rates_seen(rates, profile, _traffic("allreduce", shapes, profile.workers))
        if profile.workers > 1 and self._question.hosts == 1 and any(method.servers for method in methods.values()):
            at_server = self._known("server-sync")
            if at_server is None:
                self._say("Measuring a parameter server.")
                at_server = self._measured("server-sync", self._question.seconds / 2)
                self._keep(at_server, shapes, 0)
            rates = rates_seen(rates, at_server, _traffic("server-sync", shapes, profile.workers))
        return rates

    def _measured(self, strategy: str, seconds: float) -> Profile:
        """From a run that is ended when it has shown enough."""
        watching = Watching(self._say, seconds)
        batch = self._share * self._count
        with tempfile.TemporaryDirectory(prefix="syncline-plan-") as folder:
            config = dataclasses.replace(
                self._question.usual, strategy=strategy, workers=self._count, batch=batch, threads=self._threads,
                max_steps=None, epochs=_WITHOUT_END, evaluate_every=0, out=folder, name="profile",
                checkpoint_every_s=1e6, checkpoint_every_steps=None, resume=None, engine="local",
                tune=self._tune,
            )  # fmt: skip
            with suppress(Enough):
                self._run(self._question.task, config, watching)
        found = watching.profile()
        if found is None:
            raise ConfigError(
                f"A step of {self.facts.model} could not be measured in {_LONGEST_S:g} s. Give a smaller --batch.",
                code="cannot-measure", seconds=_LONGEST_S,
            )  # fmt: skip
        return found


class Enough(Exception):
    """Ends a run whose steps have been measured."""


class Watching:
    """An observer of a run that measures: it ends the run when all workers have reported for long enough."""

    def __init__(self, say: Say, seconds: float, *, longest_s: float = _LONGEST_S) -> None:
        self._say, self._seconds, self._longest_s = say, seconds, longest_s
        self._events: list[Event] = []
        self._plan: Plan | None = None
        self._pids: dict[int, int] = {}
        self._reports: dict[int, int] = {}
        self._memory_bytes = 0
        self._first_s = 0.0

    def on_event(self, event: Event) -> None:
        self._events.append(event)
        if isinstance(event, RunStarted):
            self._plan = Plan.from_dict(event.plan)
        if isinstance(event, WarningMessage):
            self._say(event.message)
        if isinstance(event, WorkerReady):
            self._pids[event.worker_id] = event.pid
        if isinstance(event, Progress) and self._plan is not None:
            self._first_s = self._first_s or time.monotonic()
            self._reports[event.worker_id] = self._reports.get(event.worker_id, 0) + 1
            self._memory_bytes = max([self._memory_bytes, *map(resident_bytes, self._pids.values())])
            passed = time.monotonic() - self._first_s
            have_all = len(self._reports) == self._plan.size and min(self._reports.values()) >= _FEWEST_REPORTS
            if (passed >= self._seconds and have_all) or passed >= self._longest_s:
                raise Enough

    def profile(self) -> Profile | None:
        found = profile_of(self._events, self._plan) if self._plan is not None else None
        return None if found is None else dataclasses.replace(found, memory_bytes=self._memory_bytes)

    def fact(self) -> Fact | None:
        """What a step took, as a mean."""
        reader = ProfileReader()
        for event in self._events:
            reader.add(event)
        found = reader.fact()
        return None if found is None else dataclasses.replace(found, memory_bytes=self._memory_bytes)

    def close(self) -> None: ...


class Probing:
    """An observer of a run that is to reach an accuracy: it ends the run there, or when the time is over."""

    def __init__(self, target: float, seconds: float, train_samples: int) -> None:
        self._target, self._seconds, self._train_samples = target, seconds, train_samples
        self._first_s = 0.0
        self.points: list[Point] = []

    def on_event(self, event: Event) -> None:
        if isinstance(event, Progress):
            self._first_s = self._first_s or time.monotonic()
        if isinstance(event, Evaluated) and (accuracy := event.metrics.get("test/accuracy")) is not None:
            self.points.append(Point(event.epoch * self._train_samples, accuracy))
            if accuracy >= self._target:
                raise Enough
        if self._first_s and time.monotonic() - self._first_s >= self._seconds:
            raise Enough

    def close(self) -> None: ...


def resident_bytes(pid: int) -> int:
    """The largest resident memory of a process on this machine so far; 0 if it is gone, or the system does not say."""
    with suppress(OSError):
        found = re.search(r"^VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    return 0


def _agree(one: Profile, other: Profile) -> bool:
    return abs(one.compute_s.mid - other.compute_s.mid) <= _AGREE * one.compute_s.mid


def _traffic(strategy: str, shapes: ModelShapes, workers: int) -> tuple[Traffic, ...]:
    return read_strategy(strategy).method.traffic(shapes, workers) or ()


def measure_coding(
    methods: Mapping[str, Any], shapes: ModelShapes, workers: int, say: Say, *, threads: int = 1
) -> dict[str, Range]:
    """Seconds to encode all parameters once, with as many threads as a worker has; decoding takes about as long."""
    import torch

    encodings = {each.encoding for method in methods.values() for each in method.traffic(shapes, workers) or ()}
    found = {}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for how in encodings - {Exact()}:
            codec = getattr(how, "codec", None)
            if codec is not None:
                say(f"Measuring the encoding {type(how).__name__}.")
                found[str(how)] = Range.of(_times_of(codec(), torch.randn(shapes.numel)))
    finally:
        torch.set_num_threads(before)
    return found


def _times_of(codec: Any, values: Any) -> list[float]:
    times = []
    for _ in range(_CODING_ROUNDS):
        began = time.perf_counter()
        codec.decode(codec.encode(values), values.numel())
        times.append((time.perf_counter() - began) / 2)
    return times[1:]
