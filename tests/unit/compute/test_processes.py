"""Processes end with the one that has started them, also if that ended before they could ask for it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

ORPHAN = """
import multiprocessing, os, sys
from syncline.compute.processes import die_with_starter

def work(parent, pipe):
    while os.getppid() == parent:  # until it is gone
        pass
    die_with_starter()
    os.write(pipe, b"still here")

if __name__ == "__main__":
    multiprocessing.get_context("fork").Process(target=work, args=(os.getpid(), int(sys.argv[1]))).start()
    os._exit(0)
"""


def test_a_process_whose_starter_has_ended_before_ends_too():
    reads, writes = os.pipe()
    subprocess.run(
        [sys.executable, "-c", ORPHAN, str(writes)], pass_fds=[writes], cwd=Path(__file__).parents[3], timeout=30
    )
    os.close(writes)
    assert select.select([reads], [], [], 20)[0], "the last process that could write has ended"
    assert os.read(reads, 100) == b""
    os.close(reads)
