"""What may be written after --engine for Ray; nothing is started here."""

from __future__ import annotations

import builtins
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest

from syncline.engines.choose import engine_for
from syncline.engines.ray import Wanted, read_name
from syncline.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("ray", Wanted()),
        ("ray?spread", Wanted(is_spread=True)),
        ("ray://10.0.0.5:6379", Wanted(address="10.0.0.5:6379")),
        ("ray://head.cluster:6379?spread&cpus=2", Wanted(address="head.cluster:6379", is_spread=True, cpus=2.0)),
        ("ray://[fd00::2]:6379", Wanted(address="[fd00::2]:6379")),
        ("ray?cpus=0.5&gpus=1&wait=600", Wanted(cpus=0.5, gpus=1.0, wait_s=600.0)),
        ("ray?gpus=0", Wanted()),
    ],
)
def test_a_name_says_where_and_how_much(name, wanted):
    assert read_name(name) == wanted


@pytest.mark.parametrize("name", ["ray://", "ray://head", "ray://head:", "ray://:6379", "ray://head:99999", "ray:6379"])
def test_a_name_without_an_address_is_answered_with_the_form(name):
    with pytest.raises(ConfigError, match=r"ray://HOST:PORT, and after a \? any of: spread, cpus=N") as caught:
        read_name(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("option", ["pack", "cpu=2", "spread=1", "workers=3"])
def test_an_unknown_option_is_answered_with_those_there_are(option):
    with pytest.raises(ConfigError, match="any of: spread, cpus=N, gpus=N, wait=SECONDS") as caught:
        read_name(f"ray?{option}")
    assert repr(option) in str(caught.value)


@pytest.mark.parametrize("option", ["cpus=0", "cpus=-1", "cpus=many", "cpus=", "cpus", "gpus=-1", "gpus=nan", "wait=0"])
def test_an_amount_that_is_none_is_answered_with_an_example(option):
    with pytest.raises(ConfigError, match=r"it takes a number (above 0|of 0 or more), as in "):
        read_name(f"ray?{option}")


def test_a_place_is_one_cpu_unless_more_is_said():
    assert Wanted().bundle == {"CPU": 1.0}
    assert Wanted(cpus=4.0, gpus=1.0).bundle == {"CPU": 4.0, "GPU": 1.0}


def test_what_is_lacking_is_told_with_both_numbers():
    wanted = Wanted(cpus=2.0, gpus=1.0)
    assert wanted.lacks(2, {"CPU": 8.0})
    assert not wanted.lacks(2, {"CPU": 4.0, "GPU": 2.0})
    assert wanted.in_words(2, {"CPU": 8.0}, {"CPU": 3.0}) == (
        "Asked for: 2 places of 2 CPUs and 1 GPU each. "
        "The cluster has 8 CPUs, 3 of them free and 0 GPUs, 0 of them free."
    )


@pytest.mark.parametrize("name", ["ray?everywhere", "ray://nowhere"])
def test_the_name_is_read_before_ray_is_loaded(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="spread"):
        engine_for(name)


def test_without_ray_the_answer_is_what_to_install(monkeypatch):
    really = builtins.__import__

    def without_ray(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
        return really(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    with pytest.raises(ConfigError, match=r"^Ray is not installed: pip install 'syncline\[ray\]'$"):
        engine_for("ray")


def test_where_nobody_answers_the_error_says_which_address_is_meant():
    with pytest.raises(ConfigError, match=r"No Ray cluster answers at 127\.0\.0\.1:9\. .*6379 unless it was set"):
        engine_for("ray://127.0.0.1:9")


def test_somebody_else_at_that_address_is_not_taken_for_ray():
    with socket.create_server(("0.0.0.0", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(b"HTTP/1.0 400 Bad request\r\n\r\n")

        somebody = threading.Thread(target=answer)
        somebody.start()
        with pytest.raises(ConfigError, match="No Ray cluster answers at"):
            engine_for(f"ray://127.0.0.1:{listener.getsockname()[1]}")
        somebody.join()


def test_the_address_of_ray_client_is_not_taken_for_that_of_a_cluster(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS=ray://127\.0\.0\.1:10001 is the address of Ray Client"):
        engine_for("ray")


def test_ray_is_loaded_only_when_it_is_chosen():
    program = "import sys, syncline, syncline.engines.ray, syncline.engines.choose; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
