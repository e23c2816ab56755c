"""Hugging Face Accelerate on gloo. Started by torchrun."""

import accelerate
from peer_protocol import arguments, timed
from torch_lenet import batches, lenet, sgd, trains

asked = arguments()
accelerator = accelerate.Accelerator(cpu=True)
assert accelerator.num_processes == asked.workers, f"Accelerate has {accelerator.num_processes} processes"
rank = accelerator.process_index
model = lenet()
model, optimizer = accelerator.prepare(model, sgd(model))
step = trains(model, optimizer, batches(rank, asked.batch), backward=accelerator.backward)
timed(step, asked, rank=rank, version=accelerate.__version__)
accelerator.end_training()
