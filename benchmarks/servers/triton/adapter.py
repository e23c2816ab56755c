"""Triton around one ONNX file: adapter.py MODEL PORT. Not here: measuring it (`syncline bench serve`)."""

import os
import socket
import sys
import sysconfig
from pathlib import Path

import numpy as np
import onnxruntime
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def main(model: str, port: str) -> None:
    # Triton runs `run` in a program of its own, which loads this Python as a shared library.
    os.environ["LD_LIBRARY_PATH"] = sysconfig.get_config_var("LIBDIR")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options)

    @batch
    def run(input: np.ndarray) -> dict[str, np.ndarray]:
        return {"logits": session.run(["logits"], {"input": input})[0]}

    config = TritonConfig(
        http_address="127.0.0.1", http_port=int(port), grpc_address="127.0.0.1", grpc_port=free_port(),
        allow_metrics=False,
    )  # fmt: skip
    with Triton(config=config) as triton:
        triton.bind(
            Path(model).stem, run, [Tensor(name="input", dtype=np.uint8, shape=(1, 28, 28))],
            [Tensor(name="logits", dtype=np.float32, shape=(10,))], config=ModelConfig(max_batch_size=8),
        )  # fmt: skip
        triton.serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
