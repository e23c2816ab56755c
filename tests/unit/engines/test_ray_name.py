"""The syntax of --engine for Ray; nothing is started here."""

from __future__ import annotations

import builtins
import re
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest

from syncline.engines.choose import engine_for
from syncline.engines.ray import RayResources, read_name
from syncline.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "resources"),
    [
        ("ray", RayResources()),
        ("ray?spread", RayResources(is_spread=True)),
        ("ray://10.0.0.5:6379", RayResources(address="10.0.0.5:6379")),
        ("ray://head.cluster:6379?spread&cpus=2", RayResources(address="head.cluster:6379", is_spread=True, cpus=2.0)),
        ("ray://[fd00::2]:6379", RayResources(address="[fd00::2]:6379")),
        ("ray?cpus=0.5&gpus=1&wait=600", RayResources(cpus=0.5, gpus=1.0, wait_s=600.0)),
        ("ray?gpus=0", RayResources()),
    ],
)
def test_a_name_gives_the_address_and_the_resources(name, resources):
    assert read_name(name) == resources


@pytest.mark.parametrize("name", ["ray://", "ray://head", "ray://head:", "ray://:6379", "ray://head:99999", "ray:6379"])
def test_a_name_without_an_address_is_refused_with_the_syntax(name):
    with pytest.raises(ConfigError, match=r"ray://HOST:PORT.*spread, cpus=N") as caught:
        read_name(name)
    assert (caught.value.code, caught.value.facts["value"]) == ("invalid-engine", name)


@pytest.mark.parametrize("option", ["pack", "cpu=2", "spread=1", "workers=3"])
def test_an_unknown_option_is_refused_with_the_known_ones(option):
    with pytest.raises(ConfigError, match="spread, cpus=N, gpus=N, wait=SECONDS") as caught:
        read_name(f"ray?{option}")
    assert caught.value.facts["option"] == option


@pytest.mark.parametrize("option", ["cpus=0", "cpus=-1", "cpus=many", "cpus=", "cpus", "gpus=-1", "gpus=nan", "wait=0"])
def test_an_invalid_amount_is_refused_with_an_example(option):
    with pytest.raises(ConfigError, match=r"a number (above 0|of 0 or more)"):
        read_name(f"ray?{option}")


def test_a_worker_gets_one_cpu_by_default():
    assert RayResources().bundle == {"CPU": 1.0}
    assert RayResources(cpus=4.0, gpus=1.0).bundle == {"CPU": 4.0, "GPU": 1.0}


def test_missing_resources_are_reported_with_both_numbers():
    resources = RayResources(cpus=2.0, gpus=1.0)
    assert resources.lacks(2, {"CPU": 8.0})
    assert not resources.lacks(2, {"CPU": 4.0, "GPU": 2.0})
    shown = resources.describe(2, {"CPU": 8.0}, {"CPU": 3.0})
    assert re.search("2 workers with 2 CPUs and 1 GPU each.* 8 CPUs, 3 of them free and 0 GPUs, 0 of them free", shown)


@pytest.mark.parametrize("name", ["ray?everywhere", "ray://nowhere"])
def test_the_name_is_read_before_ray_is_loaded(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="spread"):
        engine_for(name)


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    really = builtins.__import__

    def without_ray(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
        return really(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    with pytest.raises(ConfigError, match=r"pip install 'syncline\[ray\]'"):
        engine_for("ray")


def test_if_no_cluster_answers_the_error_says_which_address_to_use():
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9\..*6379"):
        engine_for("ray://127.0.0.1:9")


def test_another_server_at_that_address_is_not_taken_for_ray():
    with socket.create_server(("0.0.0.0", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(b"HTTP/1.0 400 Bad request\r\n\r\n")

        server = threading.Thread(target=answer)
        server.start()
        with pytest.raises(ConfigError, match="No Ray cluster answers at"):
            engine_for(f"ray://127.0.0.1:{listener.getsockname()[1]}")
        server.join()


def test_the_address_of_ray_client_is_not_taken_for_that_of_a_cluster(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS=ray://127\.0\.0\.1:10001.* Ray Client"):
        engine_for("ray")


def test_ray_is_loaded_only_when_it_is_chosen():
    program = "import sys, syncline, syncline.engines.ray, syncline.engines.choose; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
