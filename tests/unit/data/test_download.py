"""Downloads: whole, checked and in bounded time, or nothing at all."""

from __future__ import annotations

import hashlib
import http.server
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from syncline.data import download
from syncline.data.download import cache_dir, environment_data_dir, fetch, place
from syncline.errors import DataError

CONTENT = bytes(range(256)) * 1024
MD5 = hashlib.md5(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Behaves as the path asks it to."""

    released: threading.Event

    def do_GET(self) -> None:
        if self.path == "/missing":
            self.send_error(404)
            return
        if self.path == "/silent":
            self.released.wait(10)
            return
        self.send_response(200)
        if self.path != "/unmeasured":
            self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        if self.path == "/truncated":
            self.wfile.write(CONTENT[:1000])
        elif self.path == "/stalled":
            self.wfile.write(CONTENT[:1000])
            self.released.wait(10)
        elif self.path == "/trickle":
            for byte in CONTENT:
                if self.released.wait(0.02):
                    break
                try:
                    self.wfile.write(bytes([byte]))
                except OSError:  # the client gave up, as it should
                    break
        else:
            self.wfile.write(CONTENT)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(Handler, "released", threading.Event(), raising=False)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        Handler.released.set()
        server.shutdown()
        thread.join()


def everything_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def test_a_good_file_arrives_whole_and_alone(url: str, tmp_path: Path):
    target = tmp_path / "new" / "folder" / "file"
    fetch(f"{url}/good", target, md5=MD5)
    assert target.read_bytes() == CONTENT
    assert everything_in(target.parent) == ["file"]


def test_progress_goes_from_nothing_to_everything(url: str, tmp_path: Path):
    seen: list[tuple[str, int, int | None]] = []
    fetch(f"{url}/good", tmp_path / "file", md5=MD5, progress=lambda *report: seen.append(report))
    assert seen[0] == ("file", 0, len(CONTENT))
    assert seen[-1] == ("file", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_a_server_that_tells_no_length_is_reported_as_total_unknown(url: str, tmp_path: Path):
    seen: list[tuple[str, int, int | None]] = []
    fetch(f"{url}/unmeasured", tmp_path / "file", md5=MD5, progress=lambda *report: seen.append(report))
    assert seen[-1] == ("file", len(CONTENT), None)


def test_a_wrong_md5_names_both_and_leaves_nothing(url: str, tmp_path: Path):
    with pytest.raises(DataError) as caught:
        fetch(f"{url}/good", tmp_path / "file", md5="0" * 32)
    assert caught.value.code == "md5-mismatch"
    assert (caught.value.facts["md5"], caught.value.facts["expected"]) == (MD5, "0" * 32)
    assert everything_in(tmp_path) == []


def test_a_wrong_md5_leaves_the_older_file_in_place(url: str, tmp_path: Path):
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(DataError):
        fetch(f"{url}/good", tmp_path / "file", md5="0" * 32)
    assert (tmp_path / "file").read_bytes() == b"old"
    assert everything_in(tmp_path) == ["file"]


def test_a_truncated_answer_tells_how_far_it_came_and_leaves_nothing(url: str, tmp_path: Path):
    with pytest.raises(DataError) as caught:
        fetch(f"{url}/truncated", tmp_path / "file", md5=MD5)
    assert caught.value.code == "incomplete-download"
    assert (caught.value.facts["done"], caught.value.facts["total"]) == (1000, len(CONTENT))
    assert everything_in(tmp_path) == []


def test_a_missing_page_tells_the_servers_answer_and_leaves_nothing(url: str, tmp_path: Path):
    with pytest.raises(DataError, match=r"/missing .*404 Not Found"):
        fetch(f"{url}/missing", tmp_path / "file", md5=MD5)
    assert everything_in(tmp_path) == []


def test_a_refused_connection_is_a_data_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as bound:  # bound but not listening, so that nobody answers on this port
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(DataError, match="Connection refused"):
            fetch(f"http://127.0.0.1:{bound.getsockname()[1]}/", tmp_path / "file", md5=MD5)
    assert everything_in(tmp_path) == []


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        ("silent", r"/silent .*timed out after 0\.2 s"),
        ("stalled", r"/stalled .*1000 bytes.*timed out after 0\.2 s"),
        ("trickle", "/trickle is too slow: .* bytes"),
    ],
)
def test_a_server_that_hangs_is_left_in_time(url: str, tmp_path: Path, page: str, complaint: str):
    start_s = time.monotonic()
    with pytest.raises(DataError, match=complaint):
        fetch(f"{url}/{page}", tmp_path / "file", md5=MD5, timeout_s=0.2)
    assert time.monotonic() - start_s < 2
    assert everything_in(tmp_path) == []


def test_a_host_that_is_never_reached_is_given_up_as_a_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """As when each of a host's many addresses, or its name, takes a timeout of its own."""
    released = threading.Event()
    monkeypatch.setattr(download.urllib.request, "urlopen", lambda *_, **__: released.wait(10))
    with pytest.raises(DataError, match="timed out"):
        fetch("http://127.0.0.1/", tmp_path / "file", md5=MD5, timeout_s=0.05)
    released.set()
    assert everything_in(tmp_path) == []


def test_an_interrupted_download_leaves_nothing(url: str, tmp_path: Path):
    def interrupt(label: str, done: int, total: int | None) -> None:
        if done:
            assert len(everything_in(tmp_path)) == 1  # the temporary file is there, and about to go
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(f"{url}/good", tmp_path / "file", md5=MD5, progress=interrupt)
    assert everything_in(tmp_path) == []


def test_placing_replaces_the_old_file_only_when_the_new_one_is_complete(tmp_path: Path):
    target = tmp_path / "file"
    target.write_bytes(b"old")

    def write(file: object) -> None:
        file.write(b"new")  # type: ignore[attr-defined]
        assert target.read_bytes() == b"old"

    place(target, write)
    assert target.read_bytes() == b"new"
    assert everything_in(tmp_path) == ["file"]


def test_a_placed_file_is_as_readable_as_any_other(tmp_path: Path):
    (tmp_path / "ordinary").touch()
    place(tmp_path / "placed", lambda file: None)
    modes = [stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in ("ordinary", "placed")]
    assert modes[0] == modes[1]


def test_a_folder_that_cannot_be_written_to_is_a_data_error_with_the_way_out(tmp_path: Path):
    (tmp_path / "taken").touch()
    with pytest.raises(DataError, match=r"taken/file could not be written: .*XDG_CACHE_HOME"):
        place(tmp_path / "taken" / "file", lambda file: None)
    assert everything_in(tmp_path) == ["taken"]


def test_the_cache_is_where_xdg_says_or_else_at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_dir() == tmp_path / "cache" / "syncline" / "data"
    for not_absolute in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", not_absolute)
        assert cache_dir() == tmp_path / "home" / ".cache" / "syncline" / "data"
    assert everything_in(tmp_path) == []


def test_a_user_without_a_home_is_advised_to_set_the_cache(monkeypatch: pytest.MonkeyPatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(DataError, match="Set XDG_CACHE_HOME"):
        cache_dir()


def test_the_data_folder_of_the_environment_may_be_unset_or_start_at_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SYNCLINE_DATA", "~/data")
    assert environment_data_dir() == tmp_path / "data"
    monkeypatch.setenv("SYNCLINE_DATA", "")
    assert environment_data_dir() is None
