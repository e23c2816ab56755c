"""The same LeNet-5 and samples as everybody's, as a task for `syncline train task.py:task`."""

import os

import torch
from peer_protocol import CLASSES, LR, MOMENTUM
from torch_lenet import lenet

import syncline

count = int(os.environ["PEER_SAMPLES"])
generator = torch.Generator().manual_seed(0)
images = torch.randn(count, 1, 28, 28, generator=generator)
labels = torch.randint(CLASSES, (count,), generator=generator)
task = syncline.Task(model=lenet, data=(images, labels), optimizer=syncline.sgd(lr=LR, momentum=MOMENTUM))
