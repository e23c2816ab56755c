"""Ray Train's TorchTrainer on gloo: Ray starts its own node and workers, all on loopback."""

import json
import tempfile
from pathlib import Path

import ray
import ray.train
from peer_protocol import arguments, print_event, timed
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch_lenet import batches, lenet, sgd, trains


def train(config):
    asked, report_file = config["asked"], Path(config["report_file"])
    rank = ray.train.get_context().get_world_rank()
    model = prepare_model(lenet())
    step = trains(model, sgd(model), batches(rank, asked.batch))
    # Ray prefixes what workers print, so the events go through a file.
    timed(
        step,
        asked,
        rank=rank,
        version=ray.__version__,
        report=lambda **event: report_file.write_text(json.dumps(event)),
    )


if __name__ == "__main__":
    asked = arguments()
    # One more CPU than the workers need, so that nothing of Ray itself waits for one.
    ray.init(num_cpus=asked.workers + 1, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory(prefix="syncline-ray-") as folder:
        report_file = Path(folder, "report.json")
        TorchTrainer(
            train,
            train_loop_config={"asked": asked, "report_file": str(report_file)},
            scaling_config=ray.train.ScalingConfig(num_workers=asked.workers),
            run_config=ray.train.RunConfig(storage_path=folder),
            torch_config=TorchConfig(backend="gloo"),
        ).fit()
        print_event(**json.loads(report_file.read_text()))
    ray.shutdown()
