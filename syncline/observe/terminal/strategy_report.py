"""What a run's strategy did, as text: `syncline strategies --run RUN`. Not here: the numbers (`strategy_stats.py`)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import NamedTuple, TextIO

import msgspec

from syncline.observe.formatting import clean, count, number, size
from syncline.observe.strategy_stats import Match, Staleness, StrategyStats, best_of_last_round
from syncline.observe.stream import unbreakable
from syncline.observe.terminal.curve import chart

WIDTH = 80
_MOST_WIDTH = 100
_CHART_HEIGHT = 5
_MOST_BARS = 12
_MOST_ROUNDS = 20
_MOST_SHARES = 16
_AS_EXPECTED = 0.0005
"""Smaller differences would read as 0.0%."""


def as_json(stats: StrategyStats) -> str:
    """As one JSON object on one line; a number that is not finite becomes null."""
    return msgspec.json.encode(stats.to_dict()).decode()


def as_lines(stats: StrategyStats, *, width: int = WIDTH, ascii_only: bool = False) -> list[str]:
    """As plain text, no line longer than `width`."""
    return [line.text for line in _lines(stats, width, ascii_only)]


def show(stats: StrategyStats, stream: TextIO) -> None:
    """Write it: with colors to a terminal that can show them, else as plain text in 80 columns."""
    out = unbreakable(stream)
    ascii_only = not out.encoding.lower().startswith("utf")
    if out.isatty():
        from rich.text import Text

        from syncline.observe.terminal.live_view import terminal

        console = terminal(out)
        if not console.is_dumb_terminal:
            # Leave one column free: some terminals wrap after the last one.
            for line in _lines(stats, min(console.width - 1, _MOST_WIDTH), ascii_only):
                console.print(Text(line.text, line.style, no_wrap=True, overflow="crop"))
            return
    out.write("".join(f"{line}\n" for line in as_lines(stats, ascii_only=ascii_only)))
    out.flush()


class _Row(NamedTuple):
    text: str
    style: str = ""


def _lines(stats: StrategyStats, width: int, ascii_only: bool) -> Iterator[_Row]:
    width = max(width, 40)
    yield from _wrapped(_title(stats), width, style="bold")
    nothing = _why_nothing(stats)
    if nothing:
        yield _Row("")
        yield from _wrapped(nothing, width)
        return
    for section in (
        _exchanges(stats, width),
        _switches(stats, width),
        _staleness(stats, width, ascii_only),
        _disagreement(stats, width, ascii_only),
        _tournament(stats, width),
    ):
        for i, line in enumerate(section):
            if i == 0:
                yield _Row("")
            yield line


def _title(stats: StrategyStats) -> str:
    if stats.status == "no events":
        return "No events yet"
    steps = count(stats.steps, "step")
    state = {"finished": f"finished after {steps}", "ended early": f"ended early after {steps}"}
    parts = [stats.run, count(stats.workers, "worker"), stats.strategy]
    return f"{', '.join(part for part in parts if part)}: {state.get(stats.status, f'{steps} so far')}"


def _why_nothing(stats: StrategyStats) -> str | None:
    if stats.status == "no events":
        return "events.jsonl is empty: the run is starting, or failed before its first event."
    if stats.shares and stats.workers != 1:
        return None
    if stats.rounds or stats.exchanges:
        return None
    if stats.workers == 1:
        return "With one worker there is nothing to exchange."
    if stats.status == "not ended":
        return (
            "No exchange recorded yet; workers report them about once a second. If the run is no longer live, it ended "
            "before the first report."
        )
    return "No exchange recorded: the run ended before the first one, or an older version of Syncline made it."


def _exchanges(stats: StrategyStats, width: int) -> Iterator[_Row]:
    shares = stats.shares
    if not shares:
        return
    yield _Row("Exchanges", "bold")
    has_received = stats.bytes_received > 0
    yield _Row(f"{'worker':>8}{'steps':>12}{'exchanges':>12}{'sent':>12}" + f"{'received':>12}" * has_received, "dim")
    # Of many workers, show only the first ones.
    for share in shares[:_MOST_SHARES]:
        row = f"{share.worker_id:>8}{share.steps:>12,}{share.exchanges:>12,}{size(share.bytes_sent):>12}"
        yield _Row(row + f"{size(share.bytes_received):>12}" * has_received)
    if len(shares) > _MOST_SHARES:
        yield _Row(f"{'...':>8}  {len(shares) - _MOST_SHARES} more workers in the output of --json", "dim")
    yield from _wrapped(" ".join(_exchange_sentences(stats)), width)


def _exchange_sentences(stats: StrategyStats) -> Iterator[str]:
    steps = sum(s.steps for s in stats.shares)
    if not stats.exchanges:
        yield f"No exchange in {count(stats.steps, 'step')}."
        return
    if steps:
        apart = steps / stats.exchanges
        yield "One exchange per step." if apart == 1 else f"One exchange every {apart:.3g} steps."
    if not stats.bytes_sent + stats.bytes_received:
        yield "No bytes were sent."
        return
    sent, received, expected = (
        stats.bytes_sent_per_step, stats.bytes_received_per_step, stats.expected_bytes_per_step,
    )  # fmt: skip
    if sent is not None:
        also = f" and receives {size(round(received))}" if received else ""
        # The theoretical figure holds for one strategy, the mean for all of them.
        is_one = not stats.switches and ", then " not in stats.strategy
        judged = _against_theory(sent, expected) if expected is not None and is_one else ""
        yield f"Per step, a worker sends {size(round(sent))}{judged}{also}."
    per_sample = stats.bytes_per_sample
    total = size(stats.bytes_sent + stats.bytes_received)
    if per_sample is not None:
        amount = size(round(per_sample)) if per_sample >= 10 else f"{per_sample:.2g} bytes"
        yield f"All workers: {amount} per sample, {total} in total."
    else:
        yield f"All workers: {total} in total."


def _against_theory(measured: float, expected: float) -> str:
    off = measured / expected - 1
    if abs(off) < _AS_EXPECTED:
        return " (as expected)"
    how = f"{1 + off:.3g} times" if off > 1 else f"{100 * abs(off):.1f}% {'more' if off > 0 else 'less'} than"
    return f" ({how} the expected {size(round(expected))})"


def _switches(stats: StrategyStats, width: int) -> Iterator[_Row]:
    if stats.switches:
        yield _Row("Switches", "bold")
        for switch in stats.switches:
            yield from _wrapped(f"from step {switch.step:,}: {switch.strategy}", width, indent="  ")


def _staleness(stats: StrategyStats, width: int, ascii_only: bool) -> Iterator[_Row]:
    found = stats.staleness
    if found is None:
        return
    yield _Row("Staleness", "bold")
    yield from _wrapped("Updates of other workers between reading and updating the parameters:", width, style="dim")
    bars = _bars(found)
    labels, counts = [label for label, _ in bars], [f"{n:,}" for _, n in bars]
    label_width, count_width = max(map(len, labels)), max(map(len, counts))
    room = width - 2 - label_width - 2 - 2 - count_width - 2 - 6
    most = max(n for _, n in bars)
    for label, text, (_, n) in zip(labels, counts, bars, strict=True):
        bar = _bar(n / most, room, ascii_only)
        yield _Row(f"  {label:>{label_width}}  {bar:<{room}}  {text:>{count_width}}  {_percent(n / found.updates):>6}")
    yield from _wrapped(
        f"mean {found.mean:.3g}, median {found.quantile(0.5)}, 99% within {found.quantile(0.99)}, "
        f"at most {found.most}, in {count(found.updates, 'update')}",
        width,
    )


def _bars(found: Staleness) -> list[tuple[str, int]]:
    """(label, count) per staleness, or per range of equal width if there are too many."""
    span = found.most + 1
    each = -(-span // _MOST_BARS)
    bars = []
    for low in range(0, span, each):
        n = sum(found.counts.get(staleness, 0) for staleness in range(low, low + each))
        bars.append((str(low) if each == 1 else f"{low}-{low + each - 1}", n))
    return bars


def _bar(part: float, room: int, ascii_only: bool) -> str:
    """A nonzero part always draws at least something."""
    if part <= 0:
        return ""
    if ascii_only:
        return "#" * max(round(part * room), 1)
    whole, eighths = divmod(max(round(part * room * 8), 1), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[eighths].strip()


def _percent(part: float) -> str:
    return "<0.1%" if 0 < part < 0.0005 else f"{100 * part:.1f}%"


def _disagreement(stats: StrategyStats, width: int, ascii_only: bool) -> Iterator[_Row]:
    points = stats.disagreement
    if not points:
        return
    yield _Row("Disagreement", "bold")
    (first, first_value), (last, last_value) = points[0], points[-1]
    # A constant needs no chart.
    values = [value for _, value in points]
    if min(values) == max(values):
        yield from _wrapped(
            f"Before an exchange, the workers were {_share_of(last_value)} away from their average.", width
        )
        return
    what = "Relative distance of the workers from their average, before an exchange:"
    yield from _wrapped(what, width, style="dim")
    rows = chart(
        values, width, _CHART_HEIGHT, first=f"step {first:,}", last=f"step {last:,}", label=_share_of,
        ascii_only=ascii_only,
    )  # fmt: skip
    for i, row in enumerate(rows):
        yield _Row(row.rstrip(), "" if i < _CHART_HEIGHT else "dim")
    yield _Row(f"{_share_of(first_value)} at first, {_share_of(last_value)} at last, at most {_share_of(max(values))}")


def _share_of(relative: float) -> str:
    """A distance relative to what it is a distance from: `1.23%`, `0.00012%`."""
    percent = 100 * relative
    return f"{percent:.3g}%" if percent < 1000 else f"{number(relative)} times"


def _tournament(stats: StrategyStats, width: int) -> Iterator[_Row]:
    rounds = stats.rounds
    if not rounds:
        return
    matches = [match for round_ in rounds for match in round_.matches]
    taken = sum(verdict is not None and verdict.adopted for match in matches for verdict in match.verdicts)
    yield _Row("Tournament", "bold")
    times = {0: "no model was adopted", 1: "one model was adopted"}.get(taken, f"{taken} models were adopted")
    yield from _wrapped(f"{count(len(rounds), 'round')}, {_matches(len(matches))}; {times}", width, style="dim")
    is_long = len(rounds) > _MOST_ROUNDS
    shown = [*rounds[:3], None, *rounds[3 - _MOST_ROUNDS :]] if is_long else [*rounds]
    digits = len(str(rounds[-1].number))
    for round_ in shown:
        if round_ is None:
            yield _Row(f"  ... {len(rounds) - _MOST_ROUNDS} more rounds in the output of --json", "dim")
        else:
            text = "; ".join(_match_text(match) for match in round_.matches)
            head = f"round {round_.number:>{digits}}: "
            yield from _wrapped(head + text, width, indent=" " * len(head))
    yield from _wrapped(_winner_text(stats), width)


def _matches(amount: int) -> str:
    return "1 match" if amount == 1 else f"{amount:,} matches"


def _match_text(match: Match) -> str:
    """`0 beat 2 (0.112 < 0.131)`, with the loser's scores: it is the one that adopted a model."""
    first, second = match.verdicts
    side = match.winner
    if side is None:
        assert first is not None, "a single verdict implies a winner"
        assert second is not None, "a single verdict implies a winner"
        did = "swapped models" if first.adopted else "each kept their own"
        seen = ", ".join(_compared(v.own_score, v.opponent_score) for v in (first, second))
        return f"{match.workers[0]} and {match.workers[1]} {did} ({seen})"
    winner, loser = match.workers[side], match.workers[1 - side]
    of_winner, of_loser = match.verdicts[side], match.verdicts[1 - side]
    if of_loser is not None:
        return f"{winner} beat {loser} ({_compared(of_loser.opponent_score, of_loser.own_score)})"
    assert of_winner is not None, "at least one side reported the match"
    return f"{winner} beat {loser} ({_compared(of_winner.own_score, of_winner.opponent_score)})"


def _compared(a: float, b: float) -> str:
    """With enough digits to show that they differ."""
    sign = "<" if a < b else ">" if a > b else "=" if a == b else "against"
    for digits in range(3, 9):
        left, right = f"{a:.{digits}g}", f"{b:.{digits}g}"
        if left != right or a == b:
            break
    return f"{left} {sign} {right}"


def _winner_text(stats: StrategyStats) -> str:
    best, ancestry = best_of_last_round(stats.rounds), stats.ancestry
    if best is None:
        return "The last round has no finite score."
    worker_id, verdict = best
    settings = "".join(f", {clean(name)} {number(value)}" for name, value in verdict.hyperparameters.items())
    sentences = [f"Best after the last round: worker {worker_id} ({number(verdict.score)}{settings})."]
    path = " -> ".join(str(a.worker_id) if a.round is None else f"{a.worker_id} (round {a.round})" for a in ancestry)
    origin = ancestry[0].worker_id
    if len(ancestry) == 1:
        sentences.append("It trained its model from the start.")
    else:
        sentences.append(f"Its model started at worker {origin}: {path}.")
    holders = [r for r, o in stats.origins.items() if o == origin]
    if len(holders) == len(stats.origins):
        sentences.append(f"All {len(holders)} workers continue with descendants of worker {origin}'s model.")
    else:
        sentences.append(f"{len(holders)} of {len(stats.origins)} workers continue with descendants of that model.")
    return " ".join(sentences)


def _wrapped(text: str, width: int, *, indent: str = "", style: str = "") -> Iterator[_Row]:
    for line in textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False):
        yield _Row(line, style)
