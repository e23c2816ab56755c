"""The first cause of a failure in words: one message, the user's own traceback first, the rest folded under it."""

from __future__ import annotations

from pathlib import Path

from syncline import errors
from syncline.comms.control import Failed
from syncline.coordinator.supervision import Supervision
from syncline.engines.engine import Exit
from syncline.errors import SynclineError, WorkerFailed
from syncline.plan.plan import Plan
from syncline.telemetry.run_dir import RunDir

__all__ = ["explain_failure", "memory_evidence"]


def explain_failure(
    supervision: Supervision, plan: Plan, run_dir: RunDir, last_step: int, last_checkpoint: Path | None
) -> SynclineError:
    """The exception that a failed run ends with."""
    cause = supervision.first_cause()
    others = len({*(f.rank for f in supervision.failures), *(c.rank for c in supervision.crashes)}) - 1
    after = [_how_to_go_on(run_dir, last_checkpoint)]
    if supervision.gave_up:
        after.insert(
            0,
            f"More than {plan.most_losses} processes were lost within five minutes, so the run was ended; what the "
            "others had done is saved. If such losses are to be expected, set --most-losses higher.",
        )
    if isinstance(cause, Failed):
        own = getattr(errors, cause.kind, None)
        if isinstance(own, type) and issubclass(own, SynclineError) and own is not errors.PeerLost:
            # Our own message is the answer already; only tell how to go on if there is anything to go on with.
            return own(cause.message if last_checkpoint is None else f"{cause.message}\n{after[0]}")
        where = f"{plan.name_of(cause.rank)} raised {cause.kind} at step {cause.step}"
        if cause.samples:
            where += f", with samples {', '.join(map(str, cause.samples))}"
        body = cause.traceback.rstrip() or cause.message
        return WorkerFailed("\n".join([body, "", f"{_capital(where)}.", *_folded(others), *after]))
    if isinstance(cause, Exit):
        evidence = memory_evidence(cause)
        log = _last_words(run_dir.log(cause.rank))
        text = f"{_capital(plan.name_of(cause.rank))} {cause.in_words()}{evidence}, after step {last_step}."
        folded = [] if supervision.gave_up else _folded(others)
        return WorkerFailed("\n".join([text, *log, *folded, *after]))
    return WorkerFailed("\n".join(["The run ended for an unknown reason.", *after]))


def _how_to_go_on(run_dir: RunDir, last_checkpoint: Path | None) -> str:
    if last_checkpoint is None:
        return f"No checkpoint had been made. The logs are in {run_dir.log(0).parent}."
    return f"The last checkpoint is {last_checkpoint.name}; go on from it with: syncline resume {run_dir.path}"


def _folded(others: int) -> list[str]:
    if others <= 0:
        return []
    return [f"The other worker{'s' if others > 1 else ''} ended because of it."]


def memory_evidence(exit: Exit) -> str:
    """What can be read of the kernel's out-of-memory killer, for a process that was killed with SIGKILL."""
    if exit.signal != 9:
        return ""
    try:
        lines = Path("/sys/fs/cgroup/memory.events").read_text().splitlines()
        kills = next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    except (OSError, StopIteration, ValueError):
        return " (no out-of-memory record can be read here)"
    if kills:
        return f" (the kernel's out-of-memory killer has ended {kills} processes of this control group)"
    return " (no out-of-memory record)"


def _last_words(log: Path) -> list[str]:
    try:
        lines = log.read_text(errors="replace").splitlines()[-5:]
    except OSError:
        return []
    return [f"Its last output, in {log}:", *(f"  {line}" for line in lines)] if lines else []


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
