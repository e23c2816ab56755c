"""Writing without the system's cache: the same bytes, whatever the sizes of the writes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from syncline.checkpoint import direct_writer
from syncline.checkpoint.direct_writer import DirectWriter


def written(path: Path, parts: list[bytes]) -> bytes:
    with path.open("wb") as file:
        writer = DirectWriter(file)
        for part in parts:
            assert writer.write(part) == len(part)
        writer.finish()
    return path.read_bytes()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(0, 3 * 8192 + 5), max_size=8))
def test_what_is_written_is_what_is_read(tmp_path, sizes):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(direct_writer, "_BUFFER_BYTES", 8192)
        parts = [os.urandom(size) for size in sizes]
        assert written(tmp_path / "file", parts) == b"".join(parts)


def test_a_file_system_that_refuses_such_writes_is_written_as_usual(tmp_path, monkeypatch):
    write = os.write
    refusals = iter([OSError(errno.EINVAL, "Invalid argument")])

    def refuse(descriptor: int, data: memoryview) -> int:
        for error in refusals:
            raise error
        return write(descriptor, data)

    monkeypatch.setattr(direct_writer.os, "write", refuse)
    assert written(tmp_path / "file", [b"x" * 10_000]) == b"x" * 10_000
