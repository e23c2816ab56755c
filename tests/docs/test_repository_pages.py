"""What README.md and CONTRIBUTING.md say about the repository is so."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "newsfragments/README.md"]


@pytest.mark.parametrize("name", PAGES)
def test_links_and_paths_lead_to_files(name):
    page = ROOT / name
    text = page.read_text()
    linked = {target.partition("#")[0] for target in re.findall(r"\]\((?!https?://|#)([^)]+)\)", text)}
    assert [target for target in sorted(linked) if not (page.parent / target).exists()] == []
    named = set(re.findall(r"`((?:syncline|tests|docs|examples|newsfragments)/[\w./-]+)`", text))
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", PAGES)
def test_make_targets_exist(name):
    text = (ROOT / name).read_text()
    shown = set(re.findall(r"`make ([a-z-]+)", text)) | set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert shown <= targets


def test_the_picture_of_the_folders_is_the_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (order,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    (picture,) = re.findall(r"```\n(cli .*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    drawn = [re.split(r" {2,}", line)[0].strip() for line in picture.splitlines() if not line.startswith(" ")]
    assert drawn == order


def test_every_tick_of_the_comparison_links_to_a_test_or_a_benchmark():
    table = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("|")]
    rows = [line.split("|")[1:-1] for line in table[2:]]
    assert any("✓" in row[1] for row in rows)
    for row in rows:
        for cell in row[1:]:
            links = re.findall(r"\[[^\]]*✓[^\]]*\]\(((?:tests|docs/bench)[^)]*)\)", cell)
            assert len(links) == cell.count("✓"), cell


def test_measured_figures_name_their_command_and_machine():
    text = (ROOT / "README.md").read_text()
    for paragraph in re.split(r"\n\s*\n", text):
        if re.search(r"\d(\.\d)? times (and|as fast)|images/s in", paragraph):
            assert "syncline bench" in paragraph, paragraph
    assert re.search(r"2-core Linux\s+x86-64", text)
