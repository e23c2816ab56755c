"""One training step with DistributedDataParallel, as in PyTorch's tutorial. Started by torchrun."""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncline.lab.bench.scripts.startup_plain import lenet
from syncline.lab.bench.scripts.startup_samples import BATCH, samples


def main() -> None:
    """Train one step on this rank's share of the batch; rank 0 reports its end."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    share = BATCH // size
    images, labels = (torch.from_numpy(array[rank * share : (rank + 1) * share]) for array in samples())
    torch.manual_seed(0)
    model = DistributedDataParallel(lenet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    optimizer.step()
    if rank == 0:
        done = {"event": "progress", "worker_id": 0, "step": 1, "time": time.time()}
        sys.stdout.write(json.dumps(done) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
