"""Runs of a user's own script under `syncline run`, as real processes, and what is left of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from real_runs import Ran, final_state
from real_runs import syncline as command


def run(
    folder: Path,
    script: str | None,
    name: str,
    *arguments: str,
    workers: int = 3,
    faults: str = "",
    code: int = 0,
    env: dict[str, str] | None = None,
) -> Ran:
    """Run `script`, or the one that is in the folder; it must end with exit code `code`."""
    if script is not None:
        (folder / "loop.py").write_text(script)
    words = ("run", "loop.py", "--workers", str(workers), "--name", name, *arguments)
    done = command(*words, cwd=folder, env={"SYNCLINE_FAULTS": faults, **(env or {})})
    assert done.code == code, done.err
    return done


def state(folder: Path, name: str) -> dict[str, Any]:
    return final_state(folder / "runs" / name)


def audit(folder: Path, name: str) -> list[str]:
    """The audit's line for each epoch; the run must be clean."""
    done = command("audit", f"runs/{name}", cwd=folder)
    assert done.code == 0, done.out
    return [line for line in done.out.splitlines() if line.startswith("epoch")]


def assert_clean(folder: Path, name: str, *, epochs: int, samples: int = 103) -> None:
    expected = f"{samples} of {samples} samples committed once; 0 lost, 0 repeated"
    assert audit(folder, name) == [f"epoch {epoch}: {expected}" for epoch in range(1, epochs + 1)]
