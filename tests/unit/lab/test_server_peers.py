"""Other servers in `syncline bench serve`: adapters that take no time, none of which needs another package."""

from __future__ import annotations

import os
import sys
import urllib.request
from pathlib import Path

import pytest

from syncline.errors import SynclineError
from syncline.lab.bench.harness import Contender, Suite, measure
from syncline.lab.bench.peer_recipes import PeerFramework
from syncline.lab.bench.report import Report, as_dict, as_lines, as_markdown
from syncline.lab.bench.server_peers import cpu_s, found_servers, started
from syncline.lab.machine import BenchMachine

CORE = min(os.sched_getaffinity(0))
ADAPTER = """
import http.server, os, subprocess, sys
class Answers(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])) + self.path.encode() + os.environ["WHAT"].encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
other = subprocess.Popen([sys.executable, "-c", "import time\\nsum(range(10**6)); time.sleep(60)"])
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""


def peer(folder: Path, adapter: str) -> PeerFramework:
    (folder / "adapter.py").write_text(adapter)
    return PeerFramework(
        key="fake", folder=folder, name="Fake", what="What it is.", start=("{python}", "{adapter}", "{port}"),
        environment={"WHAT": "{model}"}, path="/ask/{model}",
    )  # fmt: skip


def test_another_server_is_started_counted_with_all_its_processes_and_ended(tmp_path):
    fake = peer(tmp_path, ADAPTER)
    with started(fake, Path(sys.executable), Path("/models/lenet.onnx"), b"{}", CORE) as server:
        request = urllib.request.Request(f"http://127.0.0.1:{server.port}{server.path}", b"[1]")
        with urllib.request.urlopen(request, timeout=10) as response:
            assert response.read() == b"[1]/ask/lenet/models/lenet.onnx"
        pids = server.pids()
        assert len(pids) == 2
        assert {tuple(os.sched_getaffinity(pid)) for pid in pids} == {(CORE,)}
        assert cpu_s(pids) > max(cpu_s([pid]) for pid in pids) > 0
    assert server.pids() == []


def test_a_server_that_does_not_start_says_why(tmp_path):
    broken = peer(tmp_path, "raise SystemExit('no such model')")
    with (
        pytest.raises(SynclineError, match="no such model"),
        started(broken, Path(sys.executable), Path("m.onnx"), b"{}", CORE),
    ):
        pass


def test_a_server_that_is_not_installed_is_a_row_that_says_how_to_get_it(tmp_path):
    installed, missing = found_servers(tmp_path)
    assert installed == []
    assert len(missing) == 4
    assert missing["MLServer, JSON"] == "not installed: syncline bench serve --install mlserver"
    one = Contender(name="ours", measure=lambda: 1.0)
    suite = Suite(name="s", measures="m", unit="us", contenders=(one,), baseline="ours", missing=missing)
    report = Report(BenchMachine.here(), is_quick=True, results=[measure(suite, 1)])
    for shown in ("\n".join(as_lines(report)), as_markdown(report)):
        (row,) = [line for line in shown.splitlines() if "MLServer" in line]
        assert "syncline bench serve --install mlserver" in row
    assert as_dict(report)["suites"][0]["missing"] == missing
