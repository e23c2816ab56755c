"""Opening a run: its directory, new or of an earlier session, locked for this driver.

Here: `open_run`, which finds the run to resume, checks that it is free, that the data is still the same and that its
checkpoint is its own. Not here: the lock (`telemetry/run_lock.py`), and watching the directory later (`run_guard.py`).
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from syncline.checkpoint.schema import CheckpointState, data_has_changed
from syncline.config.owned_files import is_our_directory
from syncline.config.run import RunConfig
from syncline.data.ledger_file import put_back
from syncline.errors import ConfigError
from syncline.planning.plan import Plan
from syncline.planning.planner import saved_plan
from syncline.telemetry.run_dir import RunDir
from syncline.telemetry.run_lock import DriverLock, Holder, holder_of


@dataclass(frozen=True)
class OpenRun:
    """A run whose directory this driver has locked."""

    plan: Plan
    config: RunConfig
    run_dir: RunDir
    lock: DriverLock
    checkpoint: Path | None = None
    """The checkpoint to resume from."""
    problems: Sequence[str] = ()
    """What is wrong with newer checkpoints."""

    def write(self) -> None:
        """Write what describes the run."""
        self.run_dir.path.mkdir(mode=0o755 if self.config.shared else 0o700, parents=True, exist_ok=True)
        settings = {
            **dataclasses.asdict(self.config),
            "resume": None,
            "wait": False,
            "data_changed": "refuse",
            "out": str(self.run_dir.path.parent),
            "name": self.run_dir.path.name,
        }
        self.run_dir.write_plan(self.plan.to_dict())
        self.run_dir.write(self.run_dir.config, json.dumps(settings, indent=1).encode())


def open_run(config: RunConfig, plan: Plan, session: str, report: Callable[[str], None]) -> OpenRun:
    """Lock the run to resume, or make a new one. `report` shows the user what this waits for."""
    opened = _open_earlier(config, plan, session, report)
    if opened is None:
        name = config.name or f"{_file_name(plan.model)}-{_file_name(plan.data)}-{time.strftime('%Y%m%d-%H%M%S')}"
        run_dir = RunDir.new(Path(config.out), name, exact=config.name is not None, shared=config.shared)
        plan = dataclasses.replace(plan, run_id=secrets.token_hex(8))
        opened = OpenRun(plan, config, run_dir, DriverLock(run_dir.path, session))
    opened.write()
    return opened


def _open_earlier(config: RunConfig, plan: Plan, session: str, report: Callable[[str], None]) -> OpenRun | None:
    """Lock the run that `config.resume` names; None if there is none to resume."""
    run_dir = earlier_run(config, plan.fingerprint)
    if run_dir is None:
        return None

    def wait(holder: Holder | None) -> bool:
        if config.wait:
            report(f"Waiting for the end of {run_dir.path}, in progress ({holder}).")
        return config.wait

    try:
        lock = DriverLock(run_dir.path, session, wait)
    except ConfigError as error:
        if config.resume == "auto" and error.code == "in-progress":
            return None  # it was free a moment ago
        raise
    try:
        if config.resume == "auto" and run_dir.summary.exists():
            lock.close()  # it has finished while this driver waited
            return None
        return _resumed(config, plan, run_dir, lock)
    except BaseException:
        lock.close()
        raise


def _resumed(config: RunConfig, plan: Plan, run_dir: RunDir, lock: DriverLock) -> OpenRun:
    from syncline.checkpoint.store import newest_sound  # imports torch, which the driver needs only to resume

    old = saved_plan(run_dir.read_plan(), run_dir.plan)
    _check_data(old, plan)
    plan = dataclasses.replace(plan, run_id=old.run_id)
    if plan.kind == "own-loop" and run_dir.has_own_group():
        run_dir.summary.unlink(missing_ok=True)
        return OpenRun(plan, config, run_dir, lock)  # the script starts again, and continues as it can
    found, state, problems = newest_sound(run_dir.checkpoints, plan.run_id)
    put_back(run_dir.ledger, CheckpointState.from_dict(state).ledger)
    run_dir.summary.unlink(missing_ok=True)
    run_dir.remove_unfinished()
    return OpenRun(plan, config, run_dir, lock, found.path, problems)


def _check_data(old: Plan, plan: Plan) -> None:
    """`ConfigError` if a run is resumed with other data, unless the user allows that. A script's workers check it."""
    if "graph" in (old.kind, plan.kind):
        if old.fingerprint != plan.fingerprint:
            raise ConfigError(
                f"The run to resume computed {old.model} on {old.data}, with another graph or other settings than this "
                "one. Resume it with the same ones, or start a new run.",
                code="another-graph", was=old.model, now=plan.model,
            )  # fmt: skip
        return
    if plan.kind != "train" or plan.data_changed == "ok":
        return
    before, now = old.train_samples + old.held_out, plan.train_samples + plan.held_out
    if (before, old.data_fingerprint) != (now, plan.data_fingerprint):
        raise data_has_changed(before, now)


def earlier_run(config: RunConfig, fingerprint: str) -> RunDir | None:
    """The run that `config.resume` names, or the latest unfinished one of the same task; None if there is none."""
    if config.resume is None:
        return None
    if config.resume != "auto":
        return RunDir.owned(Path(config.resume))
    unfinished = [
        RunDir(path.parent)
        for path in Path(config.out).glob("*/plan.json")
        if is_our_directory(path.parent)
        and not (path.parent / "summary.json").exists()
        and any((path.parent / "checkpoints").glob("step-*.json"))
    ]
    same = [r for r in unfinished if _fingerprint_of(r) == fingerprint]
    free = [r for r in same if config.wait or holder_of(r.path) is None]
    newest = max(free, key=lambda r: r.plan.stat().st_mtime, default=None)
    return RunDir.owned(newest.path) if newest is not None else None


def _fingerprint_of(run_dir: RunDir) -> str | None:
    """None if the directory is damaged: that is no reason not to find another one."""
    try:
        return run_dir.read_plan().get("fingerprint")
    except ConfigError:
        return None


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in text).strip("-")[:40]
