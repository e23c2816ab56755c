from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.config.run import RunConfig
from syncline.errors import ConfigError
from syncline.plan.machine import Machine
from syncline.plan.plan import Plan
from syncline.plan.planner import TaskFacts, make_plan


def machine(**changes: object) -> Machine:
    facts = {
        "host": "here", "cores": 8, "memory_available_bytes": 10**9, "no_shared_memory_because": None,
        "processor": "x86_64", "python": "3.11",
    }  # fmt: skip
    return Machine(**{**facts, **changes})  # type: ignore[arg-type]


def facts(**changes: object) -> TaskFacts:
    known = {"kind": "train", "model": "m", "data": "d", "fingerprint": "f", "train_samples": 1000, "test_samples": 10}
    return TaskFacts(**{**known, **changes})  # type: ignore[arg-type]


@given(st.integers(1, 64), st.integers(1, 500), st.integers(1, 5), st.integers(64, 5000))
def test_a_plan_survives_json_and_covers_every_sample(workers, batch, epochs, samples):
    config = RunConfig(workers=workers, batch=max(batch, workers), epochs=epochs)
    plan = make_plan(facts(train_samples=samples), config, machine(), "cpu")
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert (plan.steps_per_epoch - 1) * plan.batch < samples <= plan.steps_per_epoch * plan.batch
    assert [w.rank for w in plan.workers] == list(range(workers))
    assert plan.in_words()


def test_threads_are_shared_out_among_the_workers():
    assert make_plan(facts(), RunConfig(workers=3), machine(cores=8), "cpu").workers[0].threads == 2
    assert make_plan(facts(), RunConfig(workers=16), machine(cores=8), "cpu").workers[0].threads == 1
    assert make_plan(facts(), RunConfig(workers=2, threads=5), machine(), "cpu").workers[1].threads == 5


def test_one_worker_exchanges_with_nobody_and_many_share_memory():
    assert make_plan(facts(), RunConfig(workers=1), machine(), "cpu").collective == "solo"
    assert make_plan(facts(), RunConfig(workers=2), machine(), "cpu").collective == "shared-memory"


def test_without_shared_memory_the_plan_falls_back_and_says_why():
    plan = make_plan(facts(), RunConfig(), machine(no_shared_memory_because="it is Tuesday"), "cpu")
    assert plan.collective == "process-group"
    assert "because it is Tuesday" in plan.in_words()


def test_shared_memory_that_was_demanded_but_cannot_be_is_refused():
    config = RunConfig(collective="shared-memory")
    with pytest.raises(ConfigError, match=r"it is Tuesday\. Use --collective process-group"):
        make_plan(facts(), config, machine(no_shared_memory_because="it is Tuesday"), "cpu")


def test_workers_on_several_hosts_are_dealt_out_in_turn_and_share_no_memory():
    plan = make_plan(facts(), RunConfig(workers=3), machine(), "cpu", ["north", "south"])
    assert [w.host for w in plan.workers] == ["north", "south", "north"]
    assert plan.collective == "process-group"
    assert "one of the hosts north, south" in plan.in_words()
    assert "because they are on 2 hosts" in plan.in_words()
    with pytest.raises(ConfigError, match="on 2 hosts, and no memory is shared between hosts"):
        make_plan(facts(), RunConfig(workers=3, strategy="hogwild"), machine(), "cpu", ["north", "south"])
    with pytest.raises(ConfigError, match="shared-memory is not possible: they are on 2 hosts"):
        make_plan(facts(), RunConfig(workers=3, collective="shared-memory"), machine(), "cpu", ["north", "south"])


def test_several_workers_on_one_host_of_several_still_share_its_memory():
    plan = make_plan(facts(), RunConfig(workers=3), machine(), "cpu", ["north"])
    assert (plan.collective, plan.workers[2].host) == ("shared-memory", "north")


def test_gpus_are_dealt_one_to_each_worker():
    plan = make_plan(facts(), RunConfig(workers=2), machine(), "cuda")
    assert [w.device for w in plan.workers] == ["cuda:0", "cuda:1"]
    assert plan.collective == "process-group"


def test_several_workers_on_an_apple_gpu_are_refused_and_one_is_not():
    with pytest.raises(ConfigError, match="Use --workers 1, or --device cpu"):
        make_plan(facts(), RunConfig(workers=2), machine(), "mps")
    assert make_plan(facts(), RunConfig(workers=1), machine(), "mps").workers[0].device == "mps"


def test_more_workers_than_samples_in_a_batch_are_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"9 workers cannot share a batch of 8.*--workers to 8 or less"):
        make_plan(facts(), RunConfig(workers=9, batch=8), machine(), "cpu")


def test_a_batch_larger_than_the_data_becomes_one_step_and_says_so():
    plan = make_plan(facts(train_samples=100), RunConfig(batch=512), machine(), "cpu")
    assert (plan.batch, plan.steps_per_epoch) == (100, 1)
    assert "each epoch is one step" in plan.in_words()


def test_empty_data_is_refused():
    with pytest.raises(ConfigError, match="training data is empty"):
        make_plan(facts(train_samples=0), RunConfig(), machine(), "cpu")


def test_servers_come_after_the_workers_and_are_named_so():
    plan = make_plan(facts(), RunConfig(workers=3, strategy="ssp(shards=2)"), machine(), "cpu")
    assert (plan.size, plan.servers, plan.processes) == (3, 2, 5)
    assert [plan.name_of(rank) for rank in range(5)] == ["worker 0", "worker 1", "worker 2", "server 0", "server 1"]
    assert "2 more processes keep the parameters" in plan.in_words()


def test_a_tournament_keeps_samples_for_itself():
    plan = make_plan(facts(), RunConfig(workers=4, strategy="ltfb"), machine(), "cpu")
    assert (plan.train_samples, plan.held_out) == (980, 20)
    assert plan.steps_per_epoch == -(-980 // plan.batch)
    small = make_plan(facts(train_samples=40), RunConfig(workers=8, batch=8, strategy="ltfb"), machine(), "cpu")
    assert (small.train_samples, small.held_out) == (32, 8), "one to judge by for each worker, at least"
    with pytest.raises(ConfigError, match="8 models that compete need 8 samples"):
        make_plan(facts(train_samples=8), RunConfig(workers=8, batch=8, strategy="ltfb"), machine(), "cpu")


def test_what_cannot_be_carried_out_is_refused_in_the_plan():
    with pytest.raises(ConfigError, match="memory"):
        make_plan(facts(), RunConfig(strategy="hogwild", collective="process-group"), machine(), "cpu")
    with pytest.raises(ConfigError, match="Use syncline train"):
        make_plan(facts(kind="own-loop"), RunConfig(strategy="ltfb"), machine(), "cpu")


def test_what_saves_memory_is_part_of_the_plan_and_told():
    config = RunConfig(accumulate=2, checkpoint_activations=True, memory_limit="1.5GB")
    plan = make_plan(facts(), config, machine(), "cpu")
    assert (plan.checkpoint_activations, plan.memory_limit_bytes) == (True, 1_500_000_000)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    for words in ("computed in 2 pieces", "A worker may use 1,500 MB", "computed twice instead of being kept"):
        assert words in plan.in_words()


@pytest.mark.parametrize("settings", [{"memory_limit": 900}, {"checkpoint_activations": True}])
def test_a_script_saves_memory_by_itself(settings):
    with pytest.raises(ConfigError, match="up to the script"):
        make_plan(facts(kind="own-loop"), RunConfig(**settings), machine(), "cpu")
