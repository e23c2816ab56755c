"""torch's FSDP2, applied to each layer by hand: twelve linear layers on random numbers, for torchrun.

    layouts_fsdp.py RESULT STEPS

Rank 0 writes to RESULT the median time of STEPS steps, in milliseconds.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

BATCH, WIDTH, LAYERS = 64, 256, 12
"""Samples per step over all ranks, and the shape of the network."""
_WARM_UP = 5


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))


def main(result: Path, steps: int) -> None:
    """Train, and write the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model, mesh = layers(), init_device_mesh("cpu", (size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    inputs = torch.randn(BATCH // size, WIDTH)
    seconds = []
    for _ in range(_WARM_UP + steps):
        started = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        result.write_text(repr(1e3 * statistics.median(seconds[_WARM_UP:])))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
