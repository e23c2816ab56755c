"""When something goes wrong in a worker: the first cause, once, with what to do; and nothing left behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from real_runs import FailAt, environment, final_state, samples, small_net
from real_runs import syncline as command
from torch import nn

import syncline
from syncline.telemetry.run_dir import RunDir


def train(tmp_path: Path, model: object, **changes: object) -> syncline.Result:
    settings: dict[str, object] = {
        "data": samples(), "batch": 10, "epochs": 3, "workers": 3, "optimizer": syncline.sgd(lr=0.05),
        "out": str(tmp_path), "quiet": True, "on_worker_failure": "stop", **changes,
    }  # fmt: skip
    return syncline.train(model=model, **settings)  # type: ignore[arg-type]


def test_a_users_exception_is_named_first_and_shown_once_with_their_own_frames_only(tmp_path):
    with pytest.raises(syncline.WorkerFailed) as caught:
        train(tmp_path, FailAt(small_net(), call=7, rank=1, fault="raise"))
    message, facts = str(caught.value), caught.value.facts
    assert (facts["worker_id"], facts["exception"], facts["step"]) == (1, "ZeroDivisionError", 6)
    assert facts["samples"]
    head, _, traceback = message.partition("\n\n")
    shown = ", ".join(map(str, facts["samples"]))
    assert re.match(rf"Worker 1 .*ZeroDivisionError.* step 6.*{shown}: the user's own mistake\n", head)
    assert "2 other workers" in head
    assert traceback.startswith("Traceback (most recent call last):\n")
    assert message.count("ZeroDivisionError: the user's own mistake") == 1
    assert message.count("Traceback") == 1
    assert "real_runs.py" in traceback
    assert "syncline/workers" not in message, "the user's frames only"


@pytest.mark.parametrize(
    ("fault", "signal_name", "exit_code"),
    [("kill", "SIGKILL", None), ("segfault", "SIGSEGV", None), ("exit", None, 3)],
)
def test_a_worker_that_vanishes_is_named_with_its_signal_or_code(tmp_path, fault, signal_name, exit_code):
    with pytest.raises(syncline.WorkerFailed) as caught:
        train(tmp_path, FailAt(small_net(), call=5, rank=2, fault=fault))
    first = str(caught.value).splitlines()[0]
    facts = caught.value.facts
    assert (facts["worker_id"], facts["signal"], facts["exit_code"]) == (2, signal_name, exit_code)
    assert re.match(rf"Worker 2 .*\b{signal_name or 'exit code 3'}\b", first)
    if fault == "kill":
        assert "out-of-memory" in first, "whether the out-of-memory killer was active"


def test_after_a_crash_the_run_is_resumed_from_its_last_checkpoint(tmp_path):
    model = FailAt(small_net(), call=18, rank=1, fault="kill", flag=tmp_path / "happened")
    with pytest.raises(syncline.WorkerFailed, match=r"step-\d+\.pt.*syncline resume") as caught:
        train(tmp_path, model, checkpoint_every_steps=4)
    (run_dir,) = (p.parent for p in tmp_path.glob("*/plan.json"))
    assert caught.value.facts["resume_command"] == f"syncline resume {run_dir}"
    result = syncline.resume(run_dir, quiet=True)
    whole = train(tmp_path / "whole", FailAt(small_net(), call=-1, rank=1, fault="kill"))
    for name, tensor in final_state(whole.run_dir)["model"].items():
        assert torch.equal(final_state(result.run_dir)["model"][name], tensor)


def test_a_loss_that_is_not_a_number_stops_the_run_and_names_worker_step_and_samples(tmp_path):
    with pytest.raises(syncline.NonFiniteLoss) as caught:
        train(tmp_path, FailAt(small_net(), call=9, rank=2, fault="nan"))
    message = str(caught.value)
    assert all(fact in message for fact in ("nan", "worker 2", "step 8", "epoch 1", "samples", "--on-nan skip"))
    assert (caught.value.facts["worker_id"], caught.value.facts["step"]) == (2, 8)


def test_steps_whose_loss_is_not_a_number_can_be_skipped(tmp_path):
    result = train(tmp_path, FailAt(small_net(), call=9, rank=2, fault="nan"), on_nan="skip")
    assert result.steps == 33
    assert all(torch.isfinite(t).all() for t in final_state(result.run_dir)["model"].values())
    warnings = [e.message for e in RunDir(result.run_dir).read_events() if type(e).__name__ == "WarningMessage"]
    assert len(warnings) == 1
    assert "worker 2 at step 8" in warnings[0]
    assert "Step skipped." in warnings[0]


def test_shapes_that_do_not_fit_are_reported_with_the_shapes(tmp_path):
    with pytest.raises(syncline.WorkerFailed) as caught:
        train(tmp_path, nn.Linear(7, 3))
    message = str(caught.value)
    assert "mat1 and mat2 shapes cannot be multiplied" in message
    assert re.search(r"The batch had inputs \([34], 12\) float32 and target \([34],\) int64", message)
    assert "Check that model, loss and data match" in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": "cros_entropy"}, "There is no loss 'cros_entropy'. Did you mean 'cross_entropy'"),
        ({"optimizer": "sdg(lr=0.1)"}, "There is no optimizer 'sdg'. Did you mean 'SGD'"),
        ({"optimizer": "sgd(lr=0.1, momentun=0.9)"}, "sgd has no option 'momentun'. Did you mean 'momentum'?"),
        ({"schedule": "CosineAnealingLR"}, "There is no schedule 'CosineAnealingLR'. Did you mean 'CosineAnnealingLR'"),
        ({"test": samples(20), "metrics": ["acuracy"]}, "There is no metric 'acuracy'. Did you mean 'Accuracy'"),
    ],
)
def test_a_wrong_name_gets_the_nearest_right_one(tmp_path, changes, words):
    with pytest.raises(syncline.ConfigError) as caught:
        train(tmp_path, small_net(), **changes)
    assert words in str(caught.value)


def test_a_loss_that_is_not_one_number_is_refused(tmp_path):
    with pytest.raises(syncline.ConfigError, match=r"loss has shape \(\d+,\)"):
        train(tmp_path, small_net(), loss="cross_entropy(reduction='none')")


def test_an_exception_in_the_data_names_the_sample(tmp_path):
    class Broken(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            if index == 23:
                raise OSError("bad sector")
            return torch.zeros(12), 0

    with pytest.raises(syncline.WorkerFailed, match=r"(?s)OSError.*bad sector.*reading sample 23 of epoch 0"):
        train(tmp_path, small_net(), data=Broken())


def test_a_task_that_cannot_be_sent_says_why_and_what_to_do(tmp_path):
    class Holds(torch.utils.data.Dataset):
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> int:
            return index

    data = Holds()
    with pytest.raises(syncline.ConfigError, match=r"cannot be sent to the workers.*a lock"):
        train(tmp_path, small_net(), data=data)


def test_a_full_disk_while_checkpointing_is_reported_and_training_continues(tmp_path):
    small = tmp_path / "small-disk"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root; the store's own test covers the message")
    try:
        wide = nn.Sequential(nn.Linear(12, 4000), nn.ReLU(), nn.Linear(4000, 3))  # 256 kB, and as much of momentum
        done = command(
            "train", f"{_task_file(tmp_path)}:task", "--out", str(small), "--checkpoint-every-steps", "5", cwd=tmp_path
        )
        del wide
        assert done.code == 1
        assert "is full" in done.err
        assert "MB free" in done.err
        assert "epoch 3/3" in done.out, "training continued to the end"
        assert not list(small.glob("*/checkpoints/.*")), "nothing temporary is left"
    finally:
        subprocess.run(["umount", str(small)], check=True)


def _task_file(folder: Path) -> Path:
    path = folder / "wide_task.py"
    path.write_text(
        "import torch, syncline\n"
        "net = torch.nn.Sequential(torch.nn.Linear(12, 4000), torch.nn.ReLU(), torch.nn.Linear(4000, 3))\n"
        "task = syncline.Task(model=net, data=(torch.randn(90, 12), torch.zeros(90, dtype=torch.long)),\n"
        "                     optimizer=syncline.sgd(lr=0.01, momentum=0.9))\n"
    )
    return path


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path):
    script = tmp_path / "stuck.py"
    script.write_text(
        "import os, signal, threading, pathlib\n"
        "import torch, syncline\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "model = torch.nn.Linear(2, 1)\n"
        "worker = syncline.worker()\n"
        "model, optimizer, batches = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1),\n"
        "    DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=4))\n"
        "for _ in batches:\n"
        "    print('stuck', flush=True)\n"
        "    threading.Event().wait(100)  # a step that does not end\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "syncline.cli.main", "run", str(script)],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    while (line := process.stdout.readline()) != "stuck\n":
        assert line, process.communicate()
    process.send_signal(signal.SIGINT)
    while "Ctrl-C again" not in (line := process.stdout.readline()):
        assert line, process.communicate()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Stopped without saving" in err
