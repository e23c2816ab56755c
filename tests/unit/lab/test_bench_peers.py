"""Comparing with other frameworks, of which none is needed here: adapters and environments that take no time."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from syncline.cli.main import app
from syncline.errors import ConfigError, SynclineError, UnknownName
from syncline.lab.bench import peer_recipes, peers, processes, suites
from syncline.lab.bench.harness import BenchSettings, measure
from syncline.lab.bench.peer_recipes import (
    PeerFramework,
    adapters_folder,
    all_peers,
    environments_folder,
    install,
    peers_named,
)
from syncline.lab.bench.peers import PeerWorkload, images_per_s, suite_for

START = """start = ["{python}", "{adapter}", "{workers}", "{batch}", "{warm_up}", "{steps}", "{port}"]\n"""
INSTALL = """[install]\npython = "3.11"\npackages = ["a_package==1.0"]\n"""
MEASURED = """print('{"event": "measured", "images_per_s": %s, "steps": 3, "version": "1"}')\n"""


class Fakes:
    """A folder of adapters and one of environments, to be filled."""

    def __init__(self, folder: Path) -> None:
        self.adapters, self.environments, self.scratch = (
            folder / "adapters",
            folder / "environments",
            folder / "scratch",
        )
        self.scratch.mkdir()
        self.said: list[str] = []
        self.add("syncline-train", MEASURED % 100, install="")

    def add(self, key: str, script: str, *, install: str = INSTALL, more: str = "", is_installed: bool = True) -> None:
        folder = self.adapters / key
        folder.mkdir(parents=True)
        (folder / "adapter.py").write_text(script)
        (folder / "peer.toml").write_text(f'name = "The {key}"\nwhat = "What {key} is."\n{START}{more}{install}')
        if install and is_installed:
            python = self.environments / key / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
            python.chmod(0o755)

    def measure(self, *, limit_s: float = 60.0):
        made = suite_for(
            all_peers(self.adapters), self.environments, PeerWorkload(), self.scratch, self.said.append, limit_s=limit_s
        )
        return measure(made, repeats=1)


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    return Fakes(tmp_path)


def test_each_installed_peer_gets_a_ratio_to_syncline(fakes: Fakes) -> None:
    fakes.add("fast", MEASURED % 200)
    fakes.add("slow", MEASURED % 50)
    result = fakes.measure()
    assert [c.name for c in result.suite.contenders] == ["The syncline-train", "The fast", "The slow"]
    assert result.ratios("The fast") == [2.0]
    assert result.ratios("The slow") == [0.5]
    assert fakes.said == []


def test_a_peer_that_is_not_installed_is_left_out_with_a_line_that_says_how_to_get_it(fakes: Fakes) -> None:
    fakes.add("absent", "", is_installed=False)
    result = fakes.measure()
    assert [c.name for c in result.suite.contenders] == ["The syncline-train"]
    (message,) = fakes.said
    assert "syncline bench peers --install absent" in message
    assert "Not installed: The absent." in result.suite.measures


def test_a_peer_that_fails_is_quoted_and_costs_nobody_else(fakes: Fakes) -> None:
    fakes.add("broken", "raise SystemExit('alas, no such module')")
    fakes.add("fine", MEASURED % 100)
    result = fakes.measure()
    failures = result.outcomes["The broken"].failures
    assert len(failures) == 2
    assert "alas, no such module" in failures[0]
    assert result.ratios("The fine") == [1.0]


def test_a_peer_that_prints_no_figure_is_quoted(fakes: Fakes) -> None:
    fakes.add("silent", "print('{\"event\": \"ready\"}'); print('{no JSON')")
    (failure, _) = fakes.measure().outcomes["The silent"].failures
    assert '{"event": "ready"}\n{no JSON' in failure


@pytest.mark.slow
def test_a_peer_that_hangs_is_ended_with_all_that_it_started(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its child has a session of its own, holds the output open and ignores polite requests.
    monkeypatch.setattr(processes, "_GRACE_S", 0.1)
    child = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(99)"
    )
    fakes.add(
        "hanging",
        "import pathlib, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        "with open('pids', 'a') as pids: print(child.pid, file=pids)\n"
        "time.sleep(99)\n",
    )
    (failure, _) = fakes.measure(limit_s=2.0).outcomes["The hanging"].failures
    assert "within 2 s" in failure
    _are_gone(fakes.scratch / "pids")


def test_what_a_peer_leaves_behind_is_ended_and_its_figure_counts(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_GRACE_S", 0.1)
    fakes.add(
        "careless",
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'], start_new_session=True)\n"
        "with open('pids', 'a') as pids: print(child.pid, file=pids)\n" + MEASURED % 300,
    )
    assert fakes.measure().ratios("The careless") == [3.0]
    _are_gone(fakes.scratch / "pids")


def test_a_peer_gets_its_options_and_finds_the_shared_protocol(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("PYTHONHOME", "")
    script = (
        "import os, sys\n"
        "workers, batch, warm_up, steps, port = map(int, sys.argv[1:])\n"
        "assert (workers, batch, warm_up, steps) == (2, 64, 50, 300) and port > 1023\n"
        "assert os.environ['OMP_NUM_THREADS'] == '1' and os.environ['GLOO_SOCKET_IFNAME'] == 'lo'\n"
        "assert os.environ['OF_ITS_OWN'] == 'x'\n"
        "assert os.environ['PYTHONPATH'].endswith('adapters/protocol'), os.environ['PYTHONPATH']\n"
    )
    fakes.add("curious", script + MEASURED % 100, more='[environment]\nOF_ITS_OWN = "x"\n')
    assert fakes.measure().outcomes["The curious"].failures == []


def test_without_syncline_there_is_nothing_to_compare_with(fakes: Fakes) -> None:
    (fakes.adapters / "syncline-train" / "peer.toml").unlink()
    with pytest.raises(SynclineError, match="syncline-train"):
        fakes.measure()


def test_the_last_figure_counts() -> None:
    assert images_per_s('x\n{"event": "measured", "images_per_s": 1}\n{"event": "measured", "images_per_s": 2}\n') == 2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('name = "x"', "has no 'what'"),
        (f'name = "x"\nwhat = "y"\n{START}color = "red"', "unknown key 'color'"),
        (f'name = "x"\nwhat = "y"\n{START}[install]\npython = "3.11"', "has no 'packages'"),
        (f'name = "x"\nwhat = "y"\n{START}[install]\npython = "three"\npackages = []', "must be like '3.11'"),
        ("name = ", "is not valid TOML"),
    ],
)
def test_a_mistake_in_a_recipe_names_its_file(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "peer.toml").write_text(text)
    with pytest.raises(ConfigError, match=f"peer.toml.*{complaint}"):
        all_peers(tmp_path)


def test_the_environments_are_where_one_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SYNCLINE_PEERS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environments_folder(None) == tmp_path / "syncline" / "peers"
    monkeypatch.setenv("SYNCLINE_PEERS", "/elsewhere")
    assert environments_folder(None) == Path("/elsewhere")
    assert environments_folder(tmp_path) == tmp_path


def test_a_syncline_without_its_repository_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peer_recipes, "__file__", str(tmp_path / "site-packages" / "syncline" / "bench" / "x.py"))
    with pytest.raises(SynclineError, match="from a checkout of the repository"):
        adapters_folder()


def this_python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def one_peer(tmp_path: Path, **more) -> PeerFramework:
    known = {"key": "one", "folder": tmp_path, "name": "One", "what": "", "start": (), "python": this_python()}
    return PeerFramework(**{**known, "packages": ("a==1",), **more})


def test_installing_makes_an_environment_and_gives_pip_the_packages(tmp_path: Path) -> None:
    commands: list[list[str]] = []
    install(one_peer(tmp_path), tmp_path / "peers", lambda _: None, lambda command: commands.append(command) or 0)
    venv, pip = commands
    assert venv == [sys.executable, "-m", "venv", str(tmp_path / "peers" / "one")]
    assert pip[0] == str(tmp_path / "peers" / "one" / "bin" / "python")
    assert pip[1:] == ["-m", "pip", "install", "--prefer-binary", "a==1"]


def test_an_installation_that_fails_leaves_no_half_environment(tmp_path: Path) -> None:
    def run(command: list[str]) -> int:
        (tmp_path / "one").mkdir(exist_ok=True)
        return 0 if "venv" in command else 7

    with pytest.raises(SynclineError, match=r"One.* code 7"):
        install(one_peer(tmp_path), tmp_path, lambda _: None, run)
    assert not (tmp_path / "one").exists()


def test_what_is_there_already_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    with pytest.raises(ConfigError, match="install One"):
        install(one_peer(tmp_path), tmp_path, lambda _: None)
    assert (tmp_path / "one").exists()


def test_manual_steps_and_missing_pythons_are_reported(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(SynclineError, match=r"(.|\n)*make it"):
        install(one_peer(tmp_path, by_hand="make it"), tmp_path, lambda _: None)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SynclineError, match=r"python2\.3"):
        install(one_peer(tmp_path, python="2.3"), tmp_path, lambda _: None)


def test_an_unknown_peer_to_install_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'accelerate'"):
        peers_named(["acelerate"], adapters_folder())


def test_installing_is_for_peers_only() -> None:
    result = CliRunner().invoke(app, ["bench", "startup", "--install", "accelerate"])
    assert isinstance(result.exception, ConfigError)
    assert "--install" in str(result.exception)


def test_peers_are_measured_only_when_they_are_named() -> None:
    assert "peers" not in suites.choose([])
    assert suites.choose(["peers"]) == ["peers"]


def test_every_real_recipe_can_be_read_and_started(tmp_path: Path) -> None:
    found = {p.key: p for p in all_peers(adapters_folder())}
    assert {"syncline-train", "ddp", "accelerate", "fabric", "ray", "torchft", "horovod", "tensorflow", "jax"} < {
        *found
    }
    for peer in found.values():
        command = peers._command(peer, Path("/env/bin/python"), PeerWorkload(), tmp_path)
        assert not any("{" in part for part in command)
        assert str(peer.folder / "adapter.py") in command
        ast.parse((peer.folder / "adapter.py").read_text())
        assert peer.key in (adapters_folder() / "README.md").read_text()
        if peer.has_own_environment and "torch_lenet" in (peer.folder / "adapter.py").read_text():
            assert "torch==2.13.0" in peer.packages, "a looser range pulls gigabytes of CUDA packages"


@pytest.mark.slow
def test_syncline_and_ddp_run_through_the_real_protocol(tmp_path: Path) -> None:
    ours = [p for p in all_peers(adapters_folder()) if not p.has_own_environment]
    made = suite_for(ours, tmp_path, PeerWorkload(warm_up=2, steps=120), tmp_path, print)
    assert [c.name for c in made.contenders] == ["syncline train", "syncline run", "torchrun, DDP"]
    assert all(contender.measure() > 0 for contender in made.contenders)


def test_settings_lead_to_the_environments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    made = peers.suites(BenchSettings(peers_dir=tmp_path, say=said.append))
    assert next(made).baseline == "syncline train"
    made.close()
    assert any("--install jax" in line for line in said)


def _are_gone(pids: Path) -> None:
    for pid in pids.read_text().split():
        assert not Path("/proc", pid).exists() or ") Z " in Path("/proc", pid, "stat").read_text()
