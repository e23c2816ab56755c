"""Which lines of a ledger are possible.

Here: a pure check of each line against the view in which it was written. A damaged number could otherwise make an audit
count to a trillion, or need that much memory. Not here: counting (`audit.py`), lines that are no JSON (`ledger_file.py`
skips them).
"""

from __future__ import annotations

from collections.abc import Iterable

from syncline.data.assignment import Range
from syncline.data.ledger import Closed, Opened, Run, Used
from syncline.errors import DataError

_MOST_SAMPLES = 2**31
"""Over all epochs. An audit needs a few bytes for each."""
_MOST_UNREPORTED_STEPS = 2_000_000
"""Over all workers. Workers report every second, so more of them in one view were never really trained."""


def check_line(line: Opened | Used | Closed, opened: Opened | None, reported: int, number: int) -> None:
    """Raise `DataError` if `line`, the `number`-th, is impossible after `opened`, the view before.

    `reported` is the step up to which all workers have reported in that view.
    """
    problem = ""
    if isinstance(line, Opened):
        problem = _in_opened(line) or _in_position(line.start, line.requeued, line.count)
    elif opened is not None:
        problem = (
            _in_used(line, opened) if isinstance(line, Used) else _in_position(line.at, line.requeued, opened.count)
        )
    if not problem and opened is not None and not isinstance(line, Used):
        problem = _in_gap(line, reported, opened)
    if problem:
        raise DataError(
            f"Line {number} of the ledger is impossible: {problem}. The file was damaged or changed, so the samples "
            "cannot be counted. Restore it from a copy.",
            code="impossible-ledger-line",
            line=number,
            problem=problem,
        )


def _in_opened(line: Opened) -> str:
    if line.count < 1 or line.batch < 1:
        return f"{line.count} samples in batches of {line.batch}"
    if not 0 < len(line.members) == len(set(line.members)):
        return f"its members are {line.members[:8]}"
    return ""


def _in_used(line: Used, opened: Opened) -> str:
    if line.steps < opened.start[2]:
        return f"a worker has done {line.steps} steps in a view that began at step {opened.start[2]}"
    # An epoch takes at least one step, unless a script's own loop leaves it.
    latest = opened.start[0] + line.steps - opened.start[2] if opened.epochs is not None else _MOST_SAMPLES
    for run in line.runs:
        if not _is_possible(run, opened.count, latest):
            return f"the samples {list(run)} in epochs of {opened.count} samples"
    return ""


def _is_possible(run: Run, count: int, latest: int) -> bool:
    epoch, low, high, stride, times = run
    repeats = times == 1 or (times > 1 and stride > 0)
    is_epoch = 0 <= epoch <= latest and (epoch + 1) * count <= _MOST_SAMPLES
    return is_epoch and 0 <= low < high and repeats and high + (times - 1) * stride <= count


def _in_position(position: tuple[int, int, int, int], requeued: Iterable[Range], count: int) -> str:
    epoch, cursor, step, extra = position
    if min(position) < 0 or cursor > count or extra > step:
        return f"the position {list(position)} in epochs of {count} samples"
    if (epoch + 1) * count > _MOST_SAMPLES:
        return f"{epoch + 1:,} epochs of {count:,} samples"
    for of_epoch, low, high in requeued:
        if not (0 <= of_epoch <= epoch and 0 <= low < high <= count):
            return f"the samples {[of_epoch, low, high]} in epochs of {count} samples"
    return ""


def _in_gap(line: Opened | Closed, reported: int, opened: Opened) -> str:
    step = line.start[2] if isinstance(line, Opened) else line.at[2]
    unreported = (step - reported) * len(opened.members)
    return f"step {step:,} follows step {reported:,}" if unreported > _MOST_UNREPORTED_STEPS else ""
