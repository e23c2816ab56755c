"""What a run's strategy did, as text: `syncline strategies --run RUN`. The numbers are `strategy_account.py`'s."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import NamedTuple, TextIO

import msgspec

from syncline.view.curve import chart
from syncline.view.strategy_account import Match, Staleness, StrategyAccount, best_of_last_round
from syncline.view.stream import unbreakable
from syncline.view.words import clean, count, number, size

__all__ = ["as_json", "as_lines", "show"]

WIDTH = 80
_MOST_WIDTH = 100
_CHART_HEIGHT = 5
_MOST_BARS = 12
_MOST_ROUNDS = 20
_MOST_SHARES = 16
_AS_EXPECTED = 0.0005
"""Below that the difference would read as 0.0%."""


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
    best, ancestry = best_of_last_round(account.rounds), account.ancestry
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
