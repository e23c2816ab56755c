"""Ray Train's TorchTrainer on gloo: Ray starts its own node and workers, all on loopback."""

import json
import tempfile
from pathlib import Path

import ray
import ray.train
from peer_protocol import arguments, say, timed
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch_lenet import batches, lenet, sgd, trains


def train(config):
    asked, told = config["asked"], Path(config["told"])
    rank = ray.train.get_context().get_world_rank()
    model = prepare_model(lenet())
    step = trains(model, sgd(model), batches(rank, asked.batch))
    # Ray puts a prefix before what workers print, so the events go home through a file.
    timed(step, asked, rank=rank, version=ray.__version__, tell=lambda **event: told.write_text(json.dumps(event)))


if __name__ == "__main__":
    asked = arguments()
    # One more than the workers need: nothing of Ray's own must wait for a processor that is only a number.
    ray.init(num_cpus=asked.workers + 1, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory(prefix="syncline-ray-") as folder:
        told = Path(folder, "told.json")
        TorchTrainer(
            train,
            train_loop_config={"asked": asked, "told": str(told)},
            scaling_config=ray.train.ScalingConfig(num_workers=asked.workers),
            run_config=ray.train.RunConfig(storage_path=folder),
            torch_config=TorchConfig(backend="gloo"),
        ).fit()
        say(**json.loads(told.read_text()))
    ray.shutdown()
