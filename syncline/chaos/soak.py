"""`syncline chaos`: the same task trained again and again while it is being broken, until enough kills were made.

Here: the course of a soak. Not here: one run of it (`attack.py`), the figures (`score.py`), what is shown
(`telling.py`).

A round trains with each strategy in turn; the first one begins with runs to which nothing is done, to compare with.
Everything random follows from the seed: round r trains with seed + r, and kills with a generator of its own.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from syncline.bench.machine import BenchMachine
from syncline.chaos.attack import attack, train_unharmed
from syncline.chaos.ctrl_c import ctrl_c_seen
from syncline.chaos.kills import Killer, Rhythm
from syncline.chaos.limit import Limit
from syncline.chaos.report import write
from syncline.chaos.score import Card, Reference
from syncline.chaos.telling import JsonTeller, Teller, TextTeller
from syncline.config.run import RunConfig
from syncline.data.named import Progress as DownloadProgress
from syncline.errors import ConfigError, Interrupted, SynclineError
from syncline.strategies.reading import read_strategy
from syncline.task import Task
from syncline.telemetry.run_dir import RunDir
from syncline.testing.faults import Fault
from syncline.testing.namespaces import Namespaces
from syncline.view.words import count, duration

__all__ = ["Settings", "soak"]

_ENDLESS = 1_000_000
"""Losses that a run puts up with: here they are the point, and no sign that it should give up."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is done to the runs."""

    strategies: tuple[str, ...]
    every: Rhythm
    """How far kills are apart."""
    kills: int = 10
    """In all runs together."""
    faults: tuple[Fault, ...] = ()
    """In every run."""
    references: int = 1
    """With each strategy, so many runs to which nothing is done."""
    to_the_last: bool = False
    """Whether also the last worker that holds what was trained may be killed."""
    hang_s: float = 60.0
    """So long without progress is a hang."""
    limit_s: float = 3600.0
    """No run may take longer."""
    namespaces: int = 0
    """How many network namespaces the workers and servers are dealt out to; 0 leaves them where the driver is."""

    def __post_init__(self) -> None:
        if self.kills < 0:
            raise ConfigError(f"--kills is {self.kills}, but must be 0 or more.")
        if self.references < 0:
            raise ConfigError(f"--references is {self.references}, but must be 0 or more.")
        if not self.kills and not self.faults:
            raise ConfigError("Nothing would be done to the run: --kills is 0 and no --fault is given. Give one.")
        if not self.hang_s > 0 or not self.limit_s > 0:
            raise ConfigError("--hang-after and --limit must be more than 0.")
        if self.namespaces < 0 or self.namespaces == 1:
            raise ConfigError(
                f"--namespaces is {self.namespaces}, but must be 2 or more: inside one there is no network between the "
                "workers. Leave it out to keep them where this command runs."
            )


def soak(
    task: Task,
    config: RunConfig,
    settings: Settings,
    *,
    command: str,
    out: Path | None = None,
    as_json: bool = False,
    data_dir: Path | None = None,
    download_progress: DownloadProgress | None = None,
) -> Card:
    """Train `task` under kills and faults; show the score card and write it to `out`, with JSON beside it.

    The file is written anew after each run. `Interrupted` after Ctrl-C and `SynclineError` if a promise was broken or
    not everything could be done, both after the card was shown.
    """
    # What a user can get wrong is answered here, and not after an hour.
    for strategy in settings.strategies:
        read_strategy(strategy)
    for fault in settings.faults:
        if fault.rank is not None and not fault.is_server and fault.rank >= config.workers:
            raise ConfigError(f"'{fault}' would never happen: the run has workers 0 to {config.workers - 1}.")
    _check_place(out)
    in_namespaces: AbstractContextManager[Namespaces | None] = (
        Namespaces(settings.namespaces) if settings.namespaces else nullcontext()
    )
    with in_namespaces as namespaces:
        task = task.with_defaults().located(data_dir, download_progress)
        facts = task.facts()
        folder = RunDir.new(Path("runs"), f"chaos-{time.strftime('%Y%m%d-%H%M%S')}", exact=False).path
        where = f" in {settings.namespaces} network namespaces" if settings.namespaces else ""
        what = f"{facts.model} on {facts.data}, {count(config.workers, 'worker')}{where}"
        card = Card(what, command, config.seed, settings.kills, settings.strategies)
        teller: Teller = JsonTeller(sys.stdout) if as_json else TextTeller(sys.stdout, sys.stderr)
        file = out if out is not None else folder / "score.txt"
        course = _Course(task, config, settings, card, teller, folder, file, namespaces)
        teller.began(card)
        with ctrl_c_seen() as was_stopped:
            try:
                course.run(may_go_on=lambda: not was_stopped())
            except KeyboardInterrupt:
                card.is_interrupted = True
    course.write()
    teller.ended(card, course.machine, course.file)
    if card.is_interrupted:
        raise Interrupted(f"Stopped. The score by then is in {course.file}.")
    if card.problems:
        raise SynclineError(f"Not all went well: {'; '.join(card.problems)}. The runs are in {folder}.")
    if course.complaint:
        raise SynclineError(course.complaint)
    return card


class _Course:
    """The runs of a soak, one after the other."""

    def __init__(
        self,
        task: Task,
        config: RunConfig,
        settings: Settings,
        card: Card,
        teller: Teller,
        folder: Path,
        file: Path,
        namespaces: Namespaces | None,
    ) -> None:
        self.machine = BenchMachine.here()
        self.file = file
        self.complaint = ""
        """Why not everything could be done that was wanted."""
        self._task, self._config, self._settings = task, config, settings
        self._card, self._teller, self._folder, self._namespaces = card, teller, folder, namespaces
        self._kills = self._blows = 0

    def run(self, may_go_on: Callable[[], bool]) -> None:
        """Round after round, until enough kills were made; with a script alone, one."""
        settings, left = self._settings, list(self._settings.strategies)
        for number in range(_ENDLESS):
            before = self._kills
            for place, strategy in enumerate(tuple(left)):
                missing = settings.kills - self._kills
                if number > 0 and missing <= 0:
                    return
                share = -(-missing // (len(settings.strategies if number == 0 else left) - place))
                try:
                    is_well = self._trains_unharmed(strategy) if number == 0 else True
                    is_well = is_well and self._survives(strategy, number, share, may_go_on)
                except ConfigError as error:
                    self._card.left_out[strategy] = str(error)
                    self._teller.left_out(strategy, str(error))
                    is_well = False
                if not is_well:
                    left.remove(strategy)
            if not self._card.scores:
                self.complaint = "Nothing could be tried: " + " ".join(self._card.left_out.values())
            if self._kills >= settings.kills or not left:
                return
            if self._kills == before:
                took = max(score.seconds for score in self._card.scores)
                self.complaint = (
                    f"The runs were over before anything was killed: they take up to {duration(took)}, and kills come "
                    f"every {settings.every}. Train longer with --epochs, or kill sooner with --every."
                )
                return

    def write(self) -> None:
        """The card, if there is something on it."""
        if self._card.scores or self._card.references:
            write(self._card, self.machine, self.file)

    def _trains_unharmed(self, strategy: str) -> bool:
        """Whether it can be trained with this strategy when nothing is done to it."""
        for number in range(self._settings.references):
            seed = self._config.seed + number
            self._teller.runs(strategy, seed, is_reference=True, left=0)
            config = self._config_of(strategy, seed, f"unharmed-{number + 1}")
            found = train_unharmed(self._task, config, self._teller, self._limit(), self._namespaces)
            if not isinstance(found, Reference):
                self._card.scores.append(found)
                self._teller.scored(found)
                return False
            self._card.references.append(found)
            self._teller.unharmed(found)
        return True

    def _survives(self, strategy: str, number: int, most: int, may_go_on: Callable[[], bool]) -> bool:
        """Whether a run comes to its end under up to `most` kills and the script."""
        settings, seed = self._settings, self._config.seed + number
        self._teller.runs(strategy, seed, is_reference=False, left=settings.kills - self._kills)
        killer = Killer(
            settings.every,
            most=most,
            seed=f"{self._config.seed} {strategy} {number}",
            to_the_last=settings.to_the_last,
            may_go_on=may_go_on,
        )
        config = self._config_of(strategy, seed, f"run-{number + 1}")
        score, stopped = attack(
            self._task, config, self._teller, self._limit(), killer, settings.faults,
            hang_s=settings.hang_s, before=self._blows, namespaces=self._namespaces,
        )  # fmt: skip
        self._kills += len(killer.kills)
        self._blows += len(score.recoveries)
        self._card.scores.append(score)
        self._teller.scored(score)
        self.write()
        if stopped is not None:
            raise stopped
        return score.outcome == "finished"

    def _limit(self) -> Limit:
        return Limit(hang_s=self._settings.hang_s, limit_s=self._settings.limit_s)

    def _config_of(self, strategy: str, seed: int, name: str) -> RunConfig:
        file_name = "".join(c if c.isalnum() or c in "-_." else "-" for c in strategy).strip("-")[:40]
        place = self._settings.strategies.index(strategy) + 1  # two of them may have the same letters in their names
        return self._config.replace(
            strategy=strategy, seed=seed, out=str(self._folder), name=f"{place:02}-{file_name}-{name}",
            most_losses=_ENDLESS, resume=None,
        )  # fmt: skip


def _check_place(out: Path | None) -> None:
    """A place that cannot be written to must not cost an hour of training."""
    if out is None:
        return
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder. Give a file, such as {out / 'score.txt'}.")
    if out.suffix == ".json":
        raise ConfigError(f"--out {out} is for text; JSON is written beside it. Try {out.with_suffix('.txt')}.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}. Choose another file with --out.") from error
