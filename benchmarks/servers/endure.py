"""What the server and batch scoring promise when things go wrong, at full size: the gate has smaller versions.

endure.py [reloads] [memory] [kills] [rows]: by default all of them, some minutes together. Exits with 1 if a promise is
broken. Not here: overload and slow clients (`syncline bench serve-load`), other servers (`agree.py`).
"""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
from onnx import TensorProto, helper, numpy_helper

import syncline

REQUESTS, RELOADS, CLIENTS = 10_000, 20, 4
MEMORY_RELOADS = 1000
KILLS = 10
ROWS, FILES = 1_000_000, 8
WAIT_S = 60.0


def adds(path: Path, number: float) -> Path:
    """`y = x + number`: an answer shows which version gave it."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy"]
    weights = [numpy_helper.from_array(np.float32(number), "c")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "c"], ["y"])], "g", tensors[:1], tensors[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


class Client:
    """One connection, opened again if the server closed it."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)

    def infer(self, number: float) -> tuple[int, str, list[float]]:
        """(status, version, values)."""
        tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [number] * 4}
        self.connection.request("POST", "/v2/models/m/infer", json.dumps({"inputs": [tensor]}))
        response = self.connection.getresponse()
        answer = json.loads(response.read())
        values = answer["outputs"][0]["data"] if response.status == 200 else []
        return response.status, answer.get("model_version", ""), values


def reloads(folder: Path) -> bool:
    """Requests while the file is replaced and loaded again: none lost, none failed, none of two versions."""
    path = adds(folder / "m.onnx", 1000.0)
    each = REQUESTS // CLIENTS
    asked = threading.Semaphore(0)

    def ask(port: int) -> list[bool]:
        client, right = Client(port), []
        for k in range(each):
            status, version, values = client.infer(float(k))
            right.append(status == 200 and values == [1000.0 * int(version) + k] * 4)
            seen.add(version)
            asked.release()
        return right

    seen: set[str] = set()
    with syncline.serve(path, token=False, processes=2) as server, ThreadPoolExecutor(CLIENTS) as pool:
        asking = [pool.submit(ask, server.port) for _ in range(CLIENTS)]
        for version in range(2, RELOADS + 2):
            for _ in range(REQUESTS // (RELOADS + 2)):  # spread over the requests, however quick the machine is
                asked.acquire()
            adds(path, 1000.0 * version)
            server.reload()
        answers = [one for found in asking for one in found.result()]
    print(f"reloads: {len(answers)} requests, {answers.count(False)} lost, failed or mixed; {len(seen)} versions seen")
    return all(answers) and len(answers) == each * CLIENTS and len(seen) > RELOADS / 2


def memory(folder: Path) -> bool:
    """Memory of a server process after many reloads, compared with after a tenth of them."""
    path = adds(folder / "m.onnx", 1.0)
    with syncline.serve(path, token=False) as server:
        (pid,) = server.pids()

        def after(count: int) -> int:
            for _ in range(count):
                server.reload()
            return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])

        first = after(MEMORY_RELOADS // 10)
        last = after(MEMORY_RELOADS - MEMORY_RELOADS // 10)
    print(f"memory: {first:,} kB after {MEMORY_RELOADS // 10} reloads, {last:,} kB after {MEMORY_RELOADS}")
    return last - first < 0.05 * first


def processes_that_answer(port: int) -> int:
    """Those with the model loaded: only they send their metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as response:
        return response.read().count(b"\nsyncline_connections{")


def kills(folder: Path) -> bool:
    """`kill -9` of one of two processes under load: what it costs, and when its replacement runs."""
    path, stop = adds(folder / "m.onnx", 1.0), threading.Event()
    lost, answered, taken = [], [], []

    def ask(port: int) -> None:
        client = Client(port)
        while not stop.is_set():
            try:
                answered.append(client.infer(1.0)[0] == 200)
            except (OSError, http.client.HTTPException):
                lost.append(1)
                client = Client(port)

    with syncline.serve(path, token=False, processes=2) as server, ThreadPoolExecutor(CLIENTS) as pool:
        for _ in range(CLIENTS):
            pool.submit(ask, server.port)
        try:
            for _ in range(KILLS):
                before = server.pids()
                os.kill(before[0], signal.SIGKILL)
                start = time.monotonic()
                while set(server.pids()) <= set(before) or processes_that_answer(server.port) < 2:
                    time.sleep(0.005)
                taken.append(time.monotonic() - start)
                time.sleep(0.5)
        finally:
            stop.set()
    print(
        f"kills: {KILLS} processes, {len(answered)} requests answered, {len(lost)} lost with {CLIENTS} in flight at a "
        f"time; its replacement answered within {max(taken):.2f} s"
    )
    return all(answered) and len(lost) <= CLIENTS * KILLS and max(taken) < 0.5


def rows(folder: Path) -> bool:
    """Rows in Parquet, scored by a command that is killed in the middle, and by the same command again."""
    # A process of its own: beside this script there is a folder `triton`, which torch would take for the package.
    syncline_command = [sys.executable, "-m", "syncline"]
    subprocess.run([*syncline_command, "export", "lenet", "--out", folder / "lenet.onnx"], check=True)
    pixels, each = np.random.default_rng(0).integers(0, 256, (1000, 784), np.uint8), ROWS // FILES
    (folder / "data").mkdir()
    for k in range(FILES):
        values = pa.array(np.tile(pixels, (each // 1000, 1)).ravel())
        images = pa.FixedSizeListArray.from_arrays(values, 784)
        table = pa.table({"id": np.arange(k * each, (k + 1) * each), "image": images})
        pq.write_table(table, folder / f"data/{k}.parquet")
    out = folder / "scores"
    command = [*syncline_command, "predict", folder / "lenet.onnx", "--data", folder / "data", "--out", out]
    first = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while first.poll() is None and len(list(out.glob("**/*.parquet"))) < ROWS // 50_000 // 2:
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    there = sum(pq.read_metadata(file).num_rows for file in out.glob("**/*.parquet"))
    again = subprocess.run(command, capture_output=True, text=True)
    ids = np.sort(pq.read_table(out, columns=["id"])["id"].to_numpy())
    once = np.array_equal(ids, np.arange(ROWS))
    print(
        f"rows: {there:,} of {ROWS:,} were there when it was killed; then each once: {once}\n  {again.stdout.strip()}"
    )
    return once and 0 < there < ROWS and again.returncode == 0


def main() -> int:
    checks = {"reloads": reloads, "memory": memory, "kills": kills, "rows": rows}
    kept = True
    for name in sys.argv[1:] or checks:
        with tempfile.TemporaryDirectory(prefix="syncline-endure-") as folder:
            kept = checks[name](Path(folder)) and kept
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
