"""The `cluster` engine is available to Python users who import `syncline.lab.cluster`."""

from __future__ import annotations

import pytest

from syncline.engines.choose import engine_for
from syncline.errors import ConfigError
from syncline.lab import cluster


@pytest.fixture(autouse=True)
def _no_clusters(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_importing_the_module_registers_the_engine():
    assert cluster.cluster_engine.__module__ == "syncline.lab.cluster"
    with pytest.raises(ConfigError) as caught:
        engine_for("cluster:nowhere")
    assert (caught.value.code, caught.value.facts) == ("no-cluster", {"cluster": "nowhere"})


def test_an_invalid_cluster_name_is_rejected():
    with pytest.raises(ConfigError, match="40 letters") as caught:
        engine_for("cluster:../etc")
    assert caught.value.facts["cluster"] == "../etc"


def test_a_command_to_a_cluster_that_does_not_run_is_an_error():
    with pytest.raises(ConfigError) as caught:
        cluster.send_command("nowhere", {"do": "status"})
    assert caught.value.code == "no-cluster"
