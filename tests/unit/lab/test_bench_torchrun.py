"""The torchrun suite: what is compared, and the script under Syncline in small real runs.

No test asserts a duration: measuring is the bench's job.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.errors import SynclineError
from syncline.lab.bench import torchrun
from syncline.lab.bench.harness import BenchSettings


def test_throughput_and_restart_are_compared_with_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, list[str]]] = []

    def measure(command: torchrun.Command, folder: Path, script: Path, arguments: list[str]) -> float:
        ran.append((command.__name__, arguments))
        return 1.0

    monkeypatch.setattr(torchrun, "measure", measure)
    suites = list(torchrun.suites(BenchSettings(quick=True, say=lambda _: None)))
    for suite in suites:
        assert [contender.measure() for contender in suite.contenders] == [1.0, 1.0]
    assert [(suite.name, suite.unit, suite.baseline) for suite in suites] == [
        ("torchrun", "images/s", "torchrun"),
        ("torchrun-restart", "s", "torchrun"),
    ]
    assert [(g.contender, g.limit, g.bound) for suite in suites for g in suite.goals] == [
        ("syncline run", 1.15, "at least"),
        ("syncline run", 0.3, "at most"),
    ]
    assert ran == [
        ("torchrun", ["20"]), ("syncline_run", ["20"]),
        ("torchrun", ["1", "--kill"]), ("syncline_run", ["1", "--kill"]),
    ]  # fmt: skip


@pytest.mark.parametrize("arguments", [["2"], ["1", "--kill"]], ids=["throughput", "restart"])
def test_the_script_measures_itself_under_syncline(tmp_path: Path, arguments: list[str]) -> None:
    assert torchrun.measure(torchrun.syncline_run, tmp_path, torchrun._SCRIPT, arguments) > 0
    (log,) = tmp_path.glob("runs/*/events.jsonl")
    assert log.read_text().count('"event":"group_trains"') == len(arguments)


def test_a_command_that_measures_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SynclineError, match="has measured nothing"):
        torchrun.measure(lambda folder, script: ["true"], tmp_path, torchrun._SCRIPT, ["1"])
