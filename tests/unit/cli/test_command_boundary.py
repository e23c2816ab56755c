"""No exception leaves the command as a traceback: messages, reports and exit codes."""

from __future__ import annotations

import functools
import io
import json
import os
import sys

import pytest

from syncline.cli import main as command
from syncline.cli.main import EXIT_BUG, main
from syncline.cli.output import exit_code_of
from syncline.errors import Interrupted


def ran(monkeypatch, *arguments: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["syncline", *arguments])
    with pytest.raises(SystemExit) as leaving:
        main()
    return leaving.value.code


def failing_with(monkeypatch, call: object) -> None:
    monkeypatch.setattr(command, "_connect_lab", call)


def test_an_unexpected_exception_exits_with_70_and_names_its_report(monkeypatch, capsys):
    failing_with(monkeypatch, functools.partial(json.loads, "{"))
    assert ran(monkeypatch, "models") == EXIT_BUG == os.EX_SOFTWARE
    shown = capsys.readouterr().err
    assert "bug in Syncline" in shown
    assert "Traceback" not in shown
    (path,) = (word.rstrip(",.") for word in shown.split() if "syncline-bug-" in word)
    with open(path) as report:
        assert "JSONDecodeError" in report.read()
    os.unlink(path)


def test_a_failure_of_the_system_exits_with_1_and_no_report(monkeypatch, capsys, tmp_path):
    failing_with(monkeypatch, functools.partial(os.listdir, tmp_path / "none"))
    assert ran(monkeypatch, "models") == 1
    shown = capsys.readouterr().err
    assert shown.startswith("Error: ")
    assert str(tmp_path / "none") in shown
    assert "bug" not in shown


def test_an_exception_of_the_users_code_shows_their_frames(monkeypatch, capsys):
    def users() -> None:
        raise ZeroDivisionError("the user's own mistake")

    failing_with(monkeypatch, users)
    assert ran(monkeypatch, "models") == 1
    shown = capsys.readouterr().err
    assert "ZeroDivisionError: the user's own mistake" in shown
    assert "test_command_boundary.py" in shown
    assert "bug in Syncline" not in shown


def test_a_command_whose_reader_has_gone_exits_quietly(monkeypatch, capsys):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

        def flush(self) -> None:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stdout", Gone())
    assert ran(monkeypatch, "models") in (0, 1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("name", "code"), [(None, 130), ("SIGINT", 130), ("SIGTERM", 143)])
def test_the_exit_code_of_a_stopped_run_is_that_of_its_signal(name, code):
    assert exit_code_of(Interrupted("stopped", signal=name)) == code
