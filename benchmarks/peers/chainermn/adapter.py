"""ChainerMN with its naive communicator. Started by mpirun."""

import chainer
import chainer.functions as F  # as all of Chainer's examples have it
import chainer.links as L
import chainermn
import numpy as np
from peer_protocol import CLASSES, LR, MOMENTUM, arguments, samples, timed


class LeNet(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.conv1 = L.Convolution2D(1, 6, 5, pad=2)
            self.conv2 = L.Convolution2D(6, 16, 5)
            self.fc1 = L.Linear(400, 120)
            self.fc2 = L.Linear(120, 84)
            self.fc3 = L.Linear(84, CLASSES)

    def forward(self, x):
        x = F.max_pooling_2d(F.relu(self.conv1(x)), 2)
        x = F.max_pooling_2d(F.relu(self.conv2(x)), 2)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


asked = arguments()
communicator = chainermn.create_communicator("naive")
assert communicator.size == asked.workers, f"ChainerMN has {communicator.size} processes"
np.random.seed(0)
model = LeNet()
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.MomentumSGD(LR, MOMENTUM), communicator)
optimizer.setup(model)
images, labels = samples(communicator.rank, asked.batch)
labels = labels.astype(np.int32)


def step(number):
    model.cleargrads()
    F.softmax_cross_entropy(model(images[number]), labels[number]).backward()
    optimizer.update()


timed(step, asked, rank=communicator.rank, version=chainer.__version__)
