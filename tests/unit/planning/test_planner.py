from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.config.run import RunConfig
from syncline.errors import ConfigError
from syncline.planning.machine import Machine
from syncline.planning.plan import Plan
from syncline.planning.planner import TaskFacts, make_plan


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
    plan = make_plan(facts(train_samples=samples), config, machine())
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert (plan.steps_per_epoch - 1) * plan.batch < samples <= plan.steps_per_epoch * plan.batch
    assert [w.rank for w in plan.workers] == list(range(workers))
    assert plan.describe()


def test_threads_are_shared_out_among_the_workers():
    assert make_plan(facts(), RunConfig(workers=3), machine(cores=8)).workers[0].threads == 2
    assert make_plan(facts(), RunConfig(workers=16), machine(cores=8)).workers[0].threads == 1
    assert make_plan(facts(), RunConfig(workers=2, threads=5), machine()).workers[1].threads == 5


def test_one_worker_needs_no_collective_and_several_share_memory():
    assert make_plan(facts(), RunConfig(workers=1), machine()).collective == "solo"
    assert make_plan(facts(), RunConfig(workers=2), machine()).collective == "shared-memory"


def test_without_shared_memory_the_plan_falls_back_and_says_why():
    plan = make_plan(facts(), RunConfig(), machine(no_shared_memory_because="it is Tuesday"))
    assert plan.collective == "process-group"
    assert "it is Tuesday" in plan.describe()


def test_explicit_shared_memory_that_is_not_possible_is_refused():
    config = RunConfig(collective="shared-memory")
    with pytest.raises(ConfigError, match="--collective process-group") as caught:
        make_plan(facts(), config, machine(no_shared_memory_because="it is Tuesday"))
    assert caught.value.facts == {"setting": "collective", "value": "shared-memory", "reason": "it is Tuesday"}


def test_workers_are_assigned_to_hosts_in_turn_and_share_no_memory_across_them():
    plan = make_plan(facts(), RunConfig(workers=3), machine(), ["north", "south"])
    assert [w.host for w in plan.workers] == ["north", "south", "north"]
    assert plan.collective == "process-group"
    assert "north, south" in plan.describe()
    assert "2 hosts" in plan.describe()
    with pytest.raises(ConfigError, match=r"2 hosts.*h2o"):
        make_plan(facts(), RunConfig(workers=3, strategy="hogwild"), machine(), ["north", "south"])
    with pytest.raises(ConfigError, match=r"shared-memory.* 2 hosts"):
        make_plan(facts(), RunConfig(workers=3, collective="shared-memory"), machine(), ["north", "south"])


def test_several_workers_on_one_host_of_several_still_share_its_memory():
    plan = make_plan(facts(), RunConfig(workers=3), machine(), ["north"])
    assert (plan.collective, plan.workers[2].host) == ("shared-memory", "north")


def test_every_worker_gets_its_own_gpu():
    for device in ("auto", "cuda"):
        plan = make_plan(facts(), RunConfig(workers=2, device=device), machine(gpus=2))
        assert [w.device for w in plan.workers] == ["cuda:0", "cuda:1"]
        assert plan.collective == "process-group"


def test_gpus_are_counted_from_zero_on_every_host():
    plan = make_plan(facts(), RunConfig(workers=4), machine(gpus=4), ["north", "south"])
    assert [w.device for w in plan.workers] == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]


def test_without_a_gpu_the_plan_is_for_the_cpu():
    assert {w.device for w in make_plan(facts(), RunConfig(workers=2), machine()).workers} == {"cpu"}


def test_too_few_gpus_train_on_the_cpu_and_the_plan_says_so():
    plan = make_plan(facts(), RunConfig(workers=3), machine(gpus=1))
    assert {w.device for w in plan.workers} == {"cpu"}
    (note,) = plan.notes
    assert "CPU" in note
    assert "--workers 1" in note


def test_asking_for_a_gpu_where_there_is_none_is_refused():
    with pytest.raises(ConfigError) as caught:
        make_plan(facts(), RunConfig(device="cuda"), machine())
    assert caught.value.code == "no-gpu"
    assert caught.value.facts == {"setting": "device", "value": "cuda", "allowed": ["auto", "cpu"]}


def test_more_workers_than_samples_in_a_batch_are_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"9 workers.*8.*--workers.*--batch") as caught:
        make_plan(facts(), RunConfig(workers=9, batch=8), machine())
    assert caught.value.facts == {"workers": 9, "batch": 8}


def test_a_batch_larger_than_the_data_becomes_one_step_and_says_so():
    plan = make_plan(facts(train_samples=100), RunConfig(batch=512), machine())
    assert (plan.batch, plan.steps_per_epoch) == (100, 1)
    assert "512" in plan.notes[0]
    assert plan.notes[0] in plan.describe()


def test_empty_data_is_refused():
    with pytest.raises(ConfigError) as caught:
        make_plan(facts(train_samples=0), RunConfig(), machine())
    assert caught.value.code == "no-data"


def test_servers_come_after_the_workers_and_are_named_so():
    plan = make_plan(facts(), RunConfig(workers=3, strategy="ssp(shards=2)"), machine())
    assert (plan.size, plan.servers, plan.processes) == (3, 2, 5)
    assert [plan.name_of(worker_id) for worker_id in range(5)] == [
        "worker 0",
        "worker 1",
        "worker 2",
        "server 0",
        "server 1",
    ]
    assert "2 parameter servers" in plan.describe()


def test_a_tournament_keeps_samples_for_itself():
    plan = make_plan(facts(), RunConfig(workers=4, strategy="ltfb"), machine())
    assert (plan.train_samples, plan.held_out) == (980, 20)
    assert plan.steps_per_epoch == -(-980 // plan.batch)
    small = make_plan(facts(train_samples=40), RunConfig(workers=8, batch=8, strategy="ltfb"), machine())
    assert (small.train_samples, small.held_out) == (32, 8), "one to judge by for each worker, at least"
    with pytest.raises(ConfigError) as caught:
        make_plan(facts(train_samples=8), RunConfig(workers=8, batch=8, strategy="ltfb"), machine())
    assert caught.value.facts == {"workers": 8, "needed": 8, "samples": 8}


def test_what_cannot_be_carried_out_is_refused_in_the_plan():
    with pytest.raises(ConfigError, match="memory"):
        make_plan(facts(), RunConfig(strategy="hogwild", collective="process-group"), machine())
    with pytest.raises(ConfigError, match="Use syncline train"):
        make_plan(facts(kind="own-loop"), RunConfig(strategy="ltfb"), machine())


def test_settings_that_save_memory_are_part_of_the_plan_and_its_description():
    config = RunConfig(accumulate=2, checkpoint_activations=True, memory_limit="1.5GB")
    plan = make_plan(facts(), config, machine())
    assert (plan.checkpoint_activations, plan.memory_limit_bytes) == (True, 1_500_000_000)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    for words in ("2 micro-batches", "1,500 MB", "recomputed"):
        assert words in plan.describe()


@pytest.mark.parametrize("settings", [{"memory_limit": 900}, {"checkpoint_activations": True}])
def test_a_script_takes_no_settings_that_save_memory(settings):
    with pytest.raises(ConfigError) as caught:
        make_plan(facts(kind="own-loop"), RunConfig(**settings), machine())
    assert set(settings) <= set(caught.value.facts["settings"])
