"""LitServe around one ONNX file: adapter.py MODEL PORT. Not here: measuring it (`syncline bench serve`)."""

import sys

import litserve
import numpy as np
import onnxruntime

MODEL = sys.argv[1]


class OnnxModel(litserve.LitAPI):
    def setup(self, device: str) -> None:
        del device
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(MODEL, options)

    def decode_request(self, request: dict) -> np.ndarray:
        (tensor,) = request["inputs"]
        return np.asarray(tensor["data"], np.uint8).reshape(tensor["shape"])

    def predict(self, x: np.ndarray) -> np.ndarray:
        return self._session.run(["logits"], {"input": x})[0]

    def encode_response(self, output: np.ndarray) -> dict:
        return {"outputs": [{"name": "logits", "data": output.ravel().tolist()}]}


if __name__ == "__main__":
    server = litserve.LitServer(OnnxModel(), accelerator="cpu", workers_per_device=1)
    server.run(
        host="127.0.0.1", port=int(sys.argv[2]), num_api_servers=1, log_level="warning", generate_client_file=False
    )
