"""The runs of one public script: what starts them, and how their results are compared.

Here: commands and their environment. Not here: which runs there are (`check.py`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
LIMIT_S = 240
Script = dict[str, Any]


class Runs:
    """The runs of one script."""

    def __init__(self, script: Script, folder: Path, data: Path) -> None:
        self.script, self.folder = script, folder
        support = [HERE / "support", *([HERE / "support" / "vision"] if script["has_vision"] else [])]
        path = [*map(str, support), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._env = {
            **os.environ, "PYTHONPATH": os.pathsep.join(path), "MNIST": str(data / "mnist"),
            "IMAGES": str(script["images"]), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        if not script["is_distributed"]:  # its workers draw the same numbers as torchrun's
            self._env["WITHOUT_NOISE"] = "1"

    def call(self, name: str, words: list[str], *, sign: bool = False, **env: str) -> tuple[int, str]:
        """Run a command that leaves the result `name`; the exit code, and what it printed."""
        result = self.folder / f"{name}.result"
        extra = {"RESULT": str(result), **env}
        if sign:
            extra |= {"SIGN_AFTER": str(self.script["steps"] // 2), "SIGN": str(self.folder / f"{name}.sign")}
        log = self.folder / f"{name}.log"
        with log.open("a") as output:
            process = subprocess.Popen(
                words, cwd=self.folder, env=self._env | extra, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                if sign:
                    self._interrupt(process, self.folder / f"{name}.sign")
                code = process.wait(LIMIT_S)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        return code, log.read_text()

    def _interrupt(self, process: subprocess.Popen[bytes], sign: Path) -> None:
        end = time.monotonic() + LIMIT_S
        while not sign.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)

    def python(self, name: str, **env: str) -> tuple[int, str]:
        return self.call(name, [sys.executable, self.script["run"], *self._arguments()], **env)

    def torchrun(self, name: str, **env: str) -> tuple[int, str]:
        """Two processes, as `torchrun` starts them."""
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        return self.call(name, [*words, self.script["run"], *self._arguments()], **env)

    def syncline(self, name: str, *options: str, workers: int = 2, sign: bool = False, **env: str) -> tuple[int, str]:
        command = Path(sys.executable).with_name("syncline")
        words = [str(command), "run", self.script["run"], "--workers", str(workers), "--name", name, *options]
        words += ["--threads", "1"]
        return self.call(name, [*words, "--", *self._arguments()], sign=sign, **env)

    def other(self, *words: str, name: str = "other") -> tuple[int, str]:
        return self.call(name, [str(Path(sys.executable).with_name("syncline")), *words])

    def _arguments(self) -> list[str]:
        return list(self.script.get("arguments", []))

    def result(self, name: str) -> dict[str, Any] | None:
        path = self.folder / f"{name}.result"
        return torch.load(path) if path.exists() else None


def difference(a: dict[str, Any] | None, b: dict[str, Any] | None) -> str:
    """The largest difference of any parameter."""
    if a is None or b is None:
        return "NO RESULT"
    pairs = [(x[name], y[name]) for x, y in zip(a["state"], b["state"], strict=True) for name in x]
    if all(torch.equal(x, y) for x, y in pairs):
        return "same bits"
    return f"{max(float((x.double() - y.double()).abs().max()) for x, y in pairs if x.numel()):.0e}"
