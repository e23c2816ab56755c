"""Files out of packages: what the package_indexes' own tools bring, and what can go wrong with them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from syncline.data import package_indexes
from syncline.data.package_indexes import debian_package, pypi_wheel
from syncline.errors import DataError


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is all there is on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


def tool(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_a_wheel_is_what_pip_downloads(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as archive:
        archive.writestr("some/file", "text")
    python = tool(tools / "python", f'[ "$1 $2 $3" = "-m pip download" ] && /bin/cp {tmp_path}/some.whl .')
    monkeypatch.setattr(package_indexes.sys, "executable", str(python))
    seen: list[tuple[str, int, int | None]] = []
    with pypi_wheel("some==1", lambda *report: seen.append(report)) as archive:
        assert archive.read("some/file") == b"text"
    size = (tmp_path / "some.whl").stat().st_size
    assert seen == [("some==1 (PyPI)", 0, None), ("some==1 (PyPI)", size, size)]


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("echo no such package; exit 1", "exit code 1: no such package"),
        ("true", r"left no \.whl file"),
        ("echo nonsense > some.whl", "is not a valid wheel"),
    ],
)
def test_whatever_goes_wrong_with_pip_is_reported(
    tools: Path, monkeypatch: pytest.MonkeyPatch, script: str, complaint: str
):
    monkeypatch.setattr(package_indexes.sys, "executable", str(tool(tools / "python", script)))
    with pytest.raises(DataError, match=complaint), pypi_wheel("some==1", None):
        pass


def test_a_debian_package_is_unpacked_and_not_installed(tools: Path):
    tool(tools / "apt-get", 'for last; do :; done; echo "$last" > package_1_all.deb')
    tool(tools / "dpkg-deb", '[ "$1" = -x ] && /bin/mkdir "$3/usr" && /bin/cp "$2" "$3/usr/content"')
    with debian_package("dataset-some", None) as root:
        assert (root / "usr" / "content").read_text() == "dataset-some\n"
    assert not root.exists()


def test_a_missing_tool_is_named(tools: Path):
    with pytest.raises(DataError, match="there is no dpkg-deb on PATH"), debian_package("dataset-some", None):
        pass
    tool(tools / "dpkg-deb", "true")
    with pytest.raises(DataError, match="there is no apt-get on PATH"), debian_package("dataset-some", None):
        pass
