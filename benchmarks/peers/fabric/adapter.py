"""Lightning Fabric with its DDP strategy, on gloo. Started by torchrun."""

import lightning
import torch
from lightning.fabric import Fabric
from peer_protocol import arguments, timed
from torch_lenet import batches, lenet, sgd, trains

asked = arguments()
fabric = Fabric(accelerator="cpu", devices=asked.workers, strategy="ddp")
fabric.launch()
assert fabric.world_size == asked.workers, f"Fabric has {fabric.world_size} processes"
model = lenet()
model, optimizer = fabric.setup(model, sgd(model))
step = trains(model, optimizer, batches(fabric.global_rank, asked.batch), backward=fabric.backward)
timed(step, asked, rank=fabric.global_rank, version=lightning.__version__)
fabric.barrier()
torch.distributed.destroy_process_group()  # Fabric leaves it, and gloo's threads may then abort the process at its end
