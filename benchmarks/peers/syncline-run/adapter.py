"""A training loop of one's own on Syncline. Started by `syncline run`."""

import torch
from peer_protocol import CLASSES, arguments, timed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_lenet import lenet, sgd

import syncline

asked = arguments()
all_images = asked.batch * asked.workers  # in one step
count = all_images * (asked.warm_up + asked.steps)
worker = syncline.worker()
model = lenet()
data = TensorDataset(torch.randn(count, 1, 28, 28), torch.randint(CLASSES, (count,)))
model, optimizer, loader = worker.prepare(model, sgd(model), DataLoader(data, batch_size=all_images, shuffle=True))
batches = iter(loader)


def step(_):
    images, labels = next(batches)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()


timed(step, asked, rank=worker.rank, version=syncline.__version__)
