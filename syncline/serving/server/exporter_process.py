"""The process that makes ONNX files of runs for the server, and follows runs that are still training.

Here: reading requests from stdin, watching checkpoints, and answering on stdout, one JSON line each. A file is made of
a checkpoint whose checksum is right, so never of one that is being written. Not here: the export (`exporting/`), and
new weights in a graph that was exported before (`reweigh.py`).
"""

from __future__ import annotations

import os
import select
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from syncline.boundary import as_expected
from syncline.serving.server.exporter import Ask, Exported, ExportFailed, Follow
from syncline.serving.server.reweigh import RunExporter

__all__ = ["main"]

_POLL_S = 0.1
_requests: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Ask | Follow)


class ExporterProcess:
    """The requests, and the runs that are followed with the last step of each."""

    def __init__(self, send: Callable[[Exported | ExportFailed], None]) -> None:
        self._send = send
        self._runs: dict[str, RunExporter] = {}
        self._steps: dict[str, int | None] = {}
        self._folder = Path()
        self._made = 0
        self._failed: set[tuple[str, int]] = set()

    @property
    def is_following(self) -> bool:
        return bool(self._steps)

    def on_request(self, request: Ask | Follow) -> None:
        if isinstance(request, Follow):
            self._folder = Path(request.folder)
            self._steps = {what: self._run(what).last_step for what in request.runs}
            return
        self._answer(request.number, request.what, Path(request.folder))

    def look(self) -> None:
        """Export the newest checkpoints of the runs that are followed, if they are new."""
        for what, before in self._steps.items():
            step = self._run(what).newest_step()
            if step is None or step == before or (what, step) in self._failed:
                continue
            self._made += 1
            if self._answer(0, what, self._folder / f"followed-{self._made}"):
                self._steps[what] = self._run(what).last_step
            else:
                self._failed.add((what, step))

    def _run(self, what: str) -> RunExporter:
        if what not in self._runs:
            self._runs[what] = RunExporter(what)
        return self._runs[what]

    def _answer(self, number: int, what: str, folder: Path) -> bool:
        try:
            folder.mkdir(parents=True)
            path = self._run(what).export(folder)
        except Exception as error:  # the server continues with what it has, and reports this
            shutil.rmtree(folder, ignore_errors=True)
            known = as_expected(error)
            self._send(ExportFailed(number, what, str(known) if known else f"{type(error).__name__}: {error}"))
            return False
        run = self._run(what)
        self._send(Exported(number, what, str(path), run.last_step, run.note))
        return True


def main() -> None:
    """Work until stdin is closed."""
    output = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    warnings.simplefilter("ignore")

    def send(message: Exported | ExportFailed) -> None:
        os.write(output, msgspec.json.encode(message) + b"\n")

    process, partial = ExporterProcess(send), b""
    while True:
        is_there, _, _ = select.select([0], [], [], _POLL_S if process.is_following else None)
        if is_there:
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, partial = (partial + data).split(b"\n")
            for line in lines:
                process.on_request(_requests.decode(line))
        process.look()


if __name__ == "__main__":
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's; it closes our input
    main()
    os._exit(0)  # at once: torch takes seconds to tidy up
