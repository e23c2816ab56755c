"""Whether other servers give the answers that ours gives, for the same ONNX file; and kserve's clients against ours.

agree.py [MODEL.onnx]: exits with 1 if one differs. Servers and clients that are not installed are named and left out;
README.md says how to install them. Not here: speed (`syncline bench serve`).
"""

import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import numpy as np

import syncline
from syncline.lab.bench.peer_recipes import environments_folder
from syncline.lab.bench.server_peers import found_servers, started
from syncline.serving.serve import ModelServer

COUNT = 50
TOLERANCE = 1e-5
"""ONNX Runtime of another build, as Triton's environment may have, rounds differently in the last bits."""
IMAGES = np.random.default_rng(1).integers(0, 256, (COUNT, 1, 1, 28, 28), np.uint8)


def body(image: np.ndarray) -> bytes:
    tensor = {"name": "input", "shape": image.shape, "datatype": "UINT8", "data": image.ravel().tolist()}
    return json.dumps({"inputs": [tensor], "outputs": [{"name": "logits"}]}).encode()


def answers(url: str) -> np.ndarray:
    found = []
    for image in IMAGES:
        request = urllib.request.Request(url, body(image), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as response:
            found.append(json.loads(response.read())["outputs"][0]["data"])
    return np.array(found)


def check_servers(model: Path, ours: np.ndarray) -> bool:
    installed, missing = found_servers(None)
    for name, reason in missing.items():
        print(f"{name}: {reason}")
    is_equal = True
    for peer, python in installed:
        with started(peer, python, model, body(IMAGES[0]), core=0) as server:
            other = answers(f"http://127.0.0.1:{server.port}{server.path}")
        difference = float(np.abs(other - ours).max())
        is_equal = is_equal and other.shape == ours.shape and difference <= TOLERANCE
        print(f"{peer.name}: {COUNT} answers, largest difference {difference:.1e}")
    return is_equal


def check_kserve(server: ModelServer, model: str) -> bool:
    python = environments_folder(None) / "kserve" / "bin" / "python"
    if not python.exists():
        print(
            f"kserve's clients: not installed: python3.11 -m venv {python.parents[1]}; {python} -m pip install kserve"
        )
        return True
    script = Path(__file__).parent / "clients" / "kserve_client.py"
    ports = [str(server.port), str(server.grpc_port)]
    return subprocess.run([str(python), str(script), *ports, model], timeout=300).returncode == 0


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "lenet.onnx"
        if len(sys.argv) == 1:
            # A process of its own: torch would take the folder `triton` beside this script for the package.
            subprocess.run([sys.executable, "-m", "syncline", "export", "lenet", "--out", model], check=True)
        with syncline.serve(model, token=False, grpc=True) as server:
            ours = answers(f"{server.url}/v2/models/{model.stem}/infer")
            is_kserve_right = check_kserve(server, model.stem)
        return 0 if check_servers(model, ours) and is_kserve_right else 1


if __name__ == "__main__":
    sys.exit(main())
