"""The example of a declared model learns, and the page on declared models shows what it promises."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

from warm_process import warm_process

from syncline.models.declared.declaration import Declared

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "declaring-models.md").read_text()


def python(*arguments: str, cwd: Path) -> str:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment, command = {**os.environ, "PYTHONPATH": path}, warm_process().words(*arguments)
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=150, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_declared_example_reaches_96_percent_on_held_out_digits(tmp_path):
    example = str(ROOT / "examples" / "declared.toml")
    out = python("-m", "syncline.cli.main", "train", example, "--json", cwd=tmp_path)
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
    assert "Linear(in_features=8, out_features=16" in python(str(script), cwd=tmp_path)
