"""`syncline chaos`: trains the same task or script again and again under injected faults, until enough were killed.

Here: the sequence of runs. Not here: one run (`runs.py`), the figures (`score.py`), their text (`report.py`).

A round trains with each strategy in turn; the first round starts with reference runs without faults. All randomness
follows from the seed: round r trains with seed + r, and kills are drawn from their own generator.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from syncline.config.run import RunConfig
from syncline.data.named import Progress as DownloadProgress
from syncline.errors import ConfigError, Interrupted, SynclineError
from syncline.lab.chaos.interrupts import interrupt_seen
from syncline.lab.chaos.kills import Killer, KillInterval
from syncline.lab.chaos.report import as_dict, as_lines, describe, write
from syncline.lab.chaos.runs import run_reference, run_with_faults
from syncline.lab.chaos.score import Recovery, Reference, RunScore, Scorecard
from syncline.lab.chaos.watchdog import Watchdog
from syncline.lab.faults import Fault
from syncline.lab.machine import BenchMachine
from syncline.lab.namespaces import Namespaces
from syncline.lab.output import Reporter, check_output_file, make_reporter
from syncline.observe.formatting import count, duration, headline
from syncline.observe.state import RunState
from syncline.strategies.reading import read_strategy
from syncline.task import Script, Task
from syncline.telemetry.events import Event
from syncline.telemetry.run_dir import RunDir

_UNLIMITED = 1_000_000
"""Failures that a run tolerates: here they are intended, and no reason to give up."""


@dataclass(frozen=True, kw_only=True)
class ChaosSettings:
    """Which faults are injected into which runs."""

    strategies: tuple[str, ...]
    every: KillInterval
    """Average time or number of steps between kills."""
    kills: int = 10
    """In all runs together."""
    faults: tuple[Fault, ...] = ()
    """Scripted faults, in every run."""
    references: int = 1
    """Runs without faults, per strategy."""
    kill_last_worker: bool = False
    """Whether the last worker with the trained state may be killed, too."""
    hang_s: float = 60.0
    """A run without progress for this long counts as hung."""
    limit_s: float = 3600.0
    """The longest that one run may take."""
    namespaces: int = 0
    """Spread workers and servers over this many network namespaces; 0: no namespaces."""

    def __post_init__(self) -> None:
        for name in ("kills", "references"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name} is {getattr(self, name)}, but must be 0 or more.", setting=name)
        if not self.kills and not self.faults:
            raise ConfigError("No faults to inject: --kills is 0 and there is no --fault. Give one.", setting="kills")
        if not self.hang_s > 0 or not self.limit_s > 0:
            raise ConfigError(
                f"--hang-after ({self.hang_s:g}s) and --limit ({self.limit_s:g}s) must be more than 0.",
                setting="hang_after",
            )
        if self.namespaces < 0 or self.namespaces == 1:
            raise ConfigError(
                f"--namespaces is {self.namespaces}, but must be 2 or more: inside a single namespace there is no "
                "network between the workers. Leave it out to run without namespaces.",
                setting="namespaces",
            )


def soak(
    what: Task | Script,
    config: RunConfig,
    settings: ChaosSettings,
    *,
    command: str,
    out: Path | None = None,
    as_json: bool = False,
    data_dir: Path | None = None,
    download_progress: DownloadProgress | None = None,
) -> Scorecard:
    """Train a task or run a user's own loop under kills and faults; show the scorecard and write it to `out`.

    JSON is written beside it. The file is rewritten after each run. Raises `Interrupted` after Ctrl-C and
    `SynclineError` if a guarantee did not hold or not every fault could be injected, both after showing the scorecard.
    """
    # Report the user's mistakes now, not after an hour of training.
    for strategy in settings.strategies:
        read_strategy(strategy)
    for fault in settings.faults:
        if fault.target is not None and not fault.is_server and fault.target >= config.workers:
            raise ConfigError(
                f"'{fault}' can never happen: the run has workers 0 to {config.workers - 1}.", setting="fault"
            )
    if settings.namespaces and isinstance(what, Script):
        raise ConfigError(
            "--namespaces is for tasks: a script's workers run on this machine's own network. Leave it out.",
            setting="namespaces",
        )
    check_output_file(out, default_name="score.txt")
    in_namespaces: AbstractContextManager[Namespaces | None] = (
        Namespaces(settings.namespaces) if settings.namespaces else nullcontext()
    )
    with in_namespaces as namespaces:
        if isinstance(what, Task):
            what = what.with_defaults().located(data_dir, download_progress)
        folder = RunDir.new(Path("runs"), f"chaos-{time.strftime('%Y%m%d-%H%M%S')}", exact=False).path
        where = f" in {settings.namespaces} network namespaces" if settings.namespaces else ""
        title = f"{_name(what)}, {count(config.workers, 'worker')}{where}"
        card = Scorecard(title, command, config.seed, settings.kills, settings.strategies)
        file = out if out is not None else folder / "score.txt"
        test = _SoakTest(what, config, settings, card, make_reporter(as_json=as_json), folder, file, namespaces)
        with interrupt_seen() as was_stopped:
            try:
                test.run(may_kill=lambda: not was_stopped())
            except KeyboardInterrupt:
                card.is_interrupted = True
    test.finish()
    if card.is_interrupted:
        raise Interrupted(f"Stopped. The score so far is in {file}.")
    if card.problems:
        raise SynclineError(f"Guarantees were broken: {'; '.join(card.problems)}. The runs are in {folder}.")
    if test.incomplete:
        raise SynclineError(test.incomplete)
    return card


def _name(what: Task | Script) -> str:
    if isinstance(what, Script):
        return Path(what.path).name
    facts = what.facts()
    return f"{facts.model} on {facts.data}"


class _SoakTest:
    """The runs of a soak test, one after the other."""

    def __init__(
        self,
        what: Task | Script,
        config: RunConfig,
        settings: ChaosSettings,
        card: Scorecard,
        reporter: Reporter,
        folder: Path,
        file: Path,
        namespaces: Namespaces | None,
    ) -> None:
        self.incomplete = ""
        """Why not every fault could be injected."""
        self._machine, self._file = BenchMachine.here(), file
        self._what, self._config, self._settings = what, config, settings
        self._card, self._reporter, self._folder, self._namespaces = card, reporter, folder, namespaces
        self._kills = self._injections = 0
        self._run_name = ""

    def run(self, may_kill: Callable[[], bool]) -> None:
        """Round after round until enough processes were killed; one round if all faults are scripted."""
        settings, left = self._settings, list(self._settings.strategies)
        self._report_start()
        for number in range(_UNLIMITED):
            before = self._kills
            for place, strategy in enumerate(tuple(left)):
                missing = settings.kills - self._kills
                if number > 0 and missing <= 0:
                    return
                share = -(-missing // (len(settings.strategies if number == 0 else left) - place))
                try:
                    is_well = self._run_references(strategy) if number == 0 else True
                    is_well = is_well and self._survives(strategy, number, share, may_kill)
                except ConfigError as error:
                    reason = self._card.skipped[strategy] = str(error)
                    self._reporter.report(
                        "skipped", f"{strategy} is skipped: {headline(reason)}", strategy=strategy, reason=reason
                    )
                    is_well = False
                if not is_well:
                    left.remove(strategy)
            if not self._card.scores:
                self.incomplete = "No strategy could run: " + " ".join(self._card.skipped.values())
            if self._kills >= settings.kills or not left:
                return
            if self._kills == before:
                took = max(score.seconds for score in self._card.scores)
                self.incomplete = (
                    f"The runs finished before a process was killed: they take up to {duration(took)}, and kills come "
                    f"every {settings.every}. Train longer with --epochs, or kill sooner with --every."
                )
                return

    def finish(self) -> None:
        self._write()
        card, machine = self._card, self._machine
        self._reporter.finish(as_lines(card, machine), self._file, **as_dict(card, machine))

    def on_run_event(self, state: RunState, event: Event) -> None:
        self._reporter.on_run_event(state, event)

    def on_recovery(self, recovery: Recovery, number: int) -> None:
        of = f"/{self._settings.kills}" if self._settings.kills >= number else ""
        self._reporter.report("recovery", f"{number:>4}{of} {describe(recovery)}", number=number, **asdict(recovery))

    def _report_start(self) -> None:
        card, number = self._card, len(self._card.strategies)
        which = card.strategies[0] if number == 1 else f"{number} strategies in turn"
        kills = f", {count(card.kills_wanted, 'kill')}" if card.kills_wanted else ""
        text = f"{card.title}: {which}{kills}, seed {card.seed}"
        self._reporter.report("started", text, title=card.title, strategies=card.strategies, seed=card.seed)

    def _run_references(self, strategy: str) -> bool:
        """Whether the strategy trains without faults."""
        for number in range(self._settings.references):
            seed = self._config.seed + number
            self._start_run(strategy, seed, is_reference=True)
            config = self._config_of(strategy, seed, f"reference-{number + 1}")
            found = run_reference(self._what, config, self, self._watchdog(), self._namespaces)
            if not isinstance(found, Reference):
                self._add_score(found)
                return False
            self._card.references.append(found)
            text = f"{self._run_name}: finished in {duration(found.seconds)}"
            self._reporter.report("reference", text, **asdict(found))
        return True

    def _survives(self, strategy: str, number: int, most: int, may_kill: Callable[[], bool]) -> bool:
        """Whether a run finishes under up to `most` kills and the scripted faults."""
        settings, seed = self._settings, self._config.seed + number
        self._start_run(strategy, seed, is_reference=False)
        killer = Killer(
            settings.every,
            most=most,
            seed=f"{self._config.seed} {strategy} {number}",
            kill_last_worker=settings.kill_last_worker,
            may_kill=may_kill,
        )
        config = self._config_of(strategy, seed, f"run-{number + 1}")
        score, stopped = run_with_faults(
            self._what, config, self, self._watchdog(), killer, settings.faults,
            hang_s=settings.hang_s, earlier_faults=self._injections, namespaces=self._namespaces,
        )  # fmt: skip
        self._kills += len(killer.kills)
        self._injections += len(score.recoveries)
        self._add_score(score)
        self._write()
        if stopped is not None:
            raise stopped
        return score.outcome == "finished"

    def _start_run(self, strategy: str, seed: int, *, is_reference: bool) -> None:
        self._run_name = f"{strategy}, seed {seed}{', no faults' if is_reference else ''}"
        left = 0 if is_reference else self._settings.kills - self._kills
        note = f"{count(left, 'kill')} to go" if left else "training"
        facts = {"strategy": strategy, "seed": seed, "is_reference": is_reference, "kills_left": left}
        self._reporter.start_run(self._run_name, note, "run_started", **facts)

    def _add_score(self, score: RunScore) -> None:
        self._card.scores.append(score)
        how = {"finished": "finished", "failed": "failed", "hang": "hung and was ended", "interrupted": "was stopped"}
        reason = (
            f": {headline(score.reason).rstrip('.')}" if score.reason and score.outcome in ("failed", "hang") else ""
        )
        text = f"{self._run_name}: {how[score.outcome]} after {duration(score.seconds)}{reason}"
        self._reporter.report("run_ended", text, **asdict(score))

    def _write(self) -> None:
        """Do not replace an earlier scorecard with an empty one."""
        if self._card.scores or self._card.references:
            write(self._card, self._machine, self._file)

    def _watchdog(self) -> Watchdog:
        return Watchdog(hang_s=self._settings.hang_s, limit_s=self._settings.limit_s)

    def _config_of(self, strategy: str, seed: int, name: str) -> RunConfig:
        file_name = "".join(c if c.isalnum() or c in "-_." else "-" for c in strategy).strip("-")[:40]
        place = self._settings.strategies.index(strategy) + 1  # two strategies may have the same file name
        return self._config.replace(
            strategy=strategy, seed=seed, out=str(self._folder), name=f"{place:02}-{file_name}-{name}",
            max_failures=_UNLIMITED, resume=None,
        )  # fmt: skip
