"""Scripts written for torchrun under `syncline run`: unchanged, with the same result, and restarted after failures."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from real_runs import Ran, environment, same_bits
from real_runs import syncline as command
from warm_process import warm_process

from syncline.telemetry.events import GroupTrains, WorkerFailure
from syncline.telemetry.run_dir import RunDir

DDP = """
import atexit, os, pathlib, signal, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn(103, 12), torch.randint(0, 3, (103,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=10, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
first, fault = 0, sys.argv[1:]
if pathlib.Path("checkpoint.pt").exists():
    state = torch.load("checkpoint.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["epoch"] + 1
if rank == 0:
    print(f"started at epoch {first}, restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
for epoch in range(first, 3):
    sampler.set_epoch(epoch)
    for step, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if fault and epoch == 1 and step == 3 and not pathlib.Path("fault").exists():
            if fault == ["kill"] and rank == 1:
                pathlib.Path("fault").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == ["raise"] and rank == 1:
                atexit.register(time.sleep, 0.5)  # the other worker fails because of it long before this one has ended
                raise ZeroDivisionError("the user's own mistake")
            if fault == ["wait"]:
                print("waiting", flush=True)
                time.sleep(60)
    if rank == 0:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(states, "new.pt")
        os.replace("new.pt", "checkpoint.pt")
    dist.barrier()
if rank == 0:
    torch.save(model.module.state_dict(), "trained.pt")
    print("trained", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(DDP)
    return path


def run(script: Path, *arguments: str, **options: Any) -> Ran:
    return command("run", script.name, "--workers", "2", "--name", "run", *arguments, cwd=script.parent, **options)


def events(folder: Path, kind: type) -> list[Any]:
    return [event for event in RunDir(folder / "runs" / "run").read_events() if isinstance(event, kind)]


def reference(script: Path, folder: Path) -> dict[str, torch.Tensor]:
    """What the script trains in processes like those of torchrun, with gloo."""
    folder.mkdir()
    copy = folder / script.name
    copy.write_text(f"{script.read_text()}os._exit(0)\n")  # torch may hang when it destroys a gloo group after DDP
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(2):
        variables = {
            "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": "0", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        words = warm_process().words(str(copy))
        started.append(subprocess.Popen(words, cwd=folder, env=environment(variables), stdout=subprocess.DEVNULL))
    assert [process.wait(60) for process in started] == [0, 0]
    return torch.load(folder / "trained.pt")


def test_a_ddp_script_trains_the_same_bits_as_under_torchrun(script, tmp_path):
    done = run(script)
    assert done.code == 0, done.err
    assert "started at epoch 0, restart 0" in done.out
    assert "finished the script" in done.out
    assert "steps" not in done.out
    assert same_bits(torch.load(tmp_path / "trained.pt"), reference(script, tmp_path / "reference"))
    (trains,) = events(tmp_path, GroupTrains)
    assert trains.members == [0, 1]


def test_a_script_finds_what_torchrun_sets_and_can_form_groups(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        textwrap.dedent("""
            import atexit, json, os, pathlib
            import torch
            import torch.distributed as dist

            rank = int(os.environ["RANK"])
            atexit.register(pathlib.Path(f"exited-{rank}").touch)
            host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
            for how in ({}, {"init_method": f"tcp://{host}:{port}", "rank": rank, "world_size": 2}):
                dist.init_process_group(**how)
                dist.monitored_barrier() if dist.get_backend() == "gloo" else dist.barrier()
                halves = [dist.new_group([0]), dist.new_group([1])]
                both = torch.ones(2)
                dist.all_reduce(both)
                dist.all_reduce(both, group=halves[rank])
                objects = [None, None]
                dist.all_gather_object(objects, rank)
                kind = type(dist.group.WORLD).__name__
                dist.destroy_process_group()
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
                     "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
            found = {"objects": objects, "sum": both.tolist(), "kind": kind}
            found["launched"] = dist.is_torchelastic_launched()
            found |= {name: os.environ[name] for name in names}
            pathlib.Path(f"found-{rank}.json").write_text(json.dumps(found))
        """)
    )
    done = run(path, "--max-failures", "4")
    assert done.code == 0, done.err
    for rank in range(2):
        assert json.loads((tmp_path / f"found-{rank}.json").read_text()) == {
            "objects": [0, 1], "sum": [2.0, 2.0], "kind": "SynclineGroup", "launched": True,
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "4",
        }  # fmt: skip
        assert (tmp_path / f"exited-{rank}").exists(), "what a script registers with atexit is run"


def test_when_a_worker_is_killed_all_restart_and_continue_from_the_scripts_checkpoint(script, tmp_path):
    done = run(script, "--", "kill")
    assert done.code == 0, done.err
    assert "started at epoch 1, restart 1" in done.out
    assert "trained" in done.out
    (failure,) = events(tmp_path, WorkerFailure)
    assert (failure.worker_id, failure.restarts_all) == (1, True)
    assert "SIGKILL" in failure.cause
    assert [trains.restarts for trains in events(tmp_path, GroupTrains)] == [0, 1]
    assert same_bits(torch.load(tmp_path / "trained.pt"), reference(script, tmp_path / "reference"))


def test_on_worker_failure_stop_ends_the_script(script, tmp_path):
    done = run(script, "--on-worker-failure", "stop", "--", "kill")
    assert done.code == 1
    assert "Worker 1 was killed by SIGKILL" in done.err
    assert "syncline resume runs/run" in done.err
    assert not (tmp_path / "trained.pt").exists()


def test_an_exception_that_comes_again_after_the_restart_ends_the_script_with_its_traceback(script, tmp_path):
    done = run(script, "--", "raise")
    assert done.code == 1
    assert "Worker 1 raised ZeroDivisionError: the user's own mistake" in done.err
    assert 'raise ZeroDivisionError("the user' in done.err
    assert [trains.restarts for trains in events(tmp_path, GroupTrains)] == [0, 1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_script_which_resume_starts_again(script, tmp_path, number):
    words = warm_process().words(
        "-m", "syncline.cli.main", "run", "train.py", "--workers", "2", "--name", "run", "--", "wait"
    )
    process = subprocess.Popen(
        words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    while (line := process.stdout.readline()) != "waiting\n":
        assert line, process.communicate()
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert "Stopped the script" in err
    assert "syncline resume runs/run" in err
    (tmp_path / "fault").touch()
    done = command("resume", "runs/run", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "started at epoch 1" in done.out
    assert (tmp_path / "trained.pt").exists()


def test_the_audit_says_that_such_a_script_has_no_ledger_and_the_report_works(script, tmp_path):
    assert run(script).code == 0
    audited = command("audit", "runs/run", cwd=tmp_path)
    assert audited.code == 1
    assert "trains with torch.distributed itself" in audited.err
    reported = command("report", "runs/run", "--out", "report.html", cwd=tmp_path)
    assert reported.code == 0, reported.err
    assert "torch.distributed" in (tmp_path / "report.html").read_text()


def test_a_worker_that_fails_before_its_script_has_created_a_group_does_not_confuse_the_others(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        textwrap.dedent("""
            import os, pathlib, signal, time
            import torch
            import torch.distributed as dist

            if os.environ["RANK"] == "1" and not pathlib.Path("fault").exists():
                pathlib.Path("fault").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            while not pathlib.Path("fault").exists():
                time.sleep(0.01)
            dist.init_process_group()
            total = torch.ones(1)
            dist.all_reduce(total)
            print("the sum is", float(total), flush=True)
        """)
    )
    done = run(path)
    assert done.code == 0, done.err
    assert "the sum is 2.0" in done.out


def test_a_failure_after_another_worker_has_finished_restarts_that_one_too(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        textwrap.dedent("""
            import os, pathlib, signal, time
            import torch.distributed as dist

            dist.init_process_group("gloo")
            dist.barrier()
            if dist.get_rank() == 0:
                print("finished, restart", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
            elif not pathlib.Path("fault").exists():
                pathlib.Path("fault").touch()
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    done = run(path)
    assert done.code == 0, done.err
    assert "finished, restart 0" in done.out
    assert "finished, restart 1" in done.out


def test_without_a_group_and_without_prepare_the_script_is_told_what_to_do(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import os\nassert os.environ['RANK']\n")
    done = run(path)
    assert done.code == 1
    assert "worker.prepare" in done.err
    assert "torchrun" in done.err
