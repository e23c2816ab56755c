"""Training with DistributedDataParallel that resumes from its newest checkpoint. Started and restarted by torchrun.

    recovery_ddp.py SAMPLES BATCH FOLDER

It trains endlessly with a global batch of BATCH samples. FOLDER holds `checkpoint.pt` and, in `steps`, one file per
process, `RESTARTS-RANK-PID`, to which that process appends a line `TIME STEP` after every step. Only necessary modules
are imported: others would prolong the restarts.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_CHECKPOINT_EVERY_S = 1.0
LR, MOMENTUM = 0.01, 0.9


def mlp() -> nn.Module:
    """The zoo's `mlp` for 784 inputs and 10 classes."""
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


def main(samples: Path, batch: int, folder: Path) -> None:
    """Train on this rank's share of each batch; rank 0 saves once per second."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs, targets = torch.load(samples, mmap=True)
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    checkpoint, step = folder / "checkpoint.pt", 0
    if checkpoint.exists():  # rank 0 writes the next one only after a common step
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    replica = DistributedDataParallel(model)
    batches = len(inputs) // batch
    order, saved_at = torch.empty(0), time.monotonic()
    name = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{rank}-{os.getpid()}"
    with (folder / "steps" / name).open("wb", buffering=0) as steps:
        while True:
            epoch, number = divmod(step, batches)
            if number == 0 or not len(order):
                order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(epoch))
            share = order[number * batch : (number + 1) * batch][rank::size]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(replica(inputs[share]), targets[share])
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
            optimizer.step()
            step += 1
            steps.write(f"{time.time()!r} {step}\n".encode())
            if rank == 0 and time.monotonic() - saved_at >= _CHECKPOINT_EVERY_S:
                saved_at = time.monotonic()
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, folder / "checkpoint.tmp")
                os.replace(folder / "checkpoint.tmp", checkpoint)  # atomic


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
