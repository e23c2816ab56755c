"""What workers write on a node arrives at the driver completely, however it grows."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.engines.remote import files
from syncline.engines.remote.files import RunFilesCopy, chunks_of, remove, write_chunk
from syncline.engines.remote.messages import FileChunk, FileRemoved

written = st.lists(
    st.one_of(
        st.tuples(st.just("print"), st.integers(0, 2), st.binary(min_size=1, max_size=40)),
        st.tuples(st.just("save"), st.integers(0, 5), st.binary(max_size=40)),
        st.tuples(st.just("drop"), st.integers(0, 5), st.just(b"")),
        st.tuples(st.just("send"), st.just(0), st.just(b"")),
    ),
    max_size=25,
)


@given(written, st.integers(1, 16))
def test_the_drivers_files_become_those_of_the_node(steps: list[tuple[str, int, bytes]], chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(files, "_CHUNK_BYTES", chunk)
        there, here = Path(folder, "there"), Path(folder, "here")
        for each in (there, here):
            (each / "logs").mkdir(parents=True)
            (each / "checkpoints").mkdir()
        copy, clock = RunFilesCopy(lambda: there), 0
        assert copy.folder == there

        def send() -> None:
            for change in copy.changes():
                if isinstance(change, FileRemoved):
                    remove(here, change.name)
                else:
                    write_chunk(here, change)

        for what, number, data in steps:
            manifest = there / "checkpoints" / f"step-{number:08d}.json"
            if what == "print":
                with (there / "logs" / f"worker-{number}.log").open("ab") as log:
                    log.write(data)
            elif what == "save":
                clock += 1
                for file in (manifest.with_suffix(".pt"), manifest):
                    file.write_bytes(data + file.suffix.encode())
                    os.utime(file, ns=(clock, clock))  # a real clock moves on between two of them
            elif what == "drop":
                manifest.unlink(missing_ok=True)
                manifest.with_suffix(".pt").unlink(missing_ok=True)
            else:
                send()
        send()
        assert _contents(here) == _contents(there)
        assert not list(copy.changes()), "everything was sent"


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_what_came_from_the_driver_is_not_sent_back(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    source = tmp_path / "step-00000001.pt"
    source.write_bytes(b"state")
    copy = RunFilesCopy(lambda: tmp_path / "copy")
    assert list(copy.changes()) == []
    assert not (tmp_path / "copy").exists(), "a node that shares the driver's files needs no folder"
    for name in ("checkpoints/step-00000001.pt", "checkpoints/step-00000001.json", files.TASK):
        for chunk in chunks_of(source, name):
            copy.write(chunk)
    assert list(copy.changes()) == []
    assert (tmp_path / "copy" / files.TASK).read_bytes() == b"state"


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "logs/../../x", "checkpoints/step-1.sh", "plan.json", ""])
def test_only_files_that_a_worker_writes_are_accepted(tmp_path, name):
    with pytest.raises(ValueError, match="not a file of a run"):
        write_chunk(tmp_path, FileChunk(name, 0, b"x", True))
    with pytest.raises(ValueError, match="not a file of a run"):
        remove(tmp_path, name)
    assert not list(tmp_path.iterdir())
