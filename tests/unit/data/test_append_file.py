"""Files of lines that survive crashes, and removal while they are written."""

from __future__ import annotations

from contextlib import closing

import pytest

from syncline.data.append_file import AppendFile


def test_a_line_that_a_crash_has_truncated_gets_its_end(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntw")
    with closing(AppendFile(path)) as file:
        file.write(b"three")
    assert path.read_bytes() == b"one\ntw\nthree\n"


@pytest.mark.parametrize("how", ["removed", "moved"])
def test_a_file_that_is_gone_is_made_again_with_all_lines(tmp_path, how):
    path = tmp_path / "lines"
    with closing(AppendFile(path)) as file:
        file.write(b"one")
        if how == "removed":
            path.unlink()
        else:
            path.rename(tmp_path / "elsewhere")
        file.write(b"two")
        file.follow()
        file.write(b"three")
    assert path.read_bytes() == b"one\ntwo\nthree\n"


def test_a_file_that_another_process_has_put_there_is_continued(tmp_path):
    path = tmp_path / "lines"
    with closing(AppendFile(path)) as file:
        file.write(b"ours")
        path.unlink()
        path.write_bytes(b"theirs\n")
        file.follow()
        file.write(b"ours again")
    assert path.read_bytes() == b"theirs\nours again\n"


def test_a_file_in_its_place_is_left_alone(tmp_path):
    path = tmp_path / "lines"
    with closing(AppendFile(path)) as file:
        file.write(b"one")
        file.follow()
    assert path.read_bytes() == b"one\n"
