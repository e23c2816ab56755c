"""Every engine keeps the protocol. Those of clusters are checked where their clusters are started."""

from __future__ import annotations

import threading

import pytest

import syncline.lab.cluster  # noqa: F401  # registers the engine "cluster"
from syncline.engines.choose import engine_for
from syncline.engines.local import LocalEngine
from syncline.engines.remote.agent import run_node_agent
from syncline.engines.remote.engine import RemoteEngine
from syncline.errors import ConfigError
from syncline.lab.namespaces import Namespaces, why_not_possible
from syncline.testing.engine_contract import check_engine


@pytest.mark.own_zygote
def test_the_local_engine(tmp_path):
    check_engine(LocalEngine(), tmp_path)


@pytest.mark.own_zygote
def test_the_local_engine_in_network_namespaces(tmp_path):
    if (why := why_not_possible()) is not None:
        pytest.skip(why)
    with Namespaces(2) as namespaces:
        check_engine(LocalEngine(namespaces.network), tmp_path)


@pytest.mark.parametrize("agents", [1, 2, 3])
def test_the_remote_engine_with_as_many_agents_as_workers_or_more(tmp_path, agents):
    engine = RemoteEngine("127.0.0.1")
    left: list[str] = []
    threads = [
        threading.Thread(target=lambda: left.append(run_node_agent(engine.invitation)), daemon=True)
        for _ in range(agents)
    ]
    for thread in threads:
        thread.start()
    check_engine(engine, tmp_path, workers=min(2, agents))
    for thread in threads:
        thread.join(30)
    assert left == ["the run is over"] * agents


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("lokal", ("lokal", "Did you mean 'local'?")),
        ("local://here", ("'local'", "local://here")),
        ("attach", ("attach://HOST:PORT",)),
        ("attach://here", ("attach://HOST:PORT", "attach://here")),
        ("attach://192.0.2.1:7077", ("192.0.2.1:7077",)),
        ("cluster:no such", ("no such",)),
    ],
)
def test_an_invalid_engine_is_refused_with_what_to_write(name, facts):
    with pytest.raises(ConfigError) as error:
        engine_for(name)
    assert not [fact for fact in facts if fact not in str(error.value)], error.value
