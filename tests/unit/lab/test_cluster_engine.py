"""The `cluster` engine is available to Python users who import `syncline.lab.cluster`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from other_user import NOBODY, as_nobody, needs_root, write_files

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


@needs_root
@pytest.mark.parametrize("is_link", [False, True])
def test_a_folder_that_another_user_made_first_is_refused(monkeypatch, tmp_path, is_link):
    """Its name can be guessed, and it is among the temporary files."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    (tmp_path / "target").mkdir()
    name = f"syncline-clusters-{os.getuid()}"
    evil = {"pid": os.getpid(), "driver": "127.0.0.1", "hosts": []}
    planted = {name: tmp_path / "target"} if is_link else {f"{name}/default/cluster.json": repr(evil).encode()}
    as_nobody(Path(tempfile.gettempdir()), lambda: write_files(planted))
    uses = [
        lambda: cluster.ClusterServer(SimpleNamespace(), "default", {}),
        lambda: cluster.send_command("default", {"do": "status"}),
        lambda: engine_for("cluster"),
    ]
    for use in uses:
        with pytest.raises(ConfigError) as caught:
            use()
        assert caught.value.code == ("linked-file" if is_link else "foreign-run")
    assert not list((tmp_path / "target").iterdir())
    for file in Path(tempfile.gettempdir()).rglob("cluster.json"):
        file.unlink()


@needs_root
def test_the_runtime_folder_of_another_user_is_not_used(monkeypatch, tmp_path):
    """As under sudo -E."""
    assert cluster.command_socket("default").is_relative_to(tmp_path)
    os.chown(tmp_path, NOBODY, -1)
    assert cluster.command_socket("default").is_relative_to(tempfile.gettempdir())
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert cluster.command_socket("default").is_relative_to(tempfile.gettempdir())
