"""What the Ray engine does when actors end, with a fake Ray. The real one is in integration/."""

from __future__ import annotations

import re
import threading
import time
import types
from typing import Any

import pytest

from syncline.engines import ray as engine_module
from syncline.engines.ray import RayEngine

LIMIT_S = 30.0


class Actors:
    """A stand-in for Ray whose actors end when the test says so."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.killed: list[object] = []
        self.endings: dict[object, str | Exception] = {}
        self.changed = threading.Condition()
        self.exceptions = types.SimpleNamespace(RayError=RuntimeError, RayTaskError=ZeroDivisionError)
        self.util = types.SimpleNamespace(
            placement_group=lambda bundles, strategy: types.SimpleNamespace(bundle_count=len(bundles)),
            placement_group_table=lambda group: {"state": "CREATED"},
            remove_placement_group=lambda group: None,
        )

    def remote(self, **options: Any) -> Any:
        assert (options["max_restarts"], options["max_task_retries"]) == (0, 0)
        actor = types.SimpleNamespace(run=types.SimpleNamespace(remote=self._run))
        made = types.SimpleNamespace(options=lambda **_: types.SimpleNamespace(remote=lambda: actor))
        return lambda kind: made

    def _run(self, address: str, secret: str, slot: int, folder: str) -> int:
        with self.changed:
            self.asked.append(slot)
            self.changed.notify_all()
            return len(self.asked) - 1  # the future

    def end(self, future: int, how: str | Exception) -> None:
        with self.changed:
            self.endings[future] = how
            self.changed.notify_all()

    def wait(self, futures: list[object], num_returns: int, timeout: float) -> tuple[list[object], list[object]]:
        with self.changed:
            self.changed.wait_for(lambda: any(f in self.endings for f in futures), timeout)
            return [f for f in futures if f in self.endings][:num_returns], []

    def get(self, future: object) -> str:
        how = self.endings[future]
        if isinstance(how, Exception):
            raise how
        return how

    def kill(self, actor: object, no_restart: bool) -> None:
        self.killed.append(actor)

    def until(self, condition: Any) -> None:
        with self.changed:
            deadline = time.monotonic() + LIMIT_S
            while not condition():
                assert time.monotonic() < deadline
                self.changed.wait(0.02)

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 8.0}

    available_resources = cluster_resources


class Joined:
    """A connection to that Ray."""

    host, is_own_cluster = "127.0.0.1", False

    def __init__(self, *_: object) -> None:
        pass

    def open(self, *, cpus: int) -> None:
        pass

    def leave(self) -> None:
        pass


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> Actors:
    actors = Actors()
    monkeypatch.setattr(engine_module, "import_ray", lambda: actors)
    monkeypatch.setattr(engine_module, "RayConnection", Joined)
    return actors


@pytest.fixture
def engine(actors: Actors) -> Any:
    engine = RayEngine("ray")
    engine._start_agents(2)
    yield engine
    engine.close()


def test_an_actor_that_dies_is_replaced_in_the_same_slot(actors, engine):
    actors.end(1, RuntimeError("The actor died because its node has died."))
    actors.until(lambda: len(actors.asked) == 3)
    assert actors.asked == [0, 1, 1]
    assert engine._startup_problem() is None


def test_an_actor_that_gave_up_is_killed_before_another_is_requested(actors, engine):
    actors.end(0, "the driver sent no heartbeat for 30 s")
    actors.until(lambda: len(actors.asked) == 3)
    assert len(actors.killed) == 1, "it would keep its resources"


def test_after_three_quick_deaths_in_one_slot_no_more_actors_are_started_and_the_reason_is_reported(actors, engine):
    for future, asked in [(1, 3), (2, 4)]:
        actors.end(future, ZeroDivisionError("the first line\nand more"))
        actors.until(lambda asked=asked: len(actors.asked) == asked)
    actors.end(3, ZeroDivisionError("the last\nand more"))
    actors.until(lambda: engine._startup_problem() is not None)
    assert re.fullmatch("3 Ray actors .*: the last", engine._startup_problem())
    assert actors.asked == [0, 1, 1, 1]


def test_at_the_end_of_a_run_no_actor_is_replaced(actors, engine, monkeypatch):
    stop = engine._stop_agents

    def after_all_have_left() -> None:
        for future in (0, 1):
            actors.end(future, "the run is over")
        actors.until(lambda: not engine._actors)
        stop()

    monkeypatch.setattr(engine, "_stop_agents", after_all_have_left)
    engine.close()
    assert actors.asked == [0, 1]
