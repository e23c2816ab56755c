"""Every engine keeps the protocol. Those of clusters are checked where their clusters are started."""

from __future__ import annotations

import threading

import pytest

from syncline.engines.choose import engine_for
from syncline.engines.local import LocalEngine
from syncline.engines.outposts.engine import OutpostEngine
from syncline.engines.outposts.outpost import keep_outpost
from syncline.errors import ConfigError
from syncline.testing.engine_contract import check_engine
from syncline.testing.namespaces import Namespaces, why_not_possible


@pytest.mark.own_zygote
def test_the_local_engine(tmp_path):
    check_engine(LocalEngine(), tmp_path)


@pytest.mark.own_zygote
def test_the_local_engine_in_network_namespaces(tmp_path):
    if (why := why_not_possible()) is not None:
        pytest.skip(why)
    with Namespaces(2) as namespaces:
        check_engine(LocalEngine(namespaces.network), tmp_path)


@pytest.mark.parametrize("outposts", [1, 2, 3])
def test_outposts_whether_one_keeps_all_places_or_some_stand_by(tmp_path, outposts):
    engine = OutpostEngine("127.0.0.1")
    left: list[str] = []
    threads = [
        threading.Thread(target=lambda: left.append(keep_outpost(engine.invitation)), daemon=True)
        for _ in range(outposts)
    ]
    for thread in threads:
        thread.start()
    check_engine(engine, tmp_path, places=min(2, outposts))
    for thread in threads:
        thread.join(30)
    assert left == ["the run is over"] * outposts


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lokal", "There is no engine 'lokal'. Did you mean 'local'?"),
        ("local://here", "write 'local' instead of 'local://here'"),
        ("attach", "write attach://HOST:PORT"),
        ("attach://here", "write attach://HOST:PORT"),
        ("attach://192.0.2.1:7077", "Nobody can be waited for at 192.0.2.1:7077"),
        ("cluster:no such", "A cluster cannot be called 'no such'"),
    ],
)
def test_an_engine_that_cannot_be_is_refused_with_what_to_write(name, says):
    with pytest.raises(ConfigError) as error:
        engine_for(name)
    assert says in str(error.value)
