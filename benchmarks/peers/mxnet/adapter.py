"""MXNet's dist_sync: a scheduler, one server and the workers, in processes of their own."""

import os
import subprocess
import sys

from peer_protocol import CLASSES, LR, MOMENTUM, arguments, samples, timed


def start(asked):
    shared = {
        **os.environ,
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(asked.port),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_INTERFACE": "lo",
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": str(asked.workers),
    }
    helpers = [
        subprocess.Popen([sys.executable, "-c", "import mxnet"], env={**shared, "DMLC_ROLE": role})
        for role in ("scheduler", "server")
    ]
    workers = [
        subprocess.Popen([sys.executable, *sys.argv, "--rank", str(rank)], env={**shared, "DMLC_ROLE": "worker"})
        for rank in range(asked.workers)
    ]
    code = max(abs(process.wait()) for process in workers)
    for helper in helpers:
        helper.terminate()
        helper.wait()
    sys.exit(code)


def train(asked):
    import mxnet as mx
    from mxnet import autograd, gluon

    mx.random.seed(0)
    network = gluon.nn.HybridSequential()
    network.add(
        gluon.nn.Conv2D(6, 5, padding=2, activation="relu", in_channels=1),
        gluon.nn.MaxPool2D(2),
        gluon.nn.Conv2D(16, 5, activation="relu", in_channels=6),
        gluon.nn.MaxPool2D(2),
        gluon.nn.Flatten(),
        gluon.nn.Dense(120, activation="relu", in_units=400),
        gluon.nn.Dense(84, activation="relu", in_units=120),
        gluon.nn.Dense(CLASSES, in_units=84),
    )
    network.initialize(mx.init.Xavier())
    network.hybridize(static_alloc=True)
    store = mx.kv.create("dist_sync")
    assert store.num_workers == asked.workers, f"MXNet has {store.num_workers} workers"
    how = {"learning_rate": LR, "momentum": MOMENTUM}
    trainer = gluon.Trainer(network.collect_params(), "sgd", how, kvstore=store)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    images, labels = (mx.nd.array(array) for array in samples(store.rank, asked.batch))

    def step(number):
        with autograd.record():
            loss = loss_of(network(images[number]), labels[number])
        loss.backward()
        trainer.step(asked.batch * asked.workers)

    timed(step, asked, rank=store.rank, version=mx.__version__, finish=mx.nd.waitall)


if __name__ == "__main__":
    asked = arguments()
    if asked.rank is None:
        start(asked)
    else:
        train(asked)
