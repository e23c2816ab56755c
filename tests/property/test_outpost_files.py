"""What workers write at an outpost is at the driver in the end, whole, however it grows."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.engines.outposts import files
from syncline.engines.outposts.files import Copy, pieces_of, put, remove
from syncline.engines.outposts.messages import Piece, Removed

written = st.lists(
    st.one_of(
        st.tuples(st.just("print"), st.integers(0, 2), st.binary(min_size=1, max_size=40)),
        st.tuples(st.just("save"), st.integers(0, 5), st.binary(max_size=40)),
        st.tuples(st.just("drop"), st.integers(0, 5), st.just(b"")),
        st.tuples(st.just("tell"), st.just(0), st.just(b"")),
    ),
    max_size=25,
)


@given(written, st.integers(1, 16))
def test_the_drivers_files_become_those_of_the_outpost(steps: list[tuple[str, int, bytes]], piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(files, "_PIECE_BYTES", piece)
        there, here = Path(folder, "there"), Path(folder, "here")
        for each in (there, here):
            (each / "logs").mkdir(parents=True)
            (each / "checkpoints").mkdir()
        copy, clock = Copy(lambda: there), 0
        assert copy.folder == there

        def tell() -> None:
            for news in copy.news():
                if isinstance(news, Removed):
                    remove(here, news.name)
                else:
                    put(here, news)

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
                tell()
        tell()
        assert _contents(here) == _contents(there)
        assert not list(copy.news()), "all is told"


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_what_came_from_the_driver_is_not_sent_back(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    source = tmp_path / "step-00000001.pt"
    source.write_bytes(b"state")
    copy = Copy(lambda: tmp_path / "copy")
    assert list(copy.news()) == []
    assert not (tmp_path / "copy").exists(), "who sees the driver's files needs no folder"
    for name in ("checkpoints/step-00000001.pt", "checkpoints/step-00000001.json", files.TASK):
        for piece in pieces_of(source, name):
            copy.put(piece)
    assert list(copy.news()) == []
    assert (tmp_path / "copy" / files.TASK).read_bytes() == b"state"


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "logs/../../x", "checkpoints/step-1.sh", "plan.json", ""])
def test_only_files_that_a_worker_writes_are_taken(tmp_path, name):
    with pytest.raises(ValueError, match="is no file of a run"):
        put(tmp_path, Piece(name, 0, b"x", True))
    with pytest.raises(ValueError, match="is no file of a run"):
        remove(tmp_path, name)
    assert not list(tmp_path.iterdir())
