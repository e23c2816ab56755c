"""torchft: replica groups of one process each, with a lighthouse in this script, on gloo."""

import os
import socket
from datetime import timedelta
from importlib.metadata import version

from peer_protocol import arguments, start_ranks, timed
from torch_lenet import batches, lenet, sgd, trains

_LIMIT = timedelta(seconds=60)


def start(asked):
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind=f"127.0.0.1:{asked.port}", min_replicas=asked.workers, join_timeout_ms=10000, quorum_tick_ms=50
    )
    address = f"http://127.0.0.1:{asked.port}"
    try:
        start_ranks(asked.workers, lambda _: {**os.environ, "TORCHFT_LIGHTHOUSE": address})
    finally:
        lighthouse.shutdown()


def train(asked):
    from torch.distributed import TCPStore
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    with socket.socket() as probe:  # each replica group has a store of its own
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    model = lenet()
    inner = sgd(model)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_LIMIT),
        min_replica_size=asked.workers,
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        rank=0, world_size=1, store_addr="127.0.0.1", store_port=port, replica_id=f"replica_{asked.rank}",
        hostname="127.0.0.1", timeout=_LIMIT,
    )  # fmt: skip
    replica = DistributedDataParallel(manager, model)
    step = trains(replica, Optimizer(manager, inner), batches(asked.rank, asked.batch))
    timed(step, asked, rank=asked.rank, version=version("torchft"))
    manager.shutdown()
    del store


if __name__ == "__main__":
    asked = arguments()
    if asked.rank is None:
        start(asked)
    else:
        train(asked)
