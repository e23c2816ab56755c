"""Whatever stands on the command line: a clear error or the right result, in limited time, and nothing left behind."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from fuzzing import Hung, StandInEngine, Started, examples, limited, seconds_for_all
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from report_runs import whole_run, write_run

from syncline import driver
from syncline.cli import main as command

pytestmark = pytest.mark.xdist_group("fuzzed_command_lines")  # one process, because these tests share a run

WORDS = [
    "", " ", "-", "--", "-1", "0", "1", "2", "3", "1e308", "nan", "inf", str(2**70), "-" + "9" * 50, "9" * 5000, "0.5",
    "true", "none", "null", "auto", "é", "\udcff", "a\udcffb", "a\nb", "x" * 300, "../../x", "/", ".", "/dev/null",
    "/etc/passwd", "nowhere", "runs", "runs/run", "runs/run/plan.json", "task.toml", "bad.toml", "task.py:none", "mlp",
    "linear", "lenet", "digits", "iris", "mnist(", "mlp(hidden=", "sgd(lr=nan)", "adam", "accuracy", "mse_loss",
    "allreduce", "sparknet", "updates | every(20) | int8", "allreduce until epoch 1, then sparknet", "every(-1)",
    "local", "ray", "spark-local[x]", "attach://x", "cuda", "bf16", "900MB", "-2GB", "1 MB ", "stop", "shrink",
    "crop(padding=-1)",
    "image.png", "s3:/", "file:///nowhere", "kill worker 2 at step 412", "5s", "200 steps",
]  # fmt: skip


def commands() -> dict[tuple[str, ...], list[Any]]:
    """Every command, with its parameters."""

    def walk(found: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
        if hasattr(found, "commands"):
            for name, inner in found.commands.items():
                yield from walk(inner, (*path, name))
        else:
            yield path, list(found.params)

    return dict(walk(typer.main.get_command(command.app), ()))


COMMANDS = commands()
STARTS_FOR_GOOD = [("cluster", "up"), ("worker",), ("bench",), ("doctor",), ("simulate",)]
"""They would serve, measure, compute or wait; their options are checked before by the same code as all others."""


WORD = st.sampled_from(WORDS) | st.sampled_from(["0", "1", "3", "-1", "0.5", "1e308", str(2**31), str(2**70)])
USUAL = st.sampled_from(["mlp", "linear", "runs/run", "digits", "task.toml", "image.png"])


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """Some arguments and up to three options of a command, most of the arguments such as it usually gets."""
    path = draw(st.sampled_from([path for path in COMMANDS if path not in STARTS_FOR_GOOD]))
    options = [each for each in COMMANDS[path] if each.param_type_name == "option"]
    line = [*path, *(draw(USUAL | USUAL | WORD) for each in COMMANDS[path] if each not in options)]
    if path[0] in ("train", "explain", "chaos"):
        line += ["--data", draw(st.sampled_from(["digits", "digits", "iris", *WORDS]))]
    for option in draw(st.lists(st.sampled_from(options), max_size=3)) if options else ():
        line.append(draw(st.sampled_from([*option.opts, *option.secondary_opts])))
        if not getattr(option, "is_flag", False):
            line.append(draw(WORD))
    if draw(st.integers(0, 9)) == 0:
        line.insert(draw(st.integers(0, len(line))), draw(WORD))
    return line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lines")
    write_run(folder / "runs" / "run", whole_run())
    (folder / "task.toml").write_text('model = "linear"\ndata = "digits"\nworkers = 2\n')
    (folder / "bad.toml").write_text('model = "linear"\nworkers = [\n')
    (folder / "task.py").write_text("none = None\n")
    (folder / "image.png").write_bytes(b"\x89PNG not really")
    return folder


@pytest.fixture
def harmless(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started, opened, served, measured or downloaded."""

    def started(*_: Any, **__: Any) -> Any:
        raise Started("it would start now")

    def offline(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.chdir(folder)
    monkeypatch.setattr(driver, "engine_for", lambda *_: StandInEngine())
    monkeypatch.setattr("syncline.engines.local.LocalEngine", StandInEngine)
    monkeypatch.setattr("syncline.lab.chaos.soak.soak", started)
    monkeypatch.setattr("syncline.lab.bench.compare_strategies.compare", started)
    monkeypatch.setattr("syncline.observe.live.server.WatchServer.serve", started)
    monkeypatch.setattr(socket, "getaddrinfo", offline)
    monkeypatch.setattr(typer, "launch", lambda _: 0)
    monkeypatch.setenv("SYNCLINE_DATA", os.environ.get("SYNCLINE_DATA", ""))


def run_line(line: list[str]) -> int | str | None:
    sys.argv = ["syncline", *line]
    before = sys.path[:]
    try:
        return command._run()
    finally:
        sys.path[:] = before


def test_a_command_that_hangs_is_interrupted_and_named():
    with pytest.raises(Hung, match="the line"), limited("the line", 0.05):
        threading.Event().wait(30)


@pytest.mark.timeout(seconds_for_all())
@settings(
    max_examples=examples(120),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(line=command_lines())
@example(line=["train", "mlp", "--data", "/"])
@example(line=["data", "convert", "digits", "\udcff"])
@example(line=["train", "mlp", "--data", "digits", "--seed", str(2**70)])
@example(line=["train", "mlp", "--data", "digits", "--name", "a\udcffb"])
@example(line=["train", "mlp", "--data", "digits", "--threads", "9" * 5000])
def test_a_strange_command_line_gives_a_clear_error_or_the_right_result(harmless, folder, capsys, monkeypatch, line):
    monkeypatch.setattr(sys, "argv", sys.argv)
    with limited(repr(line)):
        code = run_line(line)
    shown = capsys.readouterr()
    assert code in (0, 1, 2, None), shown.err
    assert "bug in Syncline" not in shown.err
    assert "Traceback" not in shown.err
    if code in (1, 2):
        assert shown.err.strip() or shown.out.strip(), "it says why"
