"""Check the table of docs/guides/public-scripts.md: fetched scripts, with few lines changed, in many situations.

    python benchmarks/public_scripts/check.py --repositories DIR --data DIR [--only mnist] [--speed]

`--repositories` holds clones as OWNER+NAME (or OWNER+NAME/repo, bare), `--data` the folders mnist, cora and
tinyshakespeare. For each script of `scripts.toml`: the changed lines; the largest difference of a parameter between
plain `python` and 1, 2 and 3 workers; a worker that is killed, and the audit; `replace-only` with two kills, and Ctrl-C
with `syncline resume`, which must give the same bits. With `--speed`: seconds of one process with two threads, and of
two workers. Here: running and comparing. Not here: the changes.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

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
    _make_data(script["name"], data, folder)
    return folder


def _make_data(name: str, data: Path, folder: Path) -> None:
    text = (data / "tinyshakespeare" / "input.txt").read_text() if (data / "tinyshakespeare").exists() else ""
    if name.startswith("word_language_model"):
        (folder / "corpus").mkdir()
        words = text.split()[:4250]
        for part, (low, high) in {"train": (0, 3950), "valid": (3950, 4100), "test": (4100, 4250)}.items():
            (folder / "corpus" / f"{part}.txt").write_text("\n".join(" ".join(words[low:high]).split("\n")))
    if name == "nanoGPT":
        import numpy as np

        (folder / "data" / "characters").mkdir(parents=True)
        codes = np.frombuffer(text[:50_000].encode("ascii", "replace"), np.uint8).astype(np.uint16)
        for part, chosen in {"train": codes[:45_000], "val": codes[45_000:]}.items():
            chosen.tofile(folder / "data" / "characters" / f"{part}.bin")
    if name == "gcn":
        (folder / "cora").mkdir()
        (folder / "cora" / "cora.content").write_bytes(
            gzip.decompress((data / "cora" / "cora.content.gz").read_bytes())
        )
        shutil.copy(data / "cora" / "cora.cites", folder / "cora")
    if "cv_example" in name:
        import numpy as np
        from PIL import Image

        (folder / "pets").mkdir()
        random = np.random.RandomState(0)
        for number in range(120):
            pixels = random.randint(0, 256, (40, 48, 3), np.uint8)
            Image.fromarray(pixels).save(folder / "pets" / f"{('cat', 'dog', 'owl')[number % 3]}_{number}.jpg")


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
    code, _ = runs.syncline("stopped", sign=True)
    interrupted = runs.result("stopped") is None and code == 130
    runs.call("stopped", [str(Path(sys.executable).with_name("syncline")), "resume", "runs/stopped"])
    return [
        script["name"],
        str(changed_lines(script)),
        ", ".join(difference(one, runs.result(f"w{n}")) for n in (1, 2, 3)),
        f"{'finished' if runs.result('killed') else 'FAILED'}, audit {audited}",
        f"{difference(whole, runs.result('replaced'))} ({kills} kills)",
        f"{difference(whole, runs.result('stopped'))}{'' if interrupted else f' (NOT INTERRUPTED, exit {code})'}",
    ]


def speed(runs: Runs) -> list[str]:
    """Seconds in one process with two threads, and with two workers, three rounds in turn."""
    seconds: dict[str, list[float]] = {"python, 2 threads": [], "syncline, 2 workers": []}
    for number in range(3):
        runs.python(f"p{number}", OMP_NUM_THREADS="2")
        runs.syncline(f"s{number}")
        for kind, name in zip(seconds, (f"p{number}", f"s{number}"), strict=True):
            found = runs.result(name)
            seconds[kind].append(found["seconds"] if found else float("nan"))
    return [
        f"{kind}: {sorted(values)[1]:.1f} s ({min(values):.1f} to {max(values):.1f})"
        for kind, values in seconds.items()
    ]


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
        target = options.work.resolve() / f"{number:02d}"
        target.mkdir(parents=True)
        folder = make_copy(script, options.repositories, options.data, target)
        runs = Runs(script, folder, options.data)
        cells = [script["name"], *speed(runs)] if options.speed else check(script, runs)
        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
