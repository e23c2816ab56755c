"""Check the table of docs/guides/public-scripts.md: fetched scripts, with few lines changed, in many situations.

    python benchmarks/public_scripts/check.py --repositories DIR --data DIR [--only mnist] [--speed]

`--repositories` holds clones as OWNER+NAME (or OWNER+NAME/repo, bare), `--data` the folders mnist, cora and
tinyshakespeare. For each script of `scripts.toml`: the changed lines; the largest difference of a parameter between
plain `python` and 1, 2 and 3 workers; a worker that is killed, and the audit; `replace-only` with two kills, and Ctrl-C
with `syncline resume`, which must give the same bits. A script that distributes itself (`is_distributed`) runs without
a changed line, and is compared with torchrun. With `--speed`: seconds of one process with two threads, of DDP where
`scripts.toml` has its lines, and of two workers. Here: running and comparing. Not here: the changes, the data.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from inputs import make_inputs
from runs import HERE, Runs, Script, difference


def changed(text: str, edits: list[dict[str, Any]], file: str, main: str) -> str:
    """The text of `file` with the edits for it."""
    lines = text.rstrip("\n").split("\n")
    for edit in edits:
        if edit.get("file", main) != file:
            continue
        if edit["put"] == "end":
            lines += [" " * edit.get("indent", 0) + line for line in edit["lines"]]
            continue
        found = [number for number, line in enumerate(lines) if edit["at"] in line and "def " not in line]
        at = found[edit.get("number", 1) - 1]
        space = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        new = [space + line for line in edit["lines"]]
        low, high = {"before": (at, at), "after": (at + 1, at + 1)}.get(edit["put"], (at, at + edit.get("removes", 1)))
        lines[low:high] = new
    return "\n".join(lines) + "\n"


def changed_lines(script: Script) -> int:
    """For each edit the larger of the lines added and removed."""
    removed = [edit.get("removes", 1) if edit["put"] == "replace" else 0 for edit in script["change"]]
    return sum(max(len(edit["lines"]), gone) for edit, gone in zip(script["change"], removed, strict=True))


def make_copy(script: Script, repositories: Path, data: Path, target: Path) -> Path:
    """A copy of the script with its changes; the folder to run it in."""
    target.mkdir(parents=True)
    bare = repositories / script["repository"].replace("/", "+")
    bare = bare / "repo" if (bare / "repo").exists() else bare
    # Only the code: partial clones may lack large data files.
    code = f":(glob){script['folder']}/**/*.py" if script["folder"] != "." else ":(glob)**/*.py"
    archive = subprocess.run(
        ["git", "-C", bare, "archive", script["commit"], code], check=True, capture_output=True
    ).stdout
    subprocess.run(["tar", "x"], input=archive, cwd=target, check=True)
    folder, main = target / script["folder"], script["run"]
    for file in {main, *(edit["file"] for edit in script["change"] if "file" in edit)}:
        text = changed((folder / file).read_text(), script["change"] + script["setup"], file, main)
        if file == main:
            first = "from __future__ import print_function"
            text = text.replace(first, "") if first in text else text
            text = "import public_script\n" + text
        (folder / file).write_text(text)
    make_inputs(script["name"], data, folder)
    return folder


def check(script: Script, runs: Runs) -> list[str]:
    """The cells of the table."""
    runs.python("one")
    for workers in (1, 2, 3):
        runs.syncline(f"w{workers}", workers=workers)
    one, whole = runs.result("one"), runs.result("w2")
    third, half = script["steps"] // 3, script["steps"] // 2
    runs.syncline("killed", SYNCLINE_FAULTS=f"kill worker 1 at step {third}")
    code, audit = runs.other("audit", "runs/killed", name="audit")
    audited = "clean" if code == 0 else audit.strip().splitlines()[-1][:60]
    faults = f"kill worker 1 at step {third}; kill worker 0 at step {half}"
    _, printed = runs.syncline("replaced", "--on-worker-failure", "replace-only", SYNCLINE_FAULTS=faults)
    kills = printed.count("killed by SIGKILL")
    return [
        script["name"],
        str(changed_lines(script)),
        ", ".join(difference(one, runs.result(f"w{n}")) for n in (1, 2, 3)),
        f"{'finished' if runs.result('killed') else 'FAILED'}, audit {audited}",
        f"{difference(whole, runs.result('replaced'))} ({kills} kills)",
        _interrupted(runs, whole),
    ]


def check_unchanged(script: Script, runs: Runs) -> list[str]:
    """The cells of the table for a script that is written for torchrun."""
    runs.torchrun("torchrun")
    runs.syncline("whole")
    expected = runs.result("torchrun")
    _, printed = runs.syncline("killed", KILL_AFTER=str(script["steps"] // 2), KILLED=str(runs.folder / "killed.flag"))
    kills = printed.count("killed by SIGKILL")
    return [
        script["name"],
        str(changed_lines(script)),
        f"{difference(expected, runs.result('whole'))} as torchrun",
        f"{difference(expected, runs.result('killed'))} ({kills} kills)",
        "starts again",
        _interrupted(runs, expected),
    ]


def _interrupted(runs: Runs, expected: dict[str, Any] | None) -> str:
    """The result of a run that Ctrl-C interrupts and `syncline resume` continues."""
    code, _ = runs.syncline("stopped", sign=True)
    is_interrupted = runs.result("stopped") is None and code == 130
    runs.call("stopped", [str(Path(sys.executable).with_name("syncline")), "resume", "runs/stopped"])
    return (
        f"{difference(expected, runs.result('stopped'))}{'' if is_interrupted else f' (NOT INTERRUPTED, exit {code})'}"
    )


def speed(runs: Runs, ddp: Runs | None) -> list[str]:
    """Seconds in one process with two threads, with DDP, and with two workers, three rounds in turn."""
    ways: dict[str, Callable[[str], object]] = {"python, 2 threads": partial(runs.python, OMP_NUM_THREADS="2")}
    if ddp is not None:
        ways["DDP, 2 processes"] = ddp.torchrun
    ways["syncline, 2 workers"] = runs.syncline
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(3):
        for way, run in ways.items():
            name = f"{way.partition(',')[0]}-{number}"
            run(name)
            found = (ddp if way.startswith("DDP") and ddp is not None else runs).result(name)
            seconds[way].append(found["seconds"] if found else float("nan"))
    return [f"{way}: {sorted(all_)[1]:.2f} s ({min(all_):.2f} to {max(all_):.2f})" for way, all_ in seconds.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repositories", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("public-scripts"), help="an empty folder for the copies")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--speed", action="store_true")
    options = parser.parse_args()
    settings = tomllib.loads((HERE / "scripts.toml").read_text())
    print("| script | changed lines | difference with 1, 2, 3 workers | kill -9 | replace-only | Ctrl-C |", flush=True)
    print("|---|---|---|---|---|---|", flush=True)
    for number, entry in enumerate(settings["script"]):
        script = settings["defaults"] | entry
        if options.only and not any(script["name"].startswith(name) for name in options.only):
            continue
        if options.speed and "speed_images" in script:
            script["images"] = script["speed_images"]
        target = options.work.resolve() / f"{number:02d}"
        runs = Runs(script, make_copy(script, options.repositories, options.data, target), options.data)
        if options.speed:
            cells = [script["name"], *speed(runs, _with_ddp(script, options, target / "ddp"))]
        else:
            cells = check_unchanged(script, runs) if script["is_distributed"] else check(script, runs)
        print("|", " | ".join(cells), "|", flush=True)


def _with_ddp(script: Script, options: argparse.Namespace, target: Path) -> Runs | None:
    """The runs of the same script with DDP's lines in place of ours."""
    if "ddp" not in script:
        return None
    script = {**script, "change": script["ddp"]}
    return Runs(script, make_copy(script, options.repositories, options.data, target), options.data)


if __name__ == "__main__":
    main()
