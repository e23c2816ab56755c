"""Table 4: commands to install, disk, code lines, and the time of the command.

Here: counting, pure where it can be. A "code line" holds at least one token that is neither comment nor docstring.
"""

from __future__ import annotations

import ast
import difflib
import io
import time
import tokenize
from pathlib import Path

from syncline.lab.bench.peer_recipes import PeerFramework, adapters_folder, install_commands
from syncline.lab.survey.probes.probe import Bench, Round, Work, run_adapter
from syncline.lab.survey.values import Absent

_STEPS = 100
_SAME_LOOP = "torch_lenet"
"""Adapters that import it train the same torch module by the same loop, so a difference in lines means something."""
_NO_TOKENS = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def measure_effort(bench: Bench) -> Round:
    """The counts are the same in every round; the time is not."""
    start = time.perf_counter()
    event = run_adapter(bench, Work(steps=_STEPS))
    seconds = time.perf_counter() - start
    added, removed = _changes(bench.peer)
    return Round(
        values={
            "commands": float(_commands(bench.peer, bench.environments)),
            "disk": _disk(bench),
            "lines": float(len(code_lines(_source(bench.peer)))),
            "added": added,
            "removed": removed,
            "command": seconds,
        },
        version=str(event["version"]),
    )


def code_lines(source: str) -> list[str]:
    """The lines with code, stripped."""
    lines = source.splitlines()
    skipped = _docstring_lines(source)
    numbers: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_TOKENS:
            numbers.update(range(token.start[0], token.end[0] + 1))
    return [lines[number - 1].strip() for number in sorted(numbers - skipped)]


def changed_lines(before: list[str], after: list[str]) -> tuple[int, int]:
    """Lines added and removed."""
    marks = [line[0] for line in difflib.ndiff(before, after)]
    return marks.count("+"), marks.count("-")


def _docstring_lines(source: str) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            found.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return found


def _source(peer: PeerFramework) -> str:
    """All of what a user would write: the adapter, and a task file beside it."""
    files = [peer.folder / name for name in ("adapter.py", "task.py")]
    return "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())


def _changes(peer: PeerFramework) -> tuple[float | Absent, float | Absent]:
    single = adapters_folder() / "protocol" / "one_process.py"
    source = _source(peer)
    if _SAME_LOOP not in source or (peer.folder / "task.py").is_file():
        why = Absent("it does not train by the loop of the others, so every line differs")
        return why, why
    added, removed = changed_lines(code_lines(single.read_text(encoding="utf-8")), code_lines(source))
    return float(added), float(removed)


def _commands(peer: PeerFramework, environments: Path) -> int:
    if not peer.has_own_environment:
        return 0
    by_hand = [line for line in peer.by_hand.splitlines() if line.strip()]
    return len(install_commands(peer, environments)) + len(by_hand)


def _disk(bench: Bench) -> float | Absent:
    if not bench.peer.has_own_environment:
        return Absent("it runs in Syncline's own environment, which has other packages, too")
    files = (bench.environments / bench.peer.key).rglob("*")
    return sum(f.lstat().st_size for f in files if f.is_file() and not f.is_symlink()) / 1e6
