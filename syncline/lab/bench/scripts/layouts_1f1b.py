"""torch's own pipeline, 1F1B, by hand: twelve linear layers in two stages on random numbers, for torchrun.

    layouts_1f1b.py RESULT STEPS

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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from syncline.lab.bench.scripts.layouts_fsdp import BATCH, LAYERS, WIDTH, layers

MICRO_BATCHES = 8
_WARM_UP = 5


def main(result: Path, steps: int) -> None:
    """Train, and write the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    whole, per_stage = layers(), LAYERS // size
    module = nn.Sequential(*list(whole)[rank * per_stage : (rank + 1) * per_stage])
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(0))
    seconds = []
    for _ in range(_WARM_UP + steps):
        started = time.perf_counter()
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=inputs)
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        result.write_text(repr(1e3 * statistics.median(seconds[_WARM_UP:])))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
