"""Compiling the kernels: once for a machine, and never a reason to fail."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest
from other_user import NOBODY, needs_root

from syncline.compute.kernels import build

has_compiler = pytest.mark.skipif(not any(map(shutil.which, build._COMPILERS)), reason="there is no C++ compiler")


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """As in a new process with an empty cache; with the smallest source, the others take seconds each time."""
    monkeypatch.setitem(build._SOURCES, "layers", [s for s in build._SOURCES["layers"] if s.name == "max_pool.cpp"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    build._loaded.cache_clear()
    yield
    build._loaded.cache_clear()


def as_in_another_process() -> None:
    build._loaded.cache_clear()


def compiler_that(tmp_path: Path, does: str) -> str:
    script = tmp_path / "compiler"
    script.write_text(f"#!/bin/sh\n{does}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


@has_compiler
def test_they_are_compiled_once(monkeypatch, tmp_path):
    assert build.library() is not None
    assert build.why_unavailable() == ""
    (kept,) = (tmp_path / "cache" / "syncline" / "kernels").iterdir()
    assert kept.suffix == ".so"
    as_in_another_process()
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled a second time"))
    assert build.library() is not None


@has_compiler
def test_another_processor_has_its_own(monkeypatch, tmp_path):
    build.library()
    as_in_another_process()
    monkeypatch.setattr(build, "_processor", lambda: "model name: another one")
    build.library()
    assert len(list((tmp_path / "cache" / "syncline" / "kernels").iterdir())) == 2


@has_compiler
def test_what_is_spoiled_in_the_cache_is_compiled_anew(tmp_path):
    build.library()
    (kept,) = (tmp_path / "cache" / "syncline" / "kernels").iterdir()
    whole = kept.read_bytes()
    kept.unlink()  # not written over: this process still has it in memory
    kept.write_bytes(b"spoiled")
    as_in_another_process()
    assert build.library() is not None
    assert kept.read_bytes() == whole


@has_compiler
def test_a_cache_that_cannot_be_written_to_is_done_without(monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file, where a folder should be")
    assert build.library() is not None


@has_compiler
@needs_root
@pytest.mark.parametrize("whose", ["library", "folder"])
def test_what_another_user_put_into_the_cache_is_not_loaded(monkeypatch, tmp_path, whose):
    build.library()
    (kept,) = (tmp_path / "cache" / "syncline" / "kernels").iterdir()
    os.chown(kept if whose == "library" else kept.parent, NOBODY, -1)
    as_in_another_process()
    loaded = []
    real = build.ctypes.CDLL
    monkeypatch.setattr(build.ctypes, "CDLL", lambda path: loaded.append(path) or real(path))
    assert build.library() is not None
    assert str(kept) not in loaded
    assert kept.stat().st_uid == 0, "and ours replaces it, if the folder is ours"


@has_compiler
def test_what_others_can_write_in_the_cache_is_not_loaded(monkeypatch, tmp_path):
    build.library()
    (kept,) = (tmp_path / "cache" / "syncline" / "kernels").iterdir()
    kept.chmod(0o777)
    as_in_another_process()
    loaded = []
    real = build.ctypes.CDLL
    monkeypatch.setattr(build.ctypes, "CDLL", lambda path: loaded.append(path) or real(path))
    assert build.library() is not None
    assert str(kept) not in loaded
    assert kept.stat().st_mode & 0o077 == 0


@has_compiler
def test_a_relative_cache_is_ignored_because_anyone_may_have_made_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert build.library() is not None
    assert not (tmp_path / "cache").exists()
    assert list((tmp_path / "home" / ".cache" / "syncline" / "kernels").iterdir())


def test_without_a_compiler_there_are_none_and_it_is_said_why(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert build.library() is None
    assert "there is no C++ compiler" in build.why_unavailable()


def test_a_compiler_that_fails_is_told_about(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", compiler_that(tmp_path, "echo 'convolve.cpp:1: error: cannot' >&2; exit 1"))
    assert build.library() is None
    assert "failed: convolve.cpp:1: error: cannot" in build.why_unavailable()
    assert not (tmp_path / "cache").exists()


def test_a_compiler_that_does_not_end_is_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", compiler_that(tmp_path, "exec sleep 60"))
    monkeypatch.setattr(build, "_LIMIT_S", 0.2)
    assert build.library() is None
    assert "did not finish within 0.2 s" in build.why_unavailable()


def test_what_is_no_library_is_not_loaded(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", compiler_that(tmp_path, 'while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"'))
    assert build.library() is None
    assert os.sep in build.why_unavailable(), "the loader says which file it is about"
    assert not (tmp_path / "cache").exists()


@has_compiler
def test_a_compiler_that_knows_no_threads_is_good_enough(monkeypatch, tmp_path):
    real = next(path for name in build._COMPILERS if (path := shutil.which(name)))
    refuses = 'case "$*" in *-fopenmp*) echo "error: what is -fopenmp?" >&2; exit 1;; esac'
    monkeypatch.setenv("CXX", compiler_that(tmp_path, f'{refuses}\nexec {real} "$@"'))
    assert build.library() is not None
    assert build.why_unavailable() == ""
