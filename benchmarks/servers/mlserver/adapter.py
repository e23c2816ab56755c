"""MLServer around one ONNX file: adapter.py MODEL PORT FOLDER. Not here: measuring it (`syncline bench serve`)."""

import json
import os
import socket
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class OnnxModel(MLModel):
    """The runtime: ONNX Runtime with one thread; outputs that are not asked for are not computed."""

    async def load(self) -> bool:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(self.settings.parameters.uri, options)
        self._types = {one.name: one.type for one in self._session.get_inputs()}
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        inputs = {one.name: NumpyCodec.decode_input(one) for one in payload.inputs}
        names = [one.name for one in payload.outputs or []] or [one.name for one in self._session.get_outputs()]
        found = self._session.run(names, inputs)
        outputs = [NumpyCodec.encode_output(name, np.asarray(one)) for name, one in zip(names, found, strict=True)]
        return InferenceResponse(model_name=self.name, outputs=outputs)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def main(model: str, port: str, folder: str) -> None:
    place = Path(folder) / "mlserver"
    place.mkdir(parents=True, exist_ok=True)
    settings = {
        "host": "127.0.0.1", "http_port": int(port), "grpc_port": free_port(), "metrics_port": free_port(),
        "parallel_workers": 0, "debug": False, "use_structured_logging": False,
    }  # fmt: skip
    (place / "settings.json").write_text(json.dumps(settings))
    name = Path(model).stem
    described = {"name": name, "implementation": "adapter.OnnxModel", "parameters": {"uri": model}}
    (place / "model-settings.json").write_text(json.dumps(described))
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    program = str(Path(sys.executable).parent / "mlserver")
    os.execv(program, [program, "start", str(place)])


if __name__ == "__main__":
    main(*sys.argv[1:])
