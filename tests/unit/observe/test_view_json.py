"""JSON lines, the quiet view, the choice among the views, and streams that break."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pytest
from scripted_run import RUN_DIR, plan, progress, started, summary, training

from syncline.observe.observer import JsonLines, Observer, choose_view
from syncline.observe.stream import unbreakable
from syncline.observe.terminal.live_view import LiveView
from syncline.observe.terminal.plain import PlainLines
from syncline.observe.terminal.quiet import Quiet
from syncline.telemetry.events import Event, FatalFailure, RunEnded, WarningMessage, WorkerOutput, from_dict, to_line


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Flushes(io.StringIO):
    """Remembers what could be read at each flush."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def flush(self) -> None:
        self.seen.append(self.getvalue())


def feed(view: Observer, *events: Event) -> None:
    for event in events:
        view.on_event(event)
    view.close()


class TestJsonLines:
    def test_each_event_is_one_line_and_can_be_read_back(self) -> None:
        stream = io.StringIO()
        events = [started(plan()), *training(), WorkerOutput(worker_id=0, text="a\nb é"), summary()]
        feed(JsonLines(stream), *events)
        lines = stream.getvalue().splitlines()
        assert [to_line(from_dict(json.loads(line))) for line in lines] == [to_line(event) for event in events]
        assert json.loads(lines[-1])["event"] == "summary"

    def test_each_line_is_flushed(self) -> None:
        stream = Flushes()
        feed(JsonLines(stream), started(plan()), summary())
        assert [text.count("\n") for text in stream.seen] == [1, 2]

    def test_a_loss_that_is_not_a_number_is_still_json(self) -> None:
        stream = io.StringIO()
        feed(JsonLines(stream), progress(step=1, after_s=1, loss=float("nan")))
        assert json.loads(stream.getvalue())["loss"] is None


class TestQuiet:
    def test_a_good_run_is_one_line_with_the_result(self) -> None:
        out, err = io.StringIO(), io.StringIO()
        feed(Quiet(out, err), started(plan()), *training(), WorkerOutput(worker_id=0, text="hello"), summary())
        assert err.getvalue() == ""
        assert out.getvalue() == (
            "test/accuracy 98.71%  test/loss 0.0412  train/loss 0.0123  1407 steps  23 s  61,234 samples/s  "
            f"{RUN_DIR}\n"
        )

    def test_warnings_and_failures_go_to_the_other_stream(self) -> None:
        out, err = io.StringIO(), io.StringIO()
        first = FatalFailure(worker_id=1, message="Worker 1 was killed by signal 9.")
        feed(
            Quiet(out, err),
            WarningMessage(message="The disk is full."),
            first,
            RunEnded(reason="failed", message="It is over."),
        )
        assert out.getvalue() == ""
        assert err.getvalue().splitlines() == [
            "warning: The disk is full.", "Worker 1 was killed by signal 9.", "", "It is over.",
        ]  # fmt: skip

    def test_a_run_that_stopped_early_says_so(self) -> None:
        out = io.StringIO()
        feed(Quiet(out, io.StringIO()), summary(stopped_early=True))
        assert out.getvalue().endswith("stopped early\n")


class TestChoice:
    @pytest.fixture(autouse=True)
    def _colorful_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "xterm-256color")

    @pytest.mark.parametrize(
        ("quiet", "json_", "stream", "kind"),
        [
            (False, False, Terminal(), LiveView),
            (False, False, io.StringIO(), PlainLines),
            (True, False, Terminal(), Quiet),
            (False, True, Terminal(), JsonLines),
            (True, True, io.StringIO(), JsonLines),
        ],
    )
    def test_explicit_wishes_come_first_and_then_the_stream_decides(
        self, quiet: bool, json_: bool, stream: TextIO, kind: type
    ) -> None:
        assert isinstance(choose_view(quiet=quiet, json=json_, stream=stream), kind)

    def test_a_dumb_terminal_gets_plain_lines(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "dumb")
        assert isinstance(choose_view(quiet=False, json=False, stream=Terminal()), PlainLines)

    @pytest.mark.parametrize("encoding", ["latin-1", "no such encoding"])
    def test_a_terminal_without_unicode_gets_plain_lines(self, encoding: str) -> None:
        stream = Terminal()
        stream.encoding = encoding
        assert isinstance(choose_view(quiet=False, json=False, stream=stream), PlainLines)

    def test_standard_output_is_the_default(self, capsys: pytest.CaptureFixture[str]) -> None:
        feed(choose_view(quiet=False, json=True), summary())
        assert json.loads(capsys.readouterr().out)["event"] == "summary"


class TestBrokenStreams:
    @pytest.mark.parametrize("kind", ["plain", "json", "quiet", "live"])
    def test_a_reader_that_has_gone_does_not_end_the_run(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "xterm-256color")
        read_end, write_end = os.pipe()
        os.close(read_end)
        with open(write_end, "w", encoding="utf-8") as stream:
            if kind == "live":
                stream.isatty = lambda: True  # type: ignore[method-assign]  # a terminal that was closed
            view = choose_view(quiet=kind == "quiet", json=kind == "json", stream=stream)
            feed(view, started(plan()), *training(), WarningMessage(message="Careful."), summary())
            # Leaving the block flushes and closes, as the interpreter does with stdout when it ends.

    def test_a_process_whose_reader_has_gone_ends_with_code_0(self) -> None:
        here = Path(__file__).parent
        code = (
            f"import sys; sys.path.insert(0, {str(here)!r})\n"
            "from scripted_run import *\n"
            "from syncline.observe.observer import JsonLines, choose_view\n"
            "view = choose_view(quiet=False, json=True)\n"
            "for _ in range(50):\n"
            "    for event in (started(plan()), *training(), summary()): view.on_event(event)\n"
            "view.close()\n"
        )
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == b""
        process.stderr.close()

    def test_a_full_disk_or_a_closed_file_is_met_with_silence(self) -> None:
        class Full(io.StringIO):
            tries = 0

            def write(self, text: str) -> int:
                self.tries += 1
                raise OSError(28, "No space left on device")

        full = Full()
        feed(PlainLines(full), started(plan()), *training(), summary())
        assert full.tries == 1
        closed = io.StringIO()
        closed.close()
        feed(PlainLines(closed), started(plan()), summary())

    def test_characters_that_the_stream_cannot_encode_become_question_marks(self) -> None:
        raw = io.BytesIO()
        stream = unbreakable(io.TextIOWrapper(raw, encoding="ascii"))
        stream.write("naïve\n")
        stream.write("still here\n")
        stream.flush()
        assert raw.getvalue() == b"na?ve\nstill here\n"
