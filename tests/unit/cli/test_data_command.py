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


def test_info_of_a_path_tells_samples_shapes_classes_place_and_first_rows(table: Path):
    assert ran("info", str(table)).splitlines() == [
        str(table),
        f"  where     {table} (csv), 0.0 MB",
        "  samples   3 to train on, 0 to test on",
        "  inputs    2 numbers",
        "  classes   2: elm, oak",
        "  files     1, with 1 groups; shuffling mixes all samples",
        "  row 0     1 2 -> 1",
        "  row 1     3 4 -> 0",
        "  row 2     5 6 -> 1",
    ]


def test_info_and_get_of_a_name_tell_where_it_is():
    assert "1,437 to train on, 360 to test on" in ran("info", "digits")
    assert "iris is at " in ran("get", "iris")


def test_convert_says_how_to_train_on_it(table: Path, tmp_path: Path):
    out = ran("convert", f"{table}(test_share=0.34)", str(tmp_path / "out"), "--to", "arrow")
    assert out == f"{tmp_path}/out is there; train on it with: --data {tmp_path}/out\n"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["test.arrow", "train.arrow"]


def test_mistakes_are_told_with_the_nearest_name(table: Path, tmp_path: Path):
    with pytest.raises(UnknownName, match=r"no data set 'irus'\. Did you mean 'iris'"):
        ran("info", "irus")
    with pytest.raises(UnknownName, match=r"no format 'parket'\. Did you mean 'parquet'"):
        ran("convert", str(table), str(tmp_path / "out"), "--to", "parket")
    with pytest.raises(ConfigError, match="no option 'lable'"):
        ran("info", f"{table}(lable='a')")
