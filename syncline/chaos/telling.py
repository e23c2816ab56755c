"""What is shown while runs are being broken: lines for people, or JSON for programs.

Here: the tellers. The progress goes to stderr and the score card to stdout. Not here: its words (`report.py`).
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TextIO

from syncline.bench.machine import BenchMachine
from syncline.chaos.report import as_dict, as_lines, in_words
from syncline.chaos.score import Card, Recovery, Reference, RunScore
from syncline.telemetry.events import Event, Warned
from syncline.view.state import RunState
from syncline.view.stream import unbreakable
from syncline.view.words import clean, count, duration, headline, rate

__all__ = ["JsonTeller", "RunTeller", "Teller", "TextTeller"]

_DRAW_EVERY_S = 0.2


class RunTeller(Protocol):
    """Is told of one run in order, by one thread."""

    def happened(self, state: RunState, event: Event) -> None:
        """Something happened in it."""

    def settled(self, recovery: Recovery, number: int) -> None:
        """It is known what came of a blow, the `number`-th of all."""


class Teller(RunTeller, Protocol):
    """Is told of everything in order, by one thread."""

    def began(self, card: Card) -> None:
        """All is ready."""

    def runs(self, strategy: str, seed: int, *, is_reference: bool, left: int) -> None:
        """A run starts; `left` kills are still to be made."""

    def unharmed(self, reference: Reference) -> None:
        """A run to which nothing was done has ended."""

    def scored(self, score: RunScore) -> None:
        """A run has ended."""

    def left_out(self, strategy: str, why: str) -> None:
        """A strategy cannot be tried."""

    def ended(self, card: Card, machine: BenchMachine, file: Path) -> None:
        """All is over; the card is in `file`."""


class TextTeller:
    """A line for each run and each blow, and on a terminal one below them that moves."""

    def __init__(self, out: TextIO, errors: TextIO) -> None:
        self._out, self._errors = unbreakable(out), unbreakable(errors)
        self._is_terminal = errors.isatty()
        self._wanted = 0
        self._where = ""
        self._drawn_at = 0.0

    def began(self, card: Card) -> None:
        """What is going to be done."""
        self._wanted = card.kills_wanted
        number = len(card.strategies)
        which = card.strategies[0] if number == 1 else f"{number} strategies in turn"
        kills = f", until {count(self._wanted, 'kill')} are made" if self._wanted else ""
        self._line(f"{card.what}: {which}{kills}, seed {card.seed}")

    def runs(self, strategy: str, seed: int, *, is_reference: bool, left: int) -> None:
        """Which one."""
        self._where = f"{strategy}, seed {seed}{', unharmed' if is_reference else ''}"
        more = f": {count(left, 'kill')} to go" if left and not is_reference else ""
        if not self._is_terminal:
            self._line(f"{self._where}{more}")

    def happened(self, state: RunState, event: Event) -> None:
        """Warnings, and on a terminal how far it is."""
        if isinstance(event, Warned):
            self._line(f"{self._where}: {clean(event.message)}")
        now = time.monotonic()
        if not self._is_terminal or now - self._drawn_at < _DRAW_EVERY_S:
            return
        self._drawn_at = now
        where = "starting" if state.is_starting else f"epoch {state.epoch}/{state.plan.epochs}, step {state.step}"
        speed = f", {rate(state.samples_per_s)} samples/s" if state.samples_per_s else ""
        text = f"{self._where}: {where}{speed}"[: shutil.get_terminal_size().columns - 1]
        self._errors.write(f"\r\033[K{text}")
        self._errors.flush()

    def settled(self, recovery: Recovery, number: int) -> None:
        """One line."""
        of = f"/{self._wanted}" if self._wanted >= number else ""
        self._line(f"{number:>4}{of} {in_words(recovery)}")

    def unharmed(self, reference: Reference) -> None:
        """How long it took."""
        self._line(f"{self._where}: finished in {duration(reference.seconds)}")

    def scored(self, score: RunScore) -> None:
        """How it ended."""
        how = {"finished": "finished", "failed": "failed", "hang": "hung, and was ended", "interrupted": "was stopped"}
        why = f": {headline(score.why).rstrip('.')}" if score.why and score.outcome in ("failed", "hang") else ""
        self._line(f"{self._where}: {how[score.outcome]} after {duration(score.seconds)}{why}")

    def left_out(self, strategy: str, why: str) -> None:
        """Why."""
        self._line(f"{strategy} is left out: {headline(why)}")

    def ended(self, card: Card, machine: BenchMachine, file: Path) -> None:
        """The card."""
        self._line("")
        self._out.write("".join(f"{line}\n" for line in as_lines(card, machine)))
        self._out.flush()
        self._line(f"Written to {file} and {file.with_suffix('.json')}.")

    def _line(self, text: str) -> None:
        start = "\r\033[K" if self._is_terminal else ""
        self._errors.write(f"{start}{text}\n")
        self._errors.flush()


class JsonTeller:
    """One JSON object a line; the last one is the card."""

    def __init__(self, out: TextIO) -> None:
        self._out = unbreakable(out)

    def began(self, card: Card) -> None:
        """What is going to be done."""
        self._line({"event": "began", "what": card.what, "strategies": card.strategies, "seed": card.seed})

    def runs(self, strategy: str, seed: int, *, is_reference: bool, left: int) -> None:
        """Which one."""
        self._line({"event": "runs", "strategy": strategy, "seed": seed, "is_reference": is_reference, "left": left})

    def happened(self, state: RunState, event: Event) -> None:
        """Warnings."""
        del state
        if isinstance(event, Warned):
            self._line({"event": "warned", "message": event.message})

    def settled(self, recovery: Recovery, number: int) -> None:
        """All of it."""
        self._line({"event": "settled", "number": number, **asdict(recovery)})

    def unharmed(self, reference: Reference) -> None:
        """All of it."""
        self._line({"event": "unharmed", **asdict(reference)})

    def scored(self, score: RunScore) -> None:
        """All of it."""
        self._line({"event": "scored", **asdict(score)})

    def left_out(self, strategy: str, why: str) -> None:
        """Why."""
        self._line({"event": "left_out", "strategy": strategy, "why": why})

    def ended(self, card: Card, machine: BenchMachine, file: Path) -> None:
        """The card."""
        self._line({"event": "summary", "file": str(file), **as_dict(card, machine)})

    def _line(self, data: dict[str, Any]) -> None:
        self._out.write(json.dumps(data) + "\n")
        self._out.flush()
