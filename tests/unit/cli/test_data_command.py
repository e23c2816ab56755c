"""`syncline data`: what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from syncline.cli.data import app
from syncline.errors import ConfigError, UnknownName


def ran(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "t.csv").write_text("a,b,species\n1,2,oak\n3,4,elm\n5,6,oak\n")
    return tmp_path / "t.csv"


def test_list_names_data_sets_formats_and_transforms():
    out = ran("list")
    assert "iris           Iris: 150 flowers" in out
    assert "parquet        .parquet, .pq" in out
    assert "For --augment: crop," in out


def test_info_of_a_path_shows_samples_shapes_classes_location_and_first_rows(table: Path):
    title, *lines = ran("info", str(table)).splitlines()
    assert title == str(table)
    shown = dict(line.strip().split("  ", 1) for line in lines)
    facts = {
        "where": [str(table), "csv"], "samples": ["3 for training", "0 for testing"], "inputs": ["2 numbers"],
        "classes": ["2: elm, oak"], "files": ["1"], "row 0": ["1 2 -> 1"], "row 1": ["3 4 -> 0"], "row 2": ["5 6 -> 1"],
    }  # fmt: skip
    assert shown.keys() == facts.keys()
    assert not [(name, fact) for name, wanted in facts.items() for fact in wanted if fact not in shown[name]]


def test_info_and_get_accept_a_name():
    out = ran("info", "digits")
    assert "1,437" in out
    assert "360" in out
    assert "iris" in ran("get", "iris")


def test_convert_shows_how_to_train_on_the_result(table: Path, tmp_path: Path):
    out = ran("convert", f"{table}(test_share=0.34)", str(tmp_path / "out"), "--to", "arrow")
    assert f"--data {tmp_path}/out" in out
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["test.arrow", "train.arrow"]


def test_unknown_names_suggest_the_nearest(table: Path, tmp_path: Path):
    with pytest.raises(UnknownName, match=r"'irus'.*'iris'"):
        ran("info", "irus")
    with pytest.raises(UnknownName, match=r"'parket'.*'parquet'"):
        ran("convert", str(table), str(tmp_path / "out"), "--to", "parket")
    with pytest.raises(ConfigError, match="'lable'"):
        ran("info", f"{table}(lable='a')")
