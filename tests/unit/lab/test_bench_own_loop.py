"""The own-loop suite: what is compared, and the script in small real runs of each kind.

No test asserts a duration: measuring is the bench's job.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.lab.bench import own_loop, torchrun
from syncline.lab.bench.harness import BenchSettings


def test_a_script_is_compared_with_one_process_and_with_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def measure(command: torchrun.Command, folder: Path, script: Path, arguments: list[str]) -> float:
        ran.append(arguments)
        return 1.0

    monkeypatch.setattr(own_loop, "measure", measure)
    suites = list(own_loop.suites(BenchSettings(quick=True, say=lambda _: None)))
    assert [(suite.baseline, suite.goals[0].limit, suite.goals[0].bound) for suite in suites] == [
        ("one process", 1.5, "at least"),
        ("DDP", 1.8, "at least"),
    ]
    for suite in suites:
        assert [contender.measure() for contender in suite.contenders] == [1.0, 1.0, 1.0]
    assert ran == [["60", mode] for mode in ("alone", "syncline", "syncline", "ddp", "syncline", "syncline")]


@pytest.mark.parametrize(
    ("command", "mode"),
    [
        (own_loop._alone, "alone"),
        (torchrun.torchrun, "ddp"),
        (torchrun.syncline_run, "syncline"),
        (own_loop._sharded, "syncline"),
    ],
)
def test_the_script_measures_itself(tmp_path: Path, command: torchrun.Command, mode: str) -> None:
    assert torchrun.measure(command, tmp_path, own_loop._SCRIPT, ["2", mode]) > 0
