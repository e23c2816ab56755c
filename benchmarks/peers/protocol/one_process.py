"""The training of the torch-based peers in one process: what `syncline survey` compares their lines with."""

import torch
from peer_protocol import arguments, timed
from torch_lenet import batches, lenet, sgd, trains

asked = arguments()
model = lenet()
timed(trains(model, sgd(model), batches(0, asked.batch)), asked, rank=0, version=torch.__version__)
