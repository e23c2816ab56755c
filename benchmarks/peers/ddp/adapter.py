"""Plain DistributedDataParallel on gloo. Started by torchrun."""

import torch
import torch.distributed as dist
from peer_protocol import arguments, timed
from torch.nn.parallel import DistributedDataParallel
from torch_lenet import batches, lenet, sgd, trains

asked = arguments()
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(lenet())
timed(trains(model, sgd(model), batches(rank, asked.batch)), asked, rank=rank, version=torch.__version__)
dist.destroy_process_group()
