"""Runs what a page shows, in a folder that has the examples, as a reader's has.

A shell runs the commands in the order of the page; run files are trained; the Python blocks of a page run last, in one
process with one namespace. A block with a title is saved as that file, and runs by itself only if no command of the
page uses it. Commands run in forks of a process that has imported torch (`warm_process.py`).
Here: running blocks. Not here: finding them (`page_blocks.py`), and shortening their runs (`small_syncline.py`).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import small_syncline
import typer
from page_blocks import COMMANDS, PYTHON, RUN_FILE, Block, commands_of
from warm_process import warm_process

from syncline.cli.main import app
from syncline.engines import choose

ROOT = Path(__file__).parents[2]
_TRAINED = ("digits", "iris")  # what is there without a download


_PYTHON = """#!/bin/sh
case "$1" in
    *.py) exec {warm} "$@" ;;
    *) exec {python} "$@" ;;
esac
"""


class Reader:
    """A reader who runs everything that a page shows, in `folder`."""

    def __init__(self, page: str, folder: Path) -> None:
        warm = warm_process()
        self._page = page
        self._folder = folder
        for place in (folder, folder / "examples"):
            shutil.copytree(
                ROOT / "examples", place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "runs")
            )
        tools = folder / ".tools"
        tools.mkdir()
        self._python = tools / "python"
        scripts = {
            "syncline": f'#!/bin/sh\nexec {shlex.join(warm.words(small_syncline.__file__))} "$@"\n',
            "python": _PYTHON.format(warm=shlex.join(warm.words()), python=shlex.quote(sys.executable)),
        }
        for name, script in scripts.items():
            (tools / name).write_text(script)
            (tools / name).chmod(0o755)
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        self._environment = {
            **os.environ,
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "BROWSER": "true",  # commands that open a browser open nothing
        }

    def try_out(self, blocks: list[Block]) -> list[Block]:
        """Run every block of code that is not marked; returns those that were run."""
        runnable = [block for block in blocks if block.is_code and block.not_run is None]
        together = [block for block in runnable if block.language in PYTHON and not block.file_name]
        typed = "".join(commands_of(block) for block in runnable if block.language in COMMANDS)
        for block in runnable:
            if block.file_name:
                (self._folder / block.file_name).write_text(block.code)
            if block not in together and not (block.file_name and block.file_name in typed):
                self._run(block)
        if together:
            self._run_python("page.py", _joined(together), together[0])
        return runnable

    def _run(self, block: Block) -> None:
        if block.language in COMMANDS:
            self._call(["bash", "-euo", "pipefail", "-c", commands_of(block)], block)
        elif block.language in RUN_FILE:
            self._train(block)
        elif block.language in PYTHON:
            assert block.file_name is not None
            self._run_python(block.file_name, block.code, block)
        else:  # a language that is shown only must be declared so in `page_blocks.py`
            raise AssertionError(f"{self._page}:{block.line}: there is no way to run {block.language!r}")

    def _run_python(self, name: str, code: str, block: Block) -> None:
        (self._folder / name).write_text(code)
        self._call([str(self._python), name], block)

    def _train(self, block: Block) -> None:
        file = self._folder / (block.file_name or f"line-{block.line}.toml")
        file.write_text(block.code)
        says = tomllib.loads(block.code)
        data = says.get("data")
        name = data.get("name", "") if isinstance(data, dict) else str(data)
        command = "train" if name.startswith(_TRAINED) else "explain"
        self._call([str(self._folder / ".tools" / "syncline"), command, file.name], block)

    def _call(self, command: list[str], block: Block) -> None:
        done = subprocess.run(
            command, cwd=self._folder, env=self._environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode:
            raise AssertionError(f"{self._page}:{block.line}: exit code {done.returncode}\n{done.stdout}{done.stderr}")


def check_unrun(block: Block) -> None:
    """What is not run is at least read: Python is compiled, TOML parsed, and commands must have the flags they show."""
    if block.language in PYTHON:
        compile(block.code, "block", "exec")
    elif block.language in RUN_FILE:
        tomllib.loads(block.code)
    elif block.language in COMMANDS:
        for line in commands_of(block).replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "syncline" in words and "..." not in words:
                _parse(words[words.index("syncline") + 1 :])


def _parse(words: list[str]) -> None:
    command, name = typer.main.get_command(app), "syncline"
    words = [word for word in words if not re.fullmatch(r"&|&&|;", word)]
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name = words[0]
        assert name in command.commands, f"syncline has no command {name!r}"
        command, words = command.commands[name], words[1:]
    engine = command.make_context(name, words).params.get("engine")
    if engine is not None:
        known = {*choose._ENGINES, "cluster"}  # the command line registers the last one
        assert re.split(r"[:\[?]", engine)[0] in known, f"there is no engine {engine!r}"


def _joined(blocks: list[Block]) -> str:
    """One program, in which each line has the number that it has on the page: tracebacks then point there."""
    program = ""
    for block in blocks:
        program += "\n" * (block.line - 1 - program.count("\n")) + block.code
    return program
