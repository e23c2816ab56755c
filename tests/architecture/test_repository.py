"""The files beside the code do what CONTRIBUTING.md says of them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
KINDS = {
    kind["directory"] for kind in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
}


def test_hooks_run_before_a_commit_are_those_of_make_lint():
    valid = [sys.executable, "-m", "pre_commit", "validate-config", str(ROOT / ".pre-commit-config.yaml")]
    subprocess.run(valid, check=True)
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local", "hooks from elsewhere would need a network"
    hooks = {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in repository["hooks"]}
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    assert hooks == set(re.findall(r"\$\(BIN\)/([\w-]+)", recipe[1]))


def test_news_fragments_have_an_issue_a_kind_and_text():
    fragments = [path for path in (ROOT / "newsfragments").iterdir() if path.name not in ("README.md", ".gitignore")]
    for path in fragments:
        assert re.fullmatch(rf"(\d+|\+[\w-]+)\.({'|'.join(KINDS)})(\.\d+)?\.md", path.name), path.name
        assert path.read_text().strip(), path.name


def test_the_gate_is_one_make_target():
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "make test"
