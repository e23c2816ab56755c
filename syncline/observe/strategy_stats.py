"""What a run's strategy did, from its events: exchanges, bytes, staleness, disagreement, tournaments.

Here: `StrategyStats` and `strategy_stats`, a pure fold over the events of a live, finished or crashed run. Not here:
its text form (`terminal/strategy_report.py`), or emitting the events (`telemetry/strategy_log.py`).

A run directory may hold several starts. Counters (steps, exchanges, bytes, staleness) include work that was repeated
after a resume, because it was also sent again. The history of the model (disagreement, switches, tournament) continues
from the checkpoint that the run resumed from.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from syncline.observe.formatting import clean
from syncline.observe.history import History
from syncline.observe.plan_facts import PlanFacts
from syncline.telemetry.events import (
    Event,
    ExchangeStats,
    Progress,
    RunEnded,
    RunStarted,
    StrategySwitched,
    Summary,
    TournamentMatch,
    WorkerReady,
)


@dataclass(kw_only=True)
class WorkerShare:
    """One worker's totals, over all starts of the run."""

    worker_id: int
    steps: int = 0
    exchanges: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass(frozen=True)
class Staleness:
    """A histogram: how many updates of others were applied between reading the parameters and updating them."""

    counts: Mapping[int, int]

    @property
    def updates(self) -> int:
        return sum(self.counts.values())

    @property
    def mean(self) -> float:
        return sum(staleness * n for staleness, n in self.counts.items()) / self.updates

    @property
    def most(self) -> int:
        return max(self.counts)

    def quantile(self, fraction: float) -> int:
        """The smallest staleness that this fraction of the updates does not exceed."""
        needed, seen = fraction * self.updates, 0
        for staleness, n in sorted(self.counts.items()):
            seen += n
            if seen >= needed:
                return staleness
        return self.most  # only rounding gets here


class Switch(NamedTuple):
    """The strategy from this step on."""

    step: int
    strategy: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The scores that one worker of a match measured on its own data, and its decision."""

    own_score: float
    opponent_score: float
    adopted: bool
    hyperparameters: Mapping[str, float]

    @property
    def score(self) -> float:
        """Of the model that it continues with."""
        return self.opponent_score if self.adopted else self.own_score


@dataclass(frozen=True, kw_only=True)
class Match:
    """Two models compete. Each worker decides for itself; a worker that failed has no verdict."""

    workers: tuple[int, int]
    verdicts: tuple[Verdict | None, Verdict | None]

    @property
    def winner(self) -> int | None:
        """The side (0 or 1) whose model both continue with; None if both kept theirs or both swapped."""
        match [verdict and verdict.adopted for verdict in self.verdicts]:
            case [True, False | None] | [None, False]:
                return 1
            case [False | None, True] | [False, None]:
                return 0
        return None


@dataclass(frozen=True, kw_only=True)
class Round:
    """All matches of one round of a tournament."""

    number: int
    matches: tuple[Match, ...]


class Ancestor(NamedTuple):
    """A worker that held a model, and the round in which it adopted it; None if the model started there."""

    worker_id: int
    round: int | None


@dataclass(frozen=True, kw_only=True)
class StrategyStats:
    """The totals of a run's strategy."""

    run: str
    """The task: `lenet on mnist`."""
    strategy: str
    workers: int
    status: Literal["no events", "not ended", "finished", "ended early"]
    steps: int
    samples: int
    """Samples trained on by all workers, including repeated ones."""
    shares: tuple[WorkerShare, ...]
    expected_bytes_per_step: float | None
    """Theoretical bytes that one worker sends per step; None if unknown."""
    staleness: Staleness | None
    disagreement: tuple[tuple[int, float], ...]
    """(step, mean relative distance of the workers' parameters from their average)."""
    switches: tuple[Switch, ...]
    rounds: tuple[Round, ...]

    @property
    def exchanges(self) -> int:
        return sum(s.exchanges for s in self.shares)

    @property
    def bytes_sent(self) -> int:
        return sum(s.bytes_sent for s in self.shares)

    @property
    def bytes_received(self) -> int:
        """By all workers, from servers."""
        return sum(s.bytes_received for s in self.shares)

    @property
    def bytes_sent_per_step(self) -> float | None:
        return self._per_step(self.bytes_sent)

    @property
    def bytes_received_per_step(self) -> float | None:
        return self._per_step(self.bytes_received)

    @property
    def bytes_per_sample(self) -> float | None:
        """Sent and received by all workers, per sample trained on."""
        return (self.bytes_sent + self.bytes_received) / self.samples if self.shares and self.samples else None

    @property
    def ancestry(self) -> tuple[Ancestor, ...]:
        """The workers that held the best model of the last round, oldest first."""
        best = best_of_last_round(self.rounds)
        if best is None:
            return ()
        path, worker_id = list[Ancestor](), best[0]
        for round_ in reversed(self.rounds):
            opponent = _taken_from(round_, worker_id)
            if opponent is not None:
                path.append(Ancestor(worker_id, round_.number))
                worker_id = opponent
        return (Ancestor(worker_id, None), *reversed(path))

    @property
    def origins(self) -> dict[int, int]:
        """For each worker of a tournament, the worker where its current model started."""
        origins: dict[int, int] = {}
        for round_ in self.rounds:
            worker_ids = [worker_id for match in round_.matches for worker_id in match.workers]
            before = {worker_id: origins.get(worker_id, worker_id) for worker_id in worker_ids}
            for worker_id in worker_ids:
                opponent = _taken_from(round_, worker_id)
                origins[worker_id] = before[worker_id if opponent is None else opponent]
        return origins

    def to_dict(self) -> dict[str, Any]:
        """As plain data, including everything that the text form shows."""
        data = asdict(self)
        data["disagreement"] = [list(point) for point in self.disagreement]
        data["switches"] = [switch._asdict() for switch in self.switches]
        for name in (
            "exchanges", "bytes_sent", "bytes_received", "bytes_sent_per_step", "bytes_received_per_step",
            "bytes_per_sample",
        ):  # fmt: skip
            data[name] = getattr(self, name)
        found = self.staleness
        if found is not None:
            data["staleness"] = {
                "counts": dict(sorted(found.counts.items())), "updates": found.updates, "mean": found.mean,
                "median": found.quantile(0.5), "p99": found.quantile(0.99), "most": found.most,
            }  # fmt: skip
        data["ancestry"] = [ancestor._asdict() for ancestor in self.ancestry]
        data["origins"] = self.origins
        return data

    def _per_step(self, amount: int) -> float | None:
        steps = sum(s.steps for s in self.shares)
        return amount / steps if steps else None


def strategy_stats(events: Iterable[Event]) -> StrategyStats:
    """Fold the events of a run, which may be incomplete."""
    fold = _Fold()
    for event in events:
        fold.apply(event)
    return fold.stats()


@dataclass
class _Fold:
    plan: PlanFacts = field(default_factory=PlanFacts)
    expected: float | None = None
    status: Literal["no events", "not ended", "finished", "ended early"] = "no events"
    step: int = 0
    samples: int = 0
    shares: dict[int, WorkerShare] = field(default_factory=dict)
    staleness: Counter[int] = field(default_factory=Counter)
    distances: list[tuple[int, int, float]] = field(default_factory=list)
    switches: list[Switch] = field(default_factory=list)
    matches: dict[tuple[int, int], TournamentMatch] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        if self.status == "no events":
            self.status = "not ended"
        match event:
            case RunStarted():
                self._on_started(event)
            case WorkerReady():
                # The worker knows the model; the plan knows its size only if the card states it.
                self.expected = _positive(event.expected_bytes_per_step) or self.expected
            case Progress():
                self.samples += event.samples
                self.step = max(self.step, event.step)
            case ExchangeStats():
                self._on_exchanged(event)
            case TournamentMatch():
                self.matches[event.round, event.worker_id] = event
            case StrategySwitched():
                switch = Switch(event.step, clean(event.strategy))
                if switch not in self.switches:  # several workers may report it
                    self.switches.append(switch)
            case RunEnded():
                self.status = "ended early"
            case Summary():
                self.status = "ended early" if event.stopped_early else "finished"
                self.step = max(self.step, event.steps)

    def stats(self) -> StrategyStats:
        return StrategyStats(
            run=self.plan.title,
            strategy=clean(self.plan.strategy),
            workers=self.plan.workers or len(self.shares),
            status=self.status,
            steps=self.step,
            samples=self.samples,
            shares=tuple(share for _, share in sorted(self.shares.items())),
            expected_bytes_per_step=self.expected,
            staleness=Staleness(dict(sorted(self.staleness.items()))) if self.staleness.total() else None,
            disagreement=tuple(_averaged(self.distances)),
            switches=tuple(sorted(self.switches, key=lambda s: s.step)),
            rounds=tuple(_rounds(self.matches.values())),
        )

    def _on_started(self, event: RunStarted) -> None:
        step, before = event.resumed_from_step or 0, self.plan
        self.plan = PlanFacts.of(event.plan)
        self.expected = _positive(event.plan.get("expected_bytes_per_step"))
        self.status = "not ended"
        self.step = step
        self.distances = [d for d in self.distances if d[0] <= step]
        self.switches = [s for s in self.switches if s.step <= step]
        self.matches = {key: c for key, c in self.matches.items() if c.step <= step}
        if before.strategy and before.strategy != self.plan.strategy:  # a run may be resumed with other settings
            self.switches.append(Switch(step, clean(self.plan.strategy)))

    def _on_exchanged(self, event: ExchangeStats) -> None:
        share = self.shares.setdefault(event.worker_id, WorkerShare(worker_id=event.worker_id))
        share.steps += event.steps
        share.exchanges += event.exchanges
        share.bytes_sent += event.bytes_sent
        share.bytes_received += event.bytes_received
        self.staleness.update(event.staleness)
        self.step = max(self.step, event.step)
        if event.disagreement is not None and math.isfinite(event.disagreement):
            self.distances.append((event.step, event.worker_id, event.disagreement))


def _averaged(distances: Iterable[tuple[int, int, float]]) -> list[tuple[int, float]]:
    """At each step, the mean of each worker's latest value; workers report at different steps."""
    history, last = History(), dict[int, float]()
    ordered = sorted(distances, key=lambda d: d[0])
    for i, (step, worker_id, value) in enumerate(ordered):
        last[worker_id] = value
        if i + 1 == len(ordered) or ordered[i + 1][0] != step:
            history.add(step, sum(last.values()) / len(last))
    return history.points


def _rounds(events: Iterable[TournamentMatch]) -> Iterator[Round]:
    """Pair the events of both sides of a match; one is missing if that worker failed first."""
    matches: dict[int, dict[tuple[int, int], dict[int, TournamentMatch]]] = {}
    for event in events:
        first, second = sorted((event.worker_id, event.opponent_id))
        matches.setdefault(event.round, {}).setdefault((first, second), {})[event.worker_id] = event
    for round_number, of_round in sorted(matches.items()):
        yield Round(number=round_number, matches=tuple(_match(pair, of_round[pair]) for pair in sorted(of_round)))


def _match(pair: tuple[int, int], sides: Mapping[int, TournamentMatch]) -> Match:
    first, second = (_verdict(sides.get(worker_id)) for worker_id in pair)
    return Match(workers=pair, verdicts=(first, second))


def _verdict(event: TournamentMatch | None) -> Verdict | None:
    if event is None:
        return None
    return Verdict(
        own_score=event.own_score,
        opponent_score=event.opponent_score,
        adopted=event.adopted,
        hyperparameters=event.hyperparameters,
    )


def _taken_from(round_: Round, worker_id: int) -> int | None:
    """The worker whose model `worker_id` adopted in this round; None if it kept its own."""
    for match in round_.matches:
        if worker_id in match.workers:
            side = match.workers.index(worker_id)
            verdict = match.verdicts[side]
            # A worker without a verdict is assumed to agree with its opponent's.
            adopted = verdict.adopted if verdict else match.winner == 1 - side
            return match.workers[1 - side] if adopted else None
    return None


def best_of_last_round(rounds: Sequence[Round]) -> tuple[int, Verdict] | None:
    """The worker that holds the best model after the last round, by its own scores."""
    verdicts = [v for r in rounds for m in r.matches for v in m.verdicts if v is not None]
    last = [
        (worker_id, verdict)
        for round_ in rounds[-1:]
        for match in round_.matches
        for worker_id, verdict in zip(match.workers, match.verdicts, strict=True)
        if verdict is not None and not math.isnan(verdict.score)
    ]
    # A score may be a loss or an accuracy: infer which is better from what the workers adopted.
    lower = sum((v.opponent_score < v.own_score) == v.adopted for v in verdicts if v.opponent_score != v.own_score)
    higher = sum((v.opponent_score > v.own_score) == v.adopted for v in verdicts if v.opponent_score != v.own_score)
    sign = 1 if lower >= higher else -1
    # Of the two workers with the same model, prefer the one that trained it.
    return min(last, key=lambda found: (sign * found[1].score, found[1].adopted), default=None)


def _positive(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) and value > 0 else None
