"""The first cause of a failure in words: one message. Who, what, when and what to do come first, in ten lines or fewer;
then the user's own traceback. What the others said because of it is folded into a line.

Not here: what is known beyond exit codes (`evidence.py`), and losses that do not end a run (`view/losses.py`).
"""

from __future__ import annotations

import signal
from pathlib import Path

from syncline import errors
from syncline.comms.control import Failed
from syncline.coordinator.evidence import Evidence
from syncline.coordinator.supervision import Supervision
from syncline.engines.engine import Exit
from syncline.errors import SynclineError, WorkerFailed
from syncline.plan.plan import Plan
from syncline.telemetry.run_dir import RunDir

__all__ = ["explain_failure"]

_MOST_MESSAGE_LINES = 3
_LONGEST_LINE = 400
_MOST_LOG_LINES = 5
_NATIVE_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}
_WHERE_IT_CRASHED = "Fatal Python error: "
"""How Python's faulthandler begins, which every worker has; the frames follow, the innermost first."""


def explain_failure(
    supervision: Supervision,
    plan: Plan,
    run_dir: RunDir,
    last_step: int,
    last_checkpoint: Path | None,
    evidence: Evidence,
) -> SynclineError:
    """The exception that a failed run ends with."""
    cause = supervision.first_cause()
    go_on = _how_to_go_on(run_dir, last_checkpoint)
    if cause is None:
        return WorkerFailed(f"The run ended for an unknown reason.\n{go_on}")
    after = [*_why_not_replaced(supervision, plan, cause), *_also_lost(supervision, plan, cause), go_on]
    who = _capital(plan.name_of(cause.rank))
    if isinstance(cause, Exit):
        how = evidence.how_it_ended(cause, supervision.why_given_up(cause.rank))
        log = _last_words(run_dir.log(cause.rank))
        head = [f"{who} {how}, after step {last_step}.", *log, *_advice_on_exit(cause, supervision, plan, evidence)]
        return WorkerFailed("\n".join([*head, *after]))
    own = getattr(errors, cause.kind, None)
    if isinstance(own, type) and issubclass(own, SynclineError) and own is not errors.PeerLost:
        # Our own message is the answer already; only tell how to go on if there is anything to go on with.
        return own(cause.message if last_checkpoint is None else f"{cause.message}\n{go_on}")
    where = f"{who} raised {cause.kind} at step {cause.step}"
    if cause.samples:
        where += f", with samples {', '.join(map(str, cause.samples))}"
    first, *more = [_cut(line) for line in cause.message.splitlines() if line.strip()][:_MOST_MESSAGE_LINES]
    head = [f"{where}: {first}", *more, *_advice_on_exception(cause, plan), *after]
    return WorkerFailed("\n".join([*head, *(["", cause.traceback.rstrip()] if cause.traceback else [])]))


# What to do about it


def _how_to_go_on(run_dir: RunDir, last_checkpoint: Path | None) -> str:
    if last_checkpoint is None:
        return f"No checkpoint had been made. The logs are in {run_dir.log(0).parent}."
    return f"The last checkpoint is {last_checkpoint.name}; go on from it with: syncline resume {run_dir.path}"


def _advice_on_exception(cause: Failed, plan: Plan) -> list[str]:
    said = cause.message.lower()
    if cause.kind in ("MemoryError", "OutOfMemoryError") or "can't allocate memory" in said or "out of memory" in said:
        return [_less_memory(plan)]
    if cause.kind in ("ImportError", "ModuleNotFoundError") and cause.is_first_step:
        return [
            "The workers cannot import what the task is made of. Install it, or put its folder into PYTHONPATH; what "
            "the task's own file defines travels by itself."
        ]
    if cause.kind == "SystemExit":
        return ["Code that is trained with must not call sys.exit: it ends one worker only. Raise an exception."]
    return []


def _advice_on_exit(cause: Exit, supervision: Supervision, plan: Plan, evidence: Evidence) -> list[str]:
    if supervision.why_given_up(cause.rank):
        return []
    if evidence.was_out_of_memory(cause):
        return [_less_memory(plan)]
    if cause.signal == signal.SIGKILL:
        return ["It was not Syncline that killed it: ask the kernel (dmesg), the scheduler, or whoever else may."]
    if cause.signal in _NATIVE_CRASHES:
        more = " Is /dev/shm full, or the disk?" if cause.signal == signal.SIGBUS else ""
        return [f"That is a crash in native code: torch, an extension, or what they were given.{more}"]
    if cause.signal is None:
        return ["It left without an exception, as os._exit does, or native code that calls exit."]
    return []


def _less_memory(plan: Plan) -> str:
    if plan.kind == "own-loop":
        return "There is not as much memory. Smaller batches, fewer --workers or a smaller model need less."
    return (
        "There is not as much memory. A smaller --batch, a --memory-limit (shares in as many pieces as that takes), "
        "--checkpoint-activations, fewer --workers or a smaller model need less."
    )


# What came with it


def _why_not_replaced(supervision: Supervision, plan: Plan, cause: Failed | Exit) -> list[str]:
    if supervision.lost_too_many:
        saved = "; what the others had done is saved" if supervision.gave_up else ""
        return [
            f"More than {plan.most_losses} processes were lost within five minutes, so the run was ended{saved}. If "
            "such losses are to be expected, set --most-losses higher."
        ]
    if not isinstance(cause, Failed) or supervision.membership.policy == "stop":
        return []
    same = [f for f in supervision.failures if _is_same(f, cause)]
    if same:
        who = _capital(plan.name_of(same[0].rank)) if same[0].rank != cause.rank else "The one before it"
        return [f"{who} failed in the same way at this step, so the run was ended: another would only do so again."]
    return ["It had not done a step, so the run was ended: another would hardly do better."] * cause.is_first_step


def _also_lost(supervision: Supervision, plan: Plan, cause: Failed | Exit) -> list[str]:
    """The others in a line: those who ended because of it, and those with a cause of their own."""
    because = {f.rank for f in supervision.failures if f.consequence} - {cause.rank}
    lines = [f"The other worker{'s' * (len(because) > 1)} ended because of it."] if because else []
    exceptions = [
        f"{plan.name_of(f.rank)} raised {f.kind} at step {f.step}"
        for f in supervision.failures
        if f is not cause and not f.consequence and not _is_same(f, cause)
    ]
    exits = [f"{plan.name_of(c.rank)} {c.in_words()}" for c in supervision.crashes if c is not cause]
    apart = [*exceptions, *exits]
    if apart:
        others = f", and {len(apart) - 3} more" if len(apart) > 3 else ""
        lines.append(f"Also lost: {', '.join(apart[:3])}{others}.")
    return lines


def _is_same(other: Failed, cause: Failed | Exit) -> bool:
    """Whether `other` is the same failure, of another worker or of an earlier life."""
    return other is not cause and isinstance(cause, Failed) and (other.kind, other.step) == (cause.kind, cause.step)


def _last_words(log: Path) -> list[str]:
    """The end of what it printed or, if Python saw it crash, where that was."""
    try:
        lines = [_cut(line) for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return []
    crashes = [i for i, line in enumerate(lines) if line.startswith(_WHERE_IT_CRASHED)]
    if crashes:
        where = [line for line in lines[crashes[-1] :] if "/torch/nn/modules/module.py" not in line]
        return [f"Where it was, from {log}:", *(f"  {line}" for line in where[:_MOST_LOG_LINES])]
    shown = [f"  {line}" for line in lines[-_MOST_LOG_LINES:]]
    return [f"Its last output, in {log}:", *shown] if shown else []


def _cut(line: str) -> str:
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
