"""BentoML around the ONNX file in $BENCH_MODEL. Not here: measuring it (`syncline bench serve`)."""

import os

import bentoml
import numpy as np
import onnxruntime


@bentoml.service(workers=1, metrics={"enabled": False}, logging={"access": {"enabled": False}})
class OnnxModel:
    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(os.environ["BENCH_MODEL"], options)

    @bentoml.api
    def predict(self, inputs: list[dict], outputs: list[dict]) -> dict:
        (tensor,), (asked,) = inputs, outputs
        x = np.asarray(tensor["data"], np.uint8).reshape(tensor["shape"])
        found = self._session.run([asked["name"]], {"input": x})[0]
        return {"outputs": [{"name": asked["name"], "data": found.ravel().tolist()}]}
