"""What a run's strategy did, from its events: exchanges, bytes, staleness, disagreement, tournaments.

Here: `StrategyAccount` and `account_of`, a pure fold over the events of a run that is live, finished or crashed. Not
here: how it is shown (`strategy_report.py`), and who emits the events (`telemetry/strategy_log.py`).

A run directory may hold several starts. Work that was done twice was also sent twice, so what is counted (steps,
exchanges, bytes, staleness) counts all of it, and what it is divided by does so, too. What tells how the model came
about (disagreement, switches, tournament) begins again behind the checkpoint that the run went on from.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from syncline.telemetry.events import (
    Contest,
    Event,
    Exchanged,
    Progress,
    RunEnded,
    RunStarted,
    StrategySwitched,
    Summary,
    WorkerReady,
)
from syncline.view.state import History, PlanFacts
from syncline.view.words import clean

__all__ = [
    "Ancestor", "Match", "Round", "Staleness", "StrategyAccount", "Switch", "Verdict", "WorkerShare", "account_of",
    "best_of_last_round",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WorkerShare:
    """What one worker did, over all starts of the run."""

    rank: int
    steps: int = 0
    exchanges: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass(frozen=True)
class Staleness:
    """How many others' updates had been applied since the parameters of an update were read: the histogram."""

    counts: Mapping[int, int]

    @property
    def updates(self) -> int:
        """How many updates there are in the histogram."""
        return sum(self.counts.values())

    @property
    def mean(self) -> float:
        """The mean staleness of an update."""
        return sum(staleness * n for staleness, n in self.counts.items()) / self.updates

    @property
    def most(self) -> int:
        """The staleness of the stalest update."""
        return max(self.counts)

    def quantile(self, fraction: float) -> int:
        """The least staleness that this fraction of the updates does not exceed."""
        needed, seen = fraction * self.updates, 0
        for staleness, n in sorted(self.counts.items()):
            seen += n
            if seen >= needed:
                return staleness
        return self.most  # only rounding gets here


class Switch(NamedTuple):
    """From this step on, another strategy."""

    step: int
    strategy: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one of the two workers of a match found, by its own data, and did."""

    own_score: float
    rival_score: float
    took_over: bool
    hyperparameters: Mapping[str, float]

    @property
    def score(self) -> float:
        """Of the model that it goes on with."""
        return self.rival_score if self.took_over else self.own_score


@dataclass(frozen=True, kw_only=True)
class Match:
    """Two models met. Each worker decides for itself, so each has a verdict; None: it did not live to tell."""

    workers: tuple[int, int]
    verdicts: tuple[Verdict | None, Verdict | None]

    @property
    def winner(self) -> int | None:
        """The side (0 or 1) whose model both go on with; None if each kept its own or they swapped."""
        match [verdict and verdict.took_over for verdict in self.verdicts]:
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
    """A worker that held a model, and the round in which it took it over; None: it began there."""

    rank: int
    round: int | None


@dataclass(frozen=True, kw_only=True)
class StrategyAccount:
    """What the strategy of a run did."""

    run: str
    """What is trained: `lenet on mnist`."""
    strategy: str
    workers: int
    status: Literal["no events", "not ended", "finished", "ended early"]
    steps: int
    """How far the run has come."""
    samples: int
    """How many samples all workers trained on, those that were done again included."""
    shares: tuple[WorkerShare, ...]
    expected_bytes_per_step: float | None
    """What one worker sends in a step by theory, on average; None if neither workers nor plan say."""
    staleness: Staleness | None
    disagreement: tuple[tuple[int, float], ...]
    """(step, how far the workers were from what they have in common, on average and relative to that)."""
    switches: tuple[Switch, ...]
    rounds: tuple[Round, ...]

    @property
    def exchanges(self) -> int:
        """Of all workers together."""
        return sum(s.exchanges for s in self.shares)

    @property
    def bytes_sent(self) -> int:
        """By all workers together."""
        return sum(s.bytes_sent for s in self.shares)

    @property
    def bytes_received(self) -> int:
        """By all workers together, from servers."""
        return sum(s.bytes_received for s in self.shares)

    @property
    def bytes_sent_per_step(self) -> float | None:
        """What one worker sends in one of its steps, on average."""
        return self._per_step(self.bytes_sent)

    @property
    def bytes_received_per_step(self) -> float | None:
        """What one worker receives in one of its steps, on average."""
        return self._per_step(self.bytes_received)

    @property
    def bytes_per_sample(self) -> float | None:
        """Sent and received, by all workers together, for each sample that was trained on."""
        return (self.bytes_sent + self.bytes_received) / self.samples if self.shares and self.samples else None

    @property
    def ancestry(self) -> tuple[Ancestor, ...]:
        """Through whose hands the model went that has the best score after the last round, oldest first."""
        best = best_of_last_round(self.rounds)
        if best is None:
            return ()
        path, rank = list[Ancestor](), best[0]
        for round_ in reversed(self.rounds):
            rival = _taken_from(round_, rank)
            if rival is not None:
                path.append(Ancestor(rank, round_.number))
                rank = rival
        return (Ancestor(rank, None), *reversed(path))

    @property
    def origins(self) -> dict[int, int]:
        """For each worker of a tournament, where the model it now holds began."""
        origins: dict[int, int] = {}
        for round_ in self.rounds:
            ranks = [rank for match in round_.matches for rank in match.workers]
            before = {rank: origins.get(rank, rank) for rank in ranks}
            for rank in ranks:
                rival = _taken_from(round_, rank)
                origins[rank] = before[rank if rival is None else rival]
        return origins

    def to_dict(self) -> dict[str, Any]:
        """As plain data, everything that the text tells included."""
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


def account_of(events: Iterable[Event]) -> StrategyAccount:
    """What the events of a run say about its strategy; they may end anywhere."""
    fold = _Fold()
    for event in events:
        fold.apply(event)
    return fold.account()


@dataclass
class _Share:
    steps: int = 0
    exchanges: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass
class _Fold:
    plan: PlanFacts = field(default_factory=PlanFacts)
    expected: float | None = None
    status: Literal["no events", "not ended", "finished", "ended early"] = "no events"
    step: int = 0
    samples: int = 0
    shares: dict[int, _Share] = field(default_factory=dict)
    staleness: Counter[int] = field(default_factory=Counter)
    distances: list[tuple[int, int, float]] = field(default_factory=list)
    switches: list[Switch] = field(default_factory=list)
    contests: dict[tuple[int, int], Contest] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        if self.status == "no events":
            self.status = "not ended"
        match event:
            case RunStarted():
                self._on_started(event)
            case WorkerReady():
                # It has the model before it; a plan can only know if somebody counted the parameters beforehand.
                self.expected = _positive(event.expected_bytes_per_step) or self.expected
            case Progress():
                self.samples += event.samples
                self.step = max(self.step, event.step)
            case Exchanged():
                self._on_exchanged(event)
            case Contest():
                self.contests[event.round, event.rank] = event
            case StrategySwitched():
                switch = Switch(event.step, clean(event.strategy))
                if switch not in self.switches:  # every worker may tell of it
                    self.switches.append(switch)
            case RunEnded():
                self.status = "ended early"
            case Summary():
                self.status = "ended early" if event.stopped_early else "finished"
                self.step = max(self.step, event.steps)

    def account(self) -> StrategyAccount:
        return StrategyAccount(
            run=self.plan.title,
            strategy=clean(self.plan.strategy),
            workers=self.plan.workers or len(self.shares),
            status=self.status,
            steps=self.step,
            samples=self.samples,
            shares=tuple(WorkerShare(rank=rank, **asdict(share)) for rank, share in sorted(self.shares.items())),
            expected_bytes_per_step=self.expected,
            staleness=Staleness(dict(sorted(self.staleness.items()))) if self.staleness.total() else None,
            disagreement=tuple(_averaged(self.distances)),
            switches=tuple(sorted(self.switches, key=lambda s: s.step)),
            rounds=tuple(_rounds(self.contests.values())),
        )

    def _on_started(self, event: RunStarted) -> None:
        step, before = event.resumed_from_step or 0, self.plan
        self.plan = PlanFacts.of(event.plan)
        self.expected = _positive(event.plan.get("expected_bytes_per_step"))
        self.status = "not ended"
        self.step = step
        self.distances = [d for d in self.distances if d[0] <= step]
        self.switches = [s for s in self.switches if s.step <= step]
        self.contests = {key: c for key, c in self.contests.items() if c.step <= step}
        if before.strategy and before.strategy != self.plan.strategy:  # a run may go on with other settings
            self.switches.append(Switch(step, clean(self.plan.strategy)))

    def _on_exchanged(self, event: Exchanged) -> None:
        share = self.shares.setdefault(event.rank, _Share())
        share.steps += event.steps
        share.exchanges += event.exchanges
        share.bytes_sent += event.bytes_sent
        share.bytes_received += event.bytes_received
        self.staleness.update(event.staleness)
        self.step = max(self.step, event.step)
        if event.disagreement is not None and math.isfinite(event.disagreement):
            self.distances.append((event.step, event.rank, event.disagreement))


def _averaged(distances: Iterable[tuple[int, int, float]]) -> list[tuple[int, float]]:
    """At each step, the mean over the workers of what each was last seen at: they need not report at the same steps."""
    history, last = History(), dict[int, float]()
    ordered = sorted(distances, key=lambda d: d[0])
    for i, (step, rank, value) in enumerate(ordered):
        last[rank] = value
        if i + 1 == len(ordered) or ordered[i + 1][0] != step:
            history.add(step, sum(last.values()) / len(last))
    return history.points


def _rounds(contests: Iterable[Contest]) -> Iterator[Round]:
    """Both sides of a match told of it, or only one if the other crashed before it could."""
    matches: dict[int, dict[tuple[int, int], dict[int, Contest]]] = {}
    for contest in contests:
        first, second = sorted((contest.rank, contest.rival))
        sides = matches.setdefault(contest.round, {}).setdefault((first, second), {})
        sides[contest.rank] = contest
    for round_number, of_round in sorted(matches.items()):
        yield Round(number=round_number, matches=tuple(_match(pair, of_round[pair]) for pair in sorted(of_round)))


def _match(pair: tuple[int, int], told: Mapping[int, Contest]) -> Match:
    first, second = (_verdict(told.get(rank)) for rank in pair)
    return Match(workers=pair, verdicts=(first, second))


def _verdict(told: Contest | None) -> Verdict | None:
    if told is None:
        return None
    return Verdict(
        own_score=told.own_score,
        rival_score=told.rival_score,
        took_over=told.took_over,
        hyperparameters=told.hyperparameters,
    )


def _taken_from(round_: Round, rank: int) -> int | None:
    """Whose model `rank` took over in this round; None if it kept its own."""
    for match in round_.matches:
        if rank in match.workers:
            side = match.workers.index(rank)
            verdict = match.verdicts[side]
            # One that did not live to tell is taken to have found what its rival found.
            took_over = verdict.took_over if verdict else match.winner == 1 - side
            return match.workers[1 - side] if took_over else None
    return None


def best_of_last_round(rounds: Sequence[Round]) -> tuple[int, Verdict] | None:
    """Who goes on with the best model after the last round, by its own verdict."""
    told = [v for r in rounds for m in r.matches for v in m.verdicts if v is not None]
    last = [
        (rank, verdict)
        for round_ in rounds[-1:]
        for match in round_.matches
        for rank, verdict in zip(match.workers, match.verdicts, strict=True)
        if verdict is not None and not math.isnan(verdict.score)
    ]
    # A score may be a loss or an accuracy; what the workers chose tells which way is up.
    lower = sum((v.rival_score < v.own_score) == v.took_over for v in told if v.rival_score != v.own_score)
    higher = sum((v.rival_score > v.own_score) == v.took_over for v in told if v.rival_score != v.own_score)
    sign = 1 if lower >= higher else -1
    # Of the two that go on with the same model, the one that trained it.
    return min(last, key=lambda found: (sign * found[1].score, found[1].took_over), default=None)


def _positive(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) and value > 0 else None
