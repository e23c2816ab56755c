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
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
LIMIT_S = 120
Script = dict[str, Any]


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


class Runs:
    """The runs of one script."""

    def __init__(self, script: Script, folder: Path, data: Path) -> None:
        self.script, self.folder = script, folder
        path = [str(HERE / "support"), str(folder)]
        self._env = {
            **os.environ, "PYTHONPATH": os.pathsep.join(path), "MNIST": str(data / "mnist"), "WITHOUT_NOISE": "1",
            "IMAGES": str(script["images"]), "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def call(self, name: str, words: list[str], *, sign: bool = False, **env: str) -> tuple[int, str]:
        """Run a command that leaves the result `name`; the exit code, and what it printed."""
        result = self.folder / f"{name}.result"
        extra = {"RESULT": str(result), **env}
        if sign:
            extra |= {"SIGN_AFTER": str(self.script["steps"] // 2), "SIGN": str(self.folder / f"{name}.sign")}
        log = self.folder / f"{name}.log"
        with log.open("a") as output:
            process = subprocess.Popen(
                words, cwd=self.folder, env=self._env | extra, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                if sign:
                    self._interrupt(process, self.folder / f"{name}.sign")
                code = process.wait(LIMIT_S)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        return code, log.read_text()

    def _interrupt(self, process: subprocess.Popen[bytes], sign: Path) -> None:
        end = time.monotonic() + LIMIT_S
        while not sign.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)

    def python(self, name: str, **env: str) -> tuple[int, str]:
        return self.call(name, [sys.executable, self.script["run"], *self._arguments()], **env)

    def syncline(self, name: str, *options: str, workers: int = 2, sign: bool = False, **env: str) -> tuple[int, str]:
        command = Path(sys.executable).with_name("syncline")
        words = [str(command), "run", self.script["run"], "--workers", str(workers), "--name", name, *options]
        words += ["--threads", "1"]
        return self.call(name, [*words, "--", *self._arguments()], sign=sign, **env)

    def other(self, *words: str, name: str = "other") -> tuple[int, str]:
        return self.call(name, [str(Path(sys.executable).with_name("syncline")), *words])

    def _arguments(self) -> list[str]:
        return list(self.script.get("arguments", []))

    def result(self, name: str) -> dict[str, Any] | None:
        path = self.folder / f"{name}.result"
        return torch.load(path) if path.exists() else None


def difference(a: dict[str, Any] | None, b: dict[str, Any] | None) -> str:
    """The largest difference of any parameter."""
    if a is None or b is None:
        return "NO RESULT"
    pairs = [(x[name], y[name]) for x, y in zip(a["state"], b["state"], strict=True) for name in x]
    if all(torch.equal(x, y) for x, y in pairs):
        return "same bits"
    return f"{max(float((x.double() - y.double()).abs().max()) for x, y in pairs if x.numel()):.0e}"


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
