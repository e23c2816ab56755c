"""The wheel is complete: a user who installs it without extras, outside the checkout, can train.

Shared with the environment of the tests: the third-party packages that syncline requires without extras. They are
linked into the fresh environment, because downloading a gigabyte would take longer than the rest. Not shared: syncline
itself, and every other package.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.xdist_group("wheel")  # one process, because these tests share a fixture

ROOT = Path(__file__).parents[2]
BESIDE_CODE = (".pyi", ".cpp", ".h", ".typed")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make dist` makes."""
    folder = tmp_path_factory.mktemp("dist")
    source = tmp_path_factory.mktemp("source") / "syncline"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():  # a copy, because setuptools writes into the source tree
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def files_beside_code() -> set[str]:
    """All files of the package that are not Python, but that it needs."""
    package = ROOT / "syncline"
    found = {path for path in package.rglob("*") if path.suffix in BESIDE_CODE}
    found |= {path for path in package.glob("models/zoo/weights/*") if path.is_file()}
    return {path.relative_to(ROOT).as_posix() for path in found}


def test_the_wheel_and_the_sdist_have_every_file_of_the_package(dist):
    (wheel,) = dist.glob("*.whl")
    (sdist,) = dist.glob("*.tar.gz")
    python = {path.relative_to(ROOT).as_posix() for path in (ROOT / "syncline").rglob("*.py")}
    needed = python | files_beside_code()
    assert {Path(name).suffix for name in needed} >= {".py", *BESIDE_CODE}
    assert needed - set(zipfile.ZipFile(wheel).namelist()) == set()
    with tarfile.open(sdist) as archive:
        assert needed - {name.partition("/")[2] for name in archive.getnames()} == set()


def needed_distributions() -> set[str]:
    """The third-party distributions that the installation of syncline brings, without any extra."""
    found, frontier = set[str](), {"syncline"}
    while frontier:
        found |= frontier
        lines = [line for name in frontier for line in metadata.requires(name) or ()]
        required = [r for r in map(Requirement, lines) if r.marker is None or r.marker.evaluate({"extra": ""})]
        frontier = {canonicalize_name(r.name) for r in required} - found
    return found - {"syncline"}


def link(distribution: str, folder: Path) -> None:
    """Link the files of an installed distribution into `folder`, as if it had been installed there."""
    files = metadata.files(distribution)
    assert files, distribution
    for name in {file.parts[0] for file in files} - {"..", "__pycache__"}:
        if not (folder / name).exists():
            (folder / name).symlink_to(Path(sysconfig.get_path("purelib"), name))


def test_the_wheel_installed_without_extras_trains_the_demo_outside_the_checkout(dist, tmp_path):
    (wheel,) = dist.glob("*.whl")
    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=False, symlinks=True)
    python, packages = fresh / "bin" / "python", Path(sysconfig.get_path("purelib", "venv", {"base": str(fresh)}))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], cwd=tmp_path, check=True)
    for name in needed_distributions():
        link(name, packages)

    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    code = "import importlib.util as u, syncline; print(syncline.__file__, [*map(u.find_spec, ('ray', 'pyspark'))])"
    found = subprocess.run([python, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.stdout == f"{packages / 'syncline' / '__init__.py'} [None, None]\n", found.stderr
    demo = [fresh / "bin" / "syncline", "train", "mlp", "--data", "digits", "--workers", "2", "--epochs", "20"]
    done = subprocess.run(demo, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "460 steps" in done.stdout
