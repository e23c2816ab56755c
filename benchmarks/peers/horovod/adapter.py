"""Horovod on gloo. Started by horovodrun."""

import horovod
import horovod.torch as hvd
from peer_protocol import arguments, timed
from torch_lenet import batches, lenet, sgd, trains

asked = arguments()
hvd.init()
assert hvd.size() == asked.workers, f"Horovod has {hvd.size()} processes"
model = lenet()
optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
step = trains(model, optimizer, batches(hvd.rank(), asked.batch))
timed(step, asked, rank=hvd.rank(), version=horovod.__version__)
hvd.shutdown()
