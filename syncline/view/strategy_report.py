"""`syncline strategies --run RUN`: what the strategy of a run did, as told by the run's events.

Here: `account_of`, a pure fold from events to a `StrategyAccount`, and that account as text and as plain data. Not
here: who emits the events (strategies and workers) and where they are read from (`telemetry/run_dir.py`).

A run directory may hold several starts. Work that was done twice was also sent twice, so what is counted (steps,
exchanges, bytes, staleness) counts all of it, and what it is divided by does so, too. What tells how the model came
about (disagreement, switches, tournament) begins again behind the checkpoint that the run went on from.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, TextIO

import msgspec

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
from syncline.view.curve import chart
from syncline.view.state import History, PlanFacts
from syncline.view.stream import unbreakable
from syncline.view.words import clean, count, number, size

__all__ = [
    "Ancestor", "Match", "Round", "Staleness", "StrategyAccount", "Switch", "Verdict", "WorkerShare", "account_of",
    "as_json", "as_lines", "show",
]  # fmt: skip

WIDTH = 80
_MOST_WIDTH = 100
_CHART_HEIGHT = 5
_MOST_BARS = 12
_MOST_ROUNDS = 20
_MOST_SHARES = 16
_AS_EXPECTED = 0.0005
"""Below that the difference would read as 0.0%."""


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
        best = _best_of_last_round(self.rounds)
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


def as_json(account: StrategyAccount) -> str:
    """As one JSON object on one line; a number that is not finite becomes null."""
    return msgspec.json.encode(account.to_dict()).decode()


def as_lines(account: StrategyAccount, *, width: int = WIDTH, ascii_only: bool = False) -> list[str]:
    """As plain text, no line longer than `width`."""
    return [line.text for line in _lines(account, width, ascii_only)]


def show(account: StrategyAccount, stream: TextIO) -> None:
    """Write it: with colours to a terminal that can show them, else as plain text in 80 columns."""
    out = unbreakable(stream)
    ascii_only = not out.encoding.lower().startswith("utf")
    if out.isatty():
        from rich.text import Text

        from syncline.view.live import terminal

        console = terminal(out)
        if not console.is_dumb_terminal:
            # One column is left free: some terminals break the line after writing into the last one.
            for line in _lines(account, min(console.width - 1, _MOST_WIDTH), ascii_only):
                console.print(Text(line.text, line.style, no_wrap=True, overflow="crop"))
            return
    out.write("".join(f"{line}\n" for line in as_lines(account, ascii_only=ascii_only)))
    out.flush()


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


def _best_of_last_round(rounds: Sequence[Round]) -> tuple[int, Verdict] | None:
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


class _Line(NamedTuple):
    text: str
    style: str = ""


def _lines(account: StrategyAccount, width: int, ascii_only: bool) -> Iterator[_Line]:
    width = max(width, 40)
    yield from _wrapped(_title(account), width, style="bold")
    nothing = _why_nothing(account)
    if nothing:
        yield _Line("")
        yield from _wrapped(nothing, width)
        return
    for section in (
        _exchanges(account, width),
        _switches(account, width),
        _staleness(account, width, ascii_only),
        _disagreement(account, width, ascii_only),
        _tournament(account, width),
    ):
        for i, line in enumerate(section):
            if i == 0:
                yield _Line("")
            yield line


def _title(account: StrategyAccount) -> str:
    if account.status == "no events":
        return "No events yet"
    steps = count(account.steps, "step")
    state = {"finished": f"finished after {steps}", "ended early": f"ended after {steps}, before its time"}
    parts = [account.run, count(account.workers, "worker"), account.strategy]
    return f"{', '.join(part for part in parts if part)}: {state.get(account.status, f'{steps} so far')}"


def _why_nothing(account: StrategyAccount) -> str | None:
    if account.status == "no events":
        return "Nothing has been written to events.jsonl: the run is only just starting, or never got so far."
    if account.shares and account.workers != 1:
        return None
    if account.rounds or account.exchanges:
        return None
    if account.workers == 1:
        return "One worker trains by itself: there is nobody to agree with, so nothing was exchanged."
    if account.status == "not ended":
        return (
            "No worker has told of an exchange yet: they do so every so often. If the run is not alive any more, it "
            "ended before that."
        )
    return (
        "No worker told of an exchange: the run ended before the first one, or was made by a Syncline that did not "
        "record them."
    )


def _exchanges(account: StrategyAccount, width: int) -> Iterator[_Line]:
    shares = account.shares
    if not shares:
        return
    yield _Line("Exchanges", "bold")
    has_received = account.bytes_received > 0
    yield _Line(f"{'worker':>8}{'steps':>12}{'exchanges':>12}{'sent':>12}" + f"{'received':>12}" * has_received, "dim")
    # Of very many workers the first ones are an example; a sentence below tells the range.
    for share in shares[:_MOST_SHARES]:
        row = f"{share.rank:>8}{share.steps:>12,}{share.exchanges:>12,}{size(share.bytes_sent):>12}"
        yield _Line(row + f"{size(share.bytes_received):>12}" * has_received)
    if len(shares) > _MOST_SHARES:
        yield _Line(f"{'...':>8}  {len(shares) - _MOST_SHARES} more workers are in the output of --json", "dim")
    yield from _wrapped(" ".join(_exchange_sentences(account)), width)


def _exchange_sentences(account: StrategyAccount) -> Iterator[str]:
    steps = sum(s.steps for s in account.shares)
    if not account.exchanges:
        yield f"There was no exchange in {count(account.steps, 'step')}."
        return
    if steps:
        apart = steps / account.exchanges
        yield "They exchange in every step." if apart == 1 else f"An exchange every {apart:.3g} steps."
    if not account.bytes_sent + account.bytes_received:
        yield "Nothing had to be sent for that."
        return
    sent, received, expected = (
        account.bytes_sent_per_step, account.bytes_received_per_step, account.expected_bytes_per_step,
    )  # fmt: skip
    if sent is not None:
        also = f" and receives {size(round(received))}" if received else ""
        # Theory is about one strategy; where there are several, one after the other, the mean is about all of them.
        is_one = not account.switches and ", then " not in account.strategy
        judged = _against_theory(sent, expected) if expected is not None and is_one else ""
        yield f"A worker sends {size(round(sent))}{judged}{also} a step."
    per_sample = account.bytes_per_sample
    total = size(account.bytes_sent + account.bytes_received)
    if per_sample is not None:
        amount = size(round(per_sample)) if per_sample >= 10 else f"{per_sample:.2g} bytes"
        yield f"All workers together move {amount} a sample, {total} in all."
    else:
        yield f"All workers together moved {total}."


def _against_theory(measured: float, expected: float) -> str:
    off = measured / expected - 1
    if abs(off) < _AS_EXPECTED:
        return " (as in theory)"
    how = f"{1 + off:.3g} times" if off > 1 else f"{100 * abs(off):.1f}% {'more' if off > 0 else 'less'} than"
    return f" ({how} the {size(round(expected))} of theory)"


def _switches(account: StrategyAccount, width: int) -> Iterator[_Line]:
    if account.switches:
        yield _Line("Switches", "bold")
        for switch in account.switches:
            yield from _wrapped(f"from step {switch.step:,} on: {switch.strategy}", width, indent="  ")


def _staleness(account: StrategyAccount, width: int, ascii_only: bool) -> Iterator[_Line]:
    found = account.staleness
    if found is None:
        return
    yield _Line("Staleness", "bold")
    yield from _wrapped("How many updates of others were applied between reading and updating:", width, style="dim")
    bars = _bars(found)
    labels, counts = [label for label, _ in bars], [f"{n:,}" for _, n in bars]
    label_width, count_width = max(map(len, labels)), max(map(len, counts))
    room = width - 2 - label_width - 2 - 2 - count_width - 2 - 6
    most = max(n for _, n in bars)
    for label, text, (_, n) in zip(labels, counts, bars, strict=True):
        bar = _bar(n / most, room, ascii_only)
        yield _Line(f"  {label:>{label_width}}  {bar:<{room}}  {text:>{count_width}}  {_percent(n / found.updates):>6}")
    yield from _wrapped(
        f"mean {found.mean:.3g}, median {found.quantile(0.5)}, 99% within {found.quantile(0.99)}, "
        f"at most {found.most}, in {count(found.updates, 'update')}",
        width,
    )


def _bars(found: Staleness) -> list[tuple[str, int]]:
    """(label, how many): a bar for each staleness, or for each range of equal width if that were too many."""
    span = found.most + 1
    each = -(-span // _MOST_BARS)
    bars = []
    for low in range(0, span, each):
        n = sum(found.counts.get(staleness, 0) for staleness in range(low, low + each))
        bars.append((str(low) if each == 1 else f"{low}-{low + each - 1}", n))
    return bars


def _bar(part: float, room: int, ascii_only: bool) -> str:
    """Something is never drawn as nothing."""
    if part <= 0:
        return ""
    if ascii_only:
        return "#" * max(round(part * room), 1)
    whole, eighths = divmod(max(round(part * room * 8), 1), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[eighths].strip()


def _percent(part: float) -> str:
    return "<0.1%" if 0 < part < 0.0005 else f"{100 * part:.1f}%"


def _disagreement(account: StrategyAccount, width: int, ascii_only: bool) -> Iterator[_Line]:
    points = account.disagreement
    if not points:
        return
    yield _Line("Disagreement", "bold")
    (first, first_value), (last, last_value) = points[0], points[-1]
    # Without a range there is nothing to draw: one value is a sentence.
    values = [value for _, value in points]
    if min(values) == max(values):
        yield from _wrapped(
            f"Before an exchange the workers were {_share_of(last_value)} away from what they have in common.", width
        )
        return
    what = "How far the workers are from what they have in common, before an exchange:"
    yield from _wrapped(what, width, style="dim")
    rows = chart(
        values, width, _CHART_HEIGHT, first=f"step {first:,}", last=f"step {last:,}", label=_share_of,
        ascii_only=ascii_only,
    )  # fmt: skip
    for i, row in enumerate(rows):
        yield _Line(row.rstrip(), "" if i < _CHART_HEIGHT else "dim")
    yield _Line(f"{_share_of(first_value)} at first, {_share_of(last_value)} at last, at most {_share_of(max(values))}")


def _share_of(relative: float) -> str:
    """A distance relative to what it is a distance from: `1.23%`, `0.00012%`."""
    percent = 100 * relative
    return f"{percent:.3g}%" if percent < 1000 else f"{number(relative)} times"


def _tournament(account: StrategyAccount, width: int) -> Iterator[_Line]:
    rounds = account.rounds
    if not rounds:
        return
    matches = [match for round_ in rounds for match in round_.matches]
    taken = sum(verdict is not None and verdict.took_over for match in matches for verdict in match.verdicts)
    yield _Line("Tournament", "bold")
    times = {0: "no model was taken over", 1: "one model was taken over"}.get(taken, f"{taken} models were taken over")
    yield from _wrapped(f"{count(len(rounds), 'round')}, {_contests(len(matches))}; {times}", width, style="dim")
    is_long = len(rounds) > _MOST_ROUNDS
    shown = [*rounds[:3], None, *rounds[3 - _MOST_ROUNDS :]] if is_long else [*rounds]
    digits = len(str(rounds[-1].number))
    for round_ in shown:
        if round_ is None:
            yield _Line(f"  ... {len(rounds) - _MOST_ROUNDS} rounds more; --json has them all", "dim")
        else:
            text = "; ".join(_match_in_words(match) for match in round_.matches)
            head = f"round {round_.number:>{digits}}: "
            yield from _wrapped(head + text, width, indent=" " * len(head))
    yield from _wrapped(_winner_in_words(account), width)


def _contests(amount: int) -> str:
    return "1 contest" if amount == 1 else f"{amount:,} contests"


def _match_in_words(match: Match) -> str:
    """`0 beat 2 (0.112 < 0.131)`, as the loser saw it: it is the one that changed its mind."""
    first, second = match.verdicts
    side = match.winner
    if side is None:
        assert first is not None, "one verdict alone names a winner"
        assert second is not None, "one verdict alone names a winner"
        did = "took each other's" if first.took_over else "each kept its own"
        seen = ", ".join(_compared(v.own_score, v.rival_score) for v in (first, second))
        return f"{match.workers[0]} and {match.workers[1]} {did} ({seen})"
    winner, loser = match.workers[side], match.workers[1 - side]
    of_winner, of_loser = match.verdicts[side], match.verdicts[1 - side]
    if of_loser is not None:
        return f"{winner} beat {loser} ({_compared(of_loser.rival_score, of_loser.own_score)})"
    assert of_winner is not None, "somebody told of the match"
    return f"{winner} beat {loser} ({_compared(of_winner.own_score, of_winner.rival_score)})"


def _compared(a: float, b: float) -> str:
    """With as many digits as it takes to see that they differ."""
    sign = "<" if a < b else ">" if a > b else "=" if a == b else "against"
    for digits in range(3, 9):
        left, right = f"{a:.{digits}g}", f"{b:.{digits}g}"
        if left != right or a == b:
            break
    return f"{left} {sign} {right}"


def _winner_in_words(account: StrategyAccount) -> str:
    best, ancestry = _best_of_last_round(account.rounds), account.ancestry
    if best is None:
        return "No model of the last round has a score."
    rank, verdict = best
    settings = "".join(f", {clean(name)} {number(value)}" for name, value in verdict.hyperparameters.items())
    sentences = [f"Best after the last round: worker {rank} ({number(verdict.score)}{settings})."]
    path = " -> ".join(str(a.rank) if a.round is None else f"{a.rank} (round {a.round})" for a in ancestry)
    origin = ancestry[0].rank
    if len(ancestry) == 1:
        sentences.append("Its model was its own all along.")
    else:
        sentences.append(f"Its model began with worker {origin}: {path}.")
    holders = [r for r, o in account.origins.items() if o == origin]
    if len(holders) == len(account.origins):
        sentences.append(f"All {len(holders)} workers go on with descendants of worker {origin}'s model.")
    else:
        sentences.append(f"{len(holders)} of {len(account.origins)} workers go on with descendants of that model.")
    return " ".join(sentences)


def _wrapped(text: str, width: int, *, indent: str = "", style: str = "") -> Iterator[_Line]:
    for line in textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False):
        yield _Line(line, style)
