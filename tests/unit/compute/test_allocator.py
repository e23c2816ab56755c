"""The C library keeps what training frees in every step, unless the user wants it otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Frees and takes 48 MB twenty times, and counts the pages that the system had to give.
FAULTS = """
import resource, torch
from syncline.compute.allocator import keep_memory
keep_memory()
torch.ones(4 * 2**20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    held = [torch.ones(4 * 2**20) for _ in range(3)]
    del held
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_memory_that_is_freed_is_kept_unless_the_user_has_decided_otherwise():
    pages = 3 * 16 * 2**20 // 4096
    assert faults() < 5 * pages
    assert faults(MALLOC_TRIM_THRESHOLD_="0", MALLOC_MMAP_THRESHOLD_="65536") > 10 * pages


# Frees 200 MB in blocks between which others stay.
RELEASES = """
import re, torch
from pathlib import Path
from syncline.compute.allocator import keep_memory, release_freed
def resident():
    return int(re.search(r"VmRSS:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) // 1000
keep_memory()
blocks = [torch.ones(2**18) for _ in range(400)]
kept = blocks[::2]
del blocks
before = resident()
release_freed()
print(before - resident())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_what_start_up_has_freed_is_returned_to_the_system():
    done = subprocess.run([sys.executable, "-c", RELEASES], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) > 150
