"""What used to end in a traceback or an unclear message, on real runs: the cause, the fix and the right exit code."""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from real_runs import environment, samples, small_net
from real_runs import syncline as command
from torch import nn
from warm_process import warm_process

import syncline
from syncline.errors import ANOTHER_MODEL, SCRIPT_EXIT

SMALL = ("mlp", "--data", "digits", "--workers", "2", "--epochs", "1", "--max-steps", "4", "--evaluate-every", "0")


def train(tmp_path: Path, **changes: Any) -> syncline.Result:
    settings: dict[str, Any] = {
        "model": small_net(), "data": samples(), "batch": 10, "epochs": 1, "workers": 2, "out": str(tmp_path),
        "quiet": True, "on_worker_failure": "stop", "checkpoint_every_steps": 4, **changes,
    }  # fmt: skip
    return syncline.train(**settings)


def shell(text: str, cwd: Path, *, is_warm: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a line of shell in which `syncline` is the command; with closed streams or limits it cannot be a warm one."""
    words = warm_process().words("-m", "syncline.cli.main") if is_warm else [sys.executable, "-m", "syncline"]
    words = shlex.join(words)
    line = text.replace("syncline", words, 1)
    return subprocess.run(
        ["bash", "-c", line], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=60
    )  # fmt: skip


# Run directories


@pytest.fixture(scope="module")
def trained() -> list[Path]:
    """The run that every test gets a copy of, once there is one."""
    return []


@pytest.fixture
def run(tmp_path, tmp_path_factory, trained) -> Path:
    if not trained:
        trained.append(train(tmp_path_factory.mktemp("trained")).run_dir)
    return Path(shutil.copytree(trained[0], tmp_path / "run"))


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("config.json", "{", "damaged-config"),
        ("config.json", '{"wrkers": 2}', "unknown-option"),
        ("plan.json", "null", "damaged-plan"),
        ("plan.json", '{"kind": "train"}', "damaged-plan"),
        ("plan.json", "[" * 100_000, "damaged-plan"),
    ],
)
def test_a_damaged_file_of_a_run_is_named_on_resume(run, name, content, code):
    (run / name).write_text(content)
    with pytest.raises(syncline.ConfigError) as caught:
        syncline.resume(run, quiet=True, epochs=2)
    assert caught.value.code == code
    assert caught.value.facts["path"] == str(run / name)


def test_one_changed_byte_of_the_task_is_noticed_on_resume_and_in_predictions(run):
    data = bytearray((run / "task.bin").read_bytes())
    data[-9] ^= 1
    (run / "task.bin").write_bytes(data)
    for use in (lambda: syncline.resume(run, quiet=True, epochs=2), lambda: syncline.predict(run, __file__)):
        with pytest.raises(syncline.SynclineError) as caught:
            use()
    with pytest.raises(syncline.ConfigError) as caught:
        syncline.resume(run, quiet=True, epochs=2)
    assert (caught.value.code, caught.value.facts["path"]) == ("damaged-task", str(run / "task.bin"))


def test_a_checkpoint_of_another_model_is_refused_and_not_advised_again(tmp_path, run):
    other = nn.Sequential(nn.Linear(12, 5), nn.Linear(5, 3))
    with pytest.raises(syncline.CheckpointError) as caught:
        train(tmp_path, model=other, resume=str(run), epochs=2)
    assert caught.value.code == ANOTHER_MODEL
    assert "syncline resume" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_truncated_ledger_is_called_incomplete(tmp_path, run):
    (run / "ledger.jsonl").write_bytes(b"")
    done = command("audit", str(run), cwd=tmp_path)
    assert done.code == 1
    assert "ledger.jsonl" in done.err
    assert "11 steps" in done.err


def test_a_ledger_without_its_end_is_called_incomplete_if_the_run_has_ended(tmp_path, run):
    lines = (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (run / "ledger.jsonl").write_bytes(b"".join(lines[:-1]))
    done = command("audit", str(run), cwd=tmp_path)
    assert done.code == 1
    assert "ledger.jsonl" in done.err


def test_an_audit_refuses_a_range_of_a_trillion_at_once(tmp_path, run):
    lines = (run / "ledger.jsonl").read_text().splitlines()
    used = next(k for k, line in enumerate(lines) if '"used"' in line)
    line = json.loads(lines[used])
    line["runs"][0][4] = 10**12
    lines[used] = json.dumps(line)
    (run / "ledger.jsonl").write_text("\n".join(lines))
    done = command("audit", str(run), cwd=tmp_path, timeout_s=20)
    assert done.code == 1
    assert "ledger" in done.err
    assert "Traceback" not in done.err


def test_a_deeply_nested_event_is_skipped_by_the_report(tmp_path, run):
    with (run / "events.jsonl").open("ab") as events:
        events.write(b'{"event": "info", "message": "x", "details": ' + b"[" * 100_000 + b"\n")
    done = command("report", str(run), "--no-tensorboard", cwd=tmp_path)
    assert done.code == 0, done.err
    assert (run / "report.html").exists()


# Tasks


class Ragged(torch.utils.data.Dataset[Any]):
    def __init__(self, odd: Any) -> None:
        self.odd = odd

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return self.odd if index == 23 else (torch.zeros(12), 0)


@pytest.mark.parametrize(("odd", "code"), [(None, "sample-is-none"), ((torch.zeros(11), 0), "ragged-samples")])
def test_a_sample_that_does_not_fit_is_the_first_cause(tmp_path, odd, code):
    with pytest.raises(syncline.DataError) as caught:
        train(tmp_path, data=Ragged(odd))
    assert caught.value.code == code
    assert caught.value.facts["sample"] == 23
    assert "storage" not in str(caught.value)


class OddLength(Ragged):
    def __init__(self, length: Any) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize("length", [-3, "40"])
def test_a_length_that_is_none_is_refused_before_the_run_starts(tmp_path, length):
    with pytest.raises(syncline.DataError) as caught:
        train(tmp_path, data=OddLength(length))
    assert (caught.value.code, caught.value.facts["type"]) == ("invalid-length", "OddLength")
    assert list(tmp_path.iterdir()) == []


def _text(output: torch.Tensor, target: torch.Tensor) -> Any:
    return "high"


def _number(output: torch.Tensor, target: torch.Tensor) -> Any:
    return float(nn.functional.cross_entropy(output, target))


def _detached(output: torch.Tensor, target: torch.Tensor) -> Any:
    return nn.functional.cross_entropy(output, target).detach()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"loss": _text}, "loss-type"),
        ({"loss": _number}, "loss-type"),
        ({"loss": _detached}, "detached-loss"),
        ({"model": small_net().requires_grad_(False)}, "nothing-to-train"),
    ],
)
def test_what_cannot_be_trained_is_refused_at_the_first_step(tmp_path, changes, code):
    with pytest.raises(syncline.ConfigError) as caught:
        train(tmp_path, **changes)
    assert caught.value.code == code
    assert "Traceback" not in str(caught.value)


# The surroundings


def test_sigterm_saves_like_ctrl_c_and_exits_with_143(tmp_path):
    (tmp_path / "task.py").write_text(
        "import os, signal, sys, threading\nimport torch, syncline\n"
        "sys.path.insert(0, os.environ['REAL_RUNS'])\nfrom real_runs import driver_pid\n"
        "class Net(torch.nn.Linear):\n"
        "    calls = 0\n"
        "    def forward(self, x):\n"
        "        self.calls += 1\n"
        "        threading.Event().wait(0.01)\n"
        "        if self.calls == 5 and os.readlink('/proc/self/fd/1').endswith('worker-0.log'):\n"
        "            os.kill(driver_pid(), signal.SIGTERM)\n"
        "        return super().forward(x)\n"
        "task = syncline.Task(model=Net(12, 3), data=(torch.randn(103, 12), torch.zeros(103, dtype=torch.long)))\n"
    )
    done = command(
        "train", "task.py:task", "--epochs", "50", "--batch", "10", "--name", "a", cwd=tmp_path,
        env={"REAL_RUNS": str(Path(__file__).parent)},
    )  # fmt: skip
    assert done.code == 128 + signal.SIGTERM, done.err
    assert "everything is saved" in done.err
    assert list((tmp_path / "runs" / "a" / "checkpoints").glob("step-*.json"))


def test_the_package_runs_as_a_module(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "syncline", "--version"], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"syncline {syncline.__version__}\n"


@pytest.mark.parametrize("where", ["| head -1", ">&-", ">&- 2>&-"])
def test_a_closed_output_ends_neither_the_run_nor_in_a_message(tmp_path, where):
    line = f"set -o pipefail; syncline train {' '.join(SMALL)} --name a {where}"
    done = shell(line, tmp_path, is_warm=where == "| head -1")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert (tmp_path / "runs" / "a" / "summary.json").exists()


def test_a_listing_cut_short_by_its_reader_says_nothing(tmp_path):
    done = shell("syncline list losses | head -1", tmp_path)
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1


def test_a_name_that_is_not_utf8_is_refused_and_leaves_no_run(tmp_path):
    done = shell(f"syncline train {' '.join(SMALL)} --name $'a\\xffb'", tmp_path)
    assert done.returncode == 1
    assert "name" in done.stderr
    assert "UTF-8" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_seed_with_too_many_bits_is_refused_with_the_largest_and_leaves_no_run(tmp_path):
    done = command("train", *SMALL, "--seed", str(2**70), cwd=tmp_path)
    assert done.code == 1
    for fact in ("seed", str(2**70), str(2**63 - 1)):
        assert fact in done.err
    assert "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_deleted_working_directory_is_named(tmp_path):
    (tmp_path / "gone").mkdir()
    done = shell(f"cd gone && rmdir ../gone && syncline train {' '.join(SMALL)}", tmp_path, is_warm=False)
    assert done.returncode == 1
    assert "working directory" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("limit", "most", "facts"),
    [(resource.RLIMIT_NOFILE, 20, ["20", "ulimit -n"]), (resource.RLIMIT_FSIZE, 20_000, ["20,000 bytes", "ulimit -f"])],
)
def test_a_limit_is_named_with_its_value_and_how_to_raise_it(tmp_path, limit, most, facts):
    done = subprocess.run(
        [sys.executable, "-m", "syncline", "train", *SMALL],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60,
        preexec_fn=lambda: resource.setrlimit(limit, (most, most)),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert not [fact for fact in facts if fact not in done.stderr], done.stderr
    assert "Traceback" not in done.stderr


SCRIPT = """
import argparse
import syncline
parser = argparse.ArgumentParser(prog="my_loop.py")
parser.add_argument("--depth", type=int)
parser.parse_args()
"""


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_a_wrong_argument_of_a_script_ends_with_the_scripts_own_answer_and_code(tmp_path, quiet):
    (tmp_path / "my_loop.py").write_text(SCRIPT)
    done = command("run", "my_loop.py", "--workers", "2", *quiet, "--", "--depth", "x", cwd=tmp_path)
    assert done.code == 2
    shown = done.out + done.err
    assert shown.count("usage: my_loop.py") == 1
    assert shown.count("invalid int value: 'x'") == 1
    assert "Traceback" not in shown
    assert shown.strip().endswith("invalid int value: 'x'")


def test_a_wrong_argument_of_a_script_has_a_code_in_python(tmp_path):
    from syncline.config.run import RunConfig
    from syncline.driver import run_script
    from syncline.observe.observer import choose_view
    from syncline.task import Script

    (tmp_path / "my_loop.py").write_text(SCRIPT)
    with pytest.raises(syncline.ConfigError) as caught:
        run_script(
            Script(str(tmp_path / "my_loop.py"), ("--depth", "x")), RunConfig(out=str(tmp_path)),
            choose_view(quiet=True, json=False),
        )  # fmt: skip
    assert (caught.value.code, caught.value.facts["exit_code"]) == (SCRIPT_EXIT, 2)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounting a small /dev/shm needs root")
def test_a_full_shared_memory_is_named_with_its_size(tmp_path):
    (tmp_path / "task.py").write_text(
        "import torch, syncline\n"
        "class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 64\n"
        "    def __getitem__(self, index): return torch.zeros(100_000), 0\n"
        "task = syncline.Task(model=torch.nn.Linear(100_000, 2), data=Data())\n"
    )
    words = shlex.join(
        [sys.executable, "-m", "syncline", "train", "task.py:task", "--workers", "1", "--batch", "32",
         "--on-worker-failure", "stop"]
    )  # fmt: skip
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", f"mount -t tmpfs -o size=2m tmpfs /dev/shm && {words}"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip("mounts are not permitted here")
    assert done.returncode == 1
    assert "/dev/shm" in done.stderr
    assert "2.1 MB" in done.stderr
