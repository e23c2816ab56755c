"""A user's own loop on an IterableDataset: every worker reads the stream and keeps its part."""

from __future__ import annotations

from own_loop_scripts import HEAD, NET, SGD
from real_runs import Ran, final_state, relative_difference, same_bits
from real_runs import syncline as command
from script_runs import assert_clean, run

STREAM = (
    HEAD
    + NET
    + SGD
    + """
from torch.utils.data import IterableDataset, get_worker_info

class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        order = torch.arange(103)[info.id :: info.num_workers] if info else torch.randperm(103)
        for i in order.tolist():
            yield inputs[i] + 0.1 * torch.randn(12), targets[i]

loader = DataLoader(Stream(), batch_size=10, num_workers=LOADERS)
model, optimizer, batches = worker.prepare(model, optimizer, loader)
tests = worker.prepare(DataLoader(Stream(), batch_size=25))
for epoch in worker.epochs(2):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
with torch.no_grad():
    seen = [x[:, 0] for x, _ in tests]
everything = worker.gather(torch.cat(seen) if seen else torch.zeros(0))
worker.print("evaluated", len(everything), f"mean {everything.mean():.6f}")
"""
)
RANDOM = STREAM.replace("LOADERS", "0")
"""Shuffled by the dataset, and of unknown length."""


def evaluated(done: Ran) -> str:
    (line,) = [line for line in done.out.splitlines() if line.startswith("evaluated")]
    return line


def test_a_random_stream_trains_the_same_with_any_number_of_workers_and_after_kills(tmp_path):
    one = run(tmp_path, RANDOM, "one", workers=1)
    whole = run(tmp_path, RANDOM, "whole")
    faults = "kill worker 1 at step 4; kill worker 0 at step 11"
    killed = run(tmp_path, RANDOM, "killed", "--on-worker-failure", "replace-only", faults=faults)
    assert killed.out.count("was killed by SIGKILL") == 2
    models = {name: final_state(tmp_path / "runs" / name)["model"] for name in ("one", "whole", "killed")}
    assert relative_difference(models["one"], models["whole"]) < 1e-5
    assert same_bits(models["whole"], models["killed"])
    assert evaluated(one) == evaluated(whole) == evaluated(killed)
    assert "evaluated 103" in evaluated(whole)
    for name in models:
        assert_clean(tmp_path, name, epochs=2)


def test_survivors_share_the_rest_of_a_stream_that_loader_processes_read(tmp_path):
    script = STREAM.replace("LOADERS", "2")
    done = run(tmp_path, script, "killed", faults="kill worker 1 at step 3; kill worker 2 at step 10")
    assert done.out.count("was killed by SIGKILL") == 2, done.out
    assert_clean(tmp_path, "killed", epochs=2)


def test_an_interrupted_stream_resumes_at_the_exact_sample(tmp_path):
    run(tmp_path, RANDOM, "whole", workers=2)
    settings = ("--on-worker-failure", "stop", "--checkpoint-every-steps", "4")
    run(tmp_path, RANDOM, "stopped", *settings, workers=2, faults="kill worker 1 at step 14", code=1)
    done = command("resume", "runs/stopped", cwd=tmp_path)
    assert done.code == 0, done.err
    assert_clean(tmp_path, "stopped", epochs=2)
    models = [final_state(tmp_path / "runs" / name)["model"] for name in ("whole", "stopped")]
    assert same_bits(*models)


def test_workers_that_read_different_streams_are_stopped_with_the_cause(tmp_path):
    unseeded = "order = torch.randperm(103, generator=torch.Generator().manual_seed(os.getpid()))"
    script = RANDOM.replace(
        "order = torch.arange(103)[info.id :: info.num_workers] if info else torch.randperm(103)", unseeded
    )
    done = run(tmp_path, script, "different", workers=2, code=1)
    assert "read different samples" in done.err
    assert "step" in done.err
