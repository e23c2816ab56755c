"""The error message of a failed run: its root cause. Worker, error, step and advice come in the first ten lines; then
the user's own traceback. Failures that followed from it are summarized in one line.

Not here: what is known beyond exit codes (`exit_diagnosis.py`), and failures that do not end a run
(`observe/incidents.py`).
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from syncline.comms.control import Failed
from syncline.coordinator.exit_diagnosis import ExitDiagnosis
from syncline.coordinator.failure_record import Failure, own_error
from syncline.coordinator.supervision import Supervision
from syncline.engines.engine import Exit
from syncline.errors import ANOTHER_MODEL, SCRIPT_EXIT, SynclineError, WorkerFailed, plural
from syncline.planning.plan import Plan
from syncline.telemetry.run_dir import RunDir

_MOST_MESSAGE_LINES = 3
_LONGEST_LINE = 400
_MOST_LOG_LINES = 5
_NATIVE_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}
_NOT_SOLVED_BY_RESUMING = (SCRIPT_EXIT, ANOTHER_MODEL)
_FAULTHANDLER = "Fatal Python error: "
"""The first line that Python's faulthandler writes to a worker's log; the frames follow, innermost first."""


def explain_failure(
    supervision: Supervision,
    plan: Plan,
    run_dir: RunDir,
    last_step: int,
    last_checkpoint: Path | None,
    diagnosis: ExitDiagnosis,
) -> SynclineError:
    """The exception that a failed run ends with; its facts say the same as its message."""
    cause = supervision.failures.root_cause()
    has_steps = not supervision.membership.restarts_together
    resume = _how_to_resume(run_dir, last_checkpoint) if has_steps else start_again(run_dir)
    facts: dict[str, Any] = {
        "run_dir": str(run_dir.path),
        "checkpoint": last_checkpoint.name if last_checkpoint is not None else None,
        "resume_command": f"syncline resume {run_dir.path}" if last_checkpoint is not None else None,
    }
    if cause is None:
        return WorkerFailed(f"The run failed for an unknown reason.\n{resume}", **facts)
    after = [*_why_not_replaced(supervision, plan, cause), *_other_failures(supervision, plan, cause), resume]
    name = _capital(plan.name_of(cause.worker_id))
    facts |= {"worker_id": cause.worker_id, "name": plan.name_of(cause.worker_id)}
    if isinstance(cause, Exit):
        hung = supervision.failures.hung.get(cause.worker_id, "")
        name_of_signal = signal.Signals(cause.signal).name if cause.signal is not None else None
        facts |= {"step": last_step, "signal": name_of_signal, "exit_code": cause.code, "hung": hung}
        head = [
            f"{name} {diagnosis.describe(cause, hung)}{f', after step {last_step}' if has_steps else ''}.",
            *_last_output(run_dir.log(cause.worker_id)),
            *([] if hung else _advice_on_exit(cause, plan, diagnosis)),
        ]
        return WorkerFailed("\n".join([*head, *after]), **facts)
    facts |= {"step": cause.step, "exception": cause.kind, "samples": cause.samples}
    if (own := own_error(cause)) is not None:
        # Syncline's own message explains itself; only add how to resume, if that is possible.
        is_final = last_checkpoint is None or cause.code in _NOT_SOLVED_BY_RESUMING
        message = cause.message if is_final else f"{cause.message}\n{resume}"
        return own(message, code=cause.code, **{**facts, **cause.facts})
    samples = f", samples {', '.join(map(str, cause.samples))}" if cause.samples else ""
    first, *more = [_cut(line) for line in cause.message.splitlines() if line.strip()][:_MOST_MESSAGE_LINES]
    where = f" at step {cause.step}{samples}" if has_steps else ""
    head = [f"{name} raised {cause.kind}{where}: {first}", *more]
    traceback = ["", cause.traceback.rstrip()] if cause.traceback else []
    return WorkerFailed("\n".join([*head, *_advice_on_exception(cause, plan), *after, *traceback]), **facts)


# Advice


def _how_to_resume(run_dir: RunDir, last_checkpoint: Path | None) -> str:
    if last_checkpoint is None:
        return f"There is no checkpoint to resume from. The logs are in {run_dir.log(0).parent}."
    return f"To resume from the last checkpoint ({last_checkpoint.name}): syncline resume {run_dir.path}"


def start_again(run_dir: RunDir) -> str:
    """What to do about a script that trains with torch.distributed itself."""
    return (
        f"To start the script again: syncline resume {run_dir.path}. It continues from its own checkpoints, if it "
        "writes and reads any."
    )


def _advice_on_exception(cause: Failed, plan: Plan) -> list[str]:
    message = cause.message.lower()
    is_memory = "can't allocate memory" in message or "out of memory" in message
    if is_memory or cause.kind in ("MemoryError", "OutOfMemoryError"):
        return [_less_memory(plan)]
    if cause.kind in ("ImportError", "ModuleNotFoundError") and cause.is_first_step:
        return [
            "The workers cannot import a module that the task needs. Install it, or add its folder to PYTHONPATH. Only "
            "code in the task's own file is sent to the workers."
        ]
    if cause.kind == "SystemExit":
        return ["Training code must not call sys.exit: it ends only one worker. Raise an exception instead."]
    return []


def _advice_on_exit(cause: Exit, plan: Plan, diagnosis: ExitDiagnosis) -> list[str]:
    if diagnosis.was_out_of_memory(cause):
        return [_less_memory(plan)]
    if cause.signal == signal.SIGKILL:
        return ["Syncline did not kill it. Check the kernel log (dmesg), the job scheduler, and other users."]
    if cause.signal in _NATIVE_CRASHES:
        more = " Check whether /dev/shm or the disk is full." if cause.signal == signal.SIGBUS else ""
        return [f"This is a crash in native code: torch, an extension, or the data they were given.{more}"]
    if cause.signal is None and not cause.reason:
        return ["It exited without an exception: the code called os._exit, or native code called exit."]
    return []


def _less_memory(plan: Plan) -> str:
    if plan.kind in ("fit", "graph"):
        return "There is not enough memory. Use fewer --workers, or less data."
    if plan.kind == "own-loop":
        return "There is not enough memory. Use smaller batches, fewer --workers or a smaller model."
    return (
        "There is not enough memory. Set a --memory-limit, a smaller --batch, --checkpoint-activations or fewer "
        "--workers, or use a smaller model."
    )


# Context


def _why_not_replaced(supervision: Supervision, plan: Plan, cause: Failure) -> list[str]:
    if supervision.failures.too_many:
        saved = " The work of the other workers was saved." if supervision.gave_up else ""
        return [
            f"The run was stopped because more than {plural(plan.max_failures, 'process', 'processes')} failed within "
            f"five minutes.{saved} If that is expected, increase --max-failures."
        ]
    if not isinstance(cause, Failed) or supervision.membership.policy == "stop":
        return []
    same = supervision.failures.earlier_same(cause)
    if same:
        other = plan.name_of(same[0].worker_id) if same[0].worker_id != cause.worker_id else "its predecessor"
        when = "" if supervision.membership.restarts_together else " at this step"
        return [f"No replacement was started: {other} failed in the same way{when}."]
    return ["No replacement was started: it failed before its first step, and so would another."] * cause.is_first_step


def _other_failures(supervision: Supervision, plan: Plan, cause: Failure) -> list[str]:
    """The others in a line: those that failed because of it, and those with a cause of their own."""
    log = supervision.failures
    consequences = {e.worker_id for e in log.exceptions if e.consequence} - {cause.worker_id}
    lines = [f"{plural(len(consequences), 'other worker')} stopped because of it."] if consequences else []
    same = log.earlier_same(cause)
    exceptions = [
        f"{plan.name_of(e.worker_id)} raised {e.kind} at step {e.step}"
        for e in log.exceptions
        if e is not cause and not e.consequence and e not in same
    ]
    exits = [f"{plan.name_of(c.worker_id)} {c.describe()}" for c in log.crashes if c is not cause]
    others = [*exceptions, *exits]
    if others:
        more = f", and {len(others) - 3} more" if len(others) > 3 else ""
        lines.append(f"Other failures: {', '.join(others[:3])}{more}.")
    return lines


def _last_output(log: Path) -> list[str]:
    """The end of a worker's log or, if it crashed in native code, where Python was."""
    try:
        lines = [_cut(line) for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return []
    crashes = [i for i, line in enumerate(lines) if line.startswith(_FAULTHANDLER)]
    if crashes:
        stack = [line for line in lines[crashes[-1] :] if "/torch/nn/modules/module.py" not in line]
        return [f"Where it crashed, from {log}:", *(f"  {line}" for line in stack[:_MOST_LOG_LINES])]
    shown = [f"  {line}" for line in lines[-_MOST_LOG_LINES:]]
    return [f"Its last output, from {log}:", *shown] if shown else []


def _cut(line: str) -> str:
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
