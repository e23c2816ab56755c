"""Ctrl-C before all workers have connected."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from syncline.comms.control import Hello, Stop
from syncline.coordinator.coordinator import Coordinator


def answers_to_hello(phase: str, *, life: int = 0) -> list[Any]:
    """What the coordinator sends to worker 1, which connects while the run is in `phase`."""
    sent: list[Any] = []
    coordinator: Any = SimpleNamespace(
        diagnosis=SimpleNamespace(on_hello=lambda *_: None),
        membership=SimpleNamespace(life_of=lambda _: life),
        supervision=SimpleNamespace(phase=phase),
        stopped_by="SIGINT",
        _plan=SimpleNamespace(processes=2),
        _view=None,
        _welcome=lambda _: "welcome",
        _server=SimpleNamespace(send=lambda worker_id, message: sent.append((worker_id, message))),
    )
    assert Coordinator._on_message(coordinator, Hello(worker_id=1, pid=100)) == []
    return sent


def test_a_worker_that_connects_after_ctrl_c_is_told_to_stop():
    """It was lost: a script for torchrun, whose workers do not meet after each step, ran to its end."""
    assert answers_to_hello("stopping") == [(1, "welcome"), (1, Stop("SIGINT"))]


@pytest.mark.parametrize(("phase", "life"), [("running", 0), ("stopping", 1)])
def test_others_are_not_and_replacements_are_told_when_they_join(phase, life):
    assert answers_to_hello(phase, life=life) == [(1, "welcome")]
