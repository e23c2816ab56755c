"""What the page on declared models shows, and its example, are run here."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from syncline.declare.declared import Declared

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "declaring-models.md").read_text()


def run(command: list[str], cwd: Path) -> str:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=150, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.S)
    return [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("line", [c for c in commands() if " train " not in c])
def test_every_command_of_the_page_works(line, tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__", "runs"))
    assert run([sys.executable, "-m", "syncline.cli.main", *shlex.split(line)[1:]], tmp_path)


def test_the_declared_example_reaches_96_percent_on_held_out_digits(tmp_path):
    example = str(ROOT / "examples" / "declared.toml")
    out = run([sys.executable, "-m", "syncline.cli.main", "train", example, "--json"], tmp_path)
    assert json.loads(out.splitlines()[-1])["metrics"]["test/accuracy"] > 0.96


def test_the_models_of_the_page_can_be_built(tmp_path):
    blocks = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 2
    for block in blocks:
        assert tomllib.loads(block)["data"] == "digits"
        file = tmp_path / "my_run.toml"
        file.write_text(block)
        assert sum(p.numel() for p in Declared.from_toml(file).build((1, 8, 8), 10).parameters()) > 1000


def test_the_python_of_the_page_runs(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    script = tmp_path / "block.py"
    script.write_text(block)
    assert "Linear(in_features=8, out_features=16" in run([sys.executable, str(script)], tmp_path)
