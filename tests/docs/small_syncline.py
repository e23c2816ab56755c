"""The `syncline` command that tests of pages use: same command line, less data and fewer steps.

A page says `--data mnist --epochs 3`, because that is what readers want; tests train three steps on digits. The rest of
the command line is used as it is. `RUN`, and runs that a page only names, stand for the newest run; if there is none,
one is trained.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_STEPS = {
    "train": ["--max-steps", "3", "--evaluate-every", "0"],
    "run": ["--max-steps", "3"],
    "resume": ["--max-steps", "5", "--evaluate-every", "0"],
    "plan": ["--seconds", "0.5"],
}
_SMALL = {"mnist": "digits", "fashion-mnist": "digits", "cifar10": "digits"}


def smaller(words: list[str]) -> list[str]:
    """The command line for less work. The page's own settings come later and therefore win over the added ones."""
    if not words:
        return words
    words = [words[0], *_STEPS.get(words[0], []), *words[1:]]
    before = [None, *words]
    return [
        _SMALL.get(word, word) if flag in ("--data", "-d") else word for flag, word in zip(before, words, strict=False)
    ]


def is_only_named(word: str) -> bool:
    """Whether it stands for a run that readers have and this folder has not."""
    return word == "RUN" or (word.startswith("runs/") and not Path(word).exists())


def newest_run() -> str:
    """The newest run in this folder."""
    found = sorted(Path("runs").glob("*/plan.json"), key=lambda path: path.stat().st_mtime)
    if found:
        return str(found[-1].parent)
    made = [sys.executable, __file__, "train", "mlp", "--data", "digits", "--quiet"]
    subprocess.run(made, check=True, capture_output=True)
    return newest_run()


def main() -> None:
    """Run the command, as `syncline` would."""
    from syncline.cli.main import main as syncline

    words = smaller(sys.argv[1:])
    sys.argv[1:] = [newest_run() if is_only_named(word) else word for word in words]
    syncline()


if __name__ == "__main__":
    main()
