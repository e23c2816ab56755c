"""What a script for torchrun finds in its environment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from syncline.comms.control import StoreAddress
from syncline.config.run import RunConfig
from syncline.planning.machine import Machine
from syncline.planning.plan import Plan
from syncline.planning.planner import TaskFacts, make_plan
from syncline.workers.torchrun import variables

ADDRESS = StoreAddress("10.0.0.1", 4242)


def plan(workers: int, hosts: tuple[str, ...] = (), **settings: object) -> Plan:
    facts = TaskFacts(kind="own-loop", model="script", data="own", fingerprint="")
    made = make_plan(facts, RunConfig(workers=workers, device="cpu", **settings), Machine.here(), hosts)
    return replace(made, run_id="abc")


def test_ranks_are_counted_over_all_hosts_and_within_each():
    of_hosts = plan(5, ("a", "b"))  # a b a b a
    found = [variables(of_hosts, rank, ADDRESS, restarts=0) for rank in range(5)]
    assert [v["RANK"] for v in found] == ["0", "1", "2", "3", "4"]
    assert [v["LOCAL_RANK"] for v in found] == ["0", "0", "1", "1", "2"]
    assert [v["LOCAL_WORLD_SIZE"] for v in found] == ["3", "2", "3", "2", "3"]
    assert [v["GROUP_RANK"] for v in found] == ["0", "1", "0", "1", "0"]
    assert {(v["WORLD_SIZE"], v["GROUP_WORLD_SIZE"]) for v in found} == {("5", "2")}


def test_the_store_the_run_and_the_restarts_are_named():
    found = variables(plan(2, max_failures=7), 1, ADDRESS, restarts=3)
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "4242")
    assert found["TORCHELASTIC_RUN_ID"] == "abc"
    assert (found["TORCHELASTIC_RESTART_COUNT"], found["TORCHELASTIC_MAX_RESTARTS"]) == ("3", "7")


@pytest.mark.parametrize("policy", ["stop", "shrink"])
def test_a_run_that_stops_at_a_failure_has_no_restarts(policy):
    found = variables(plan(2, on_worker_failure=policy, max_failures=7), 0, ADDRESS, restarts=0)
    assert found["TORCHELASTIC_MAX_RESTARTS"] == ("0" if policy == "stop" else "7")
