"""Which files are trusted, and what happens to others' files when ours are replaced."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from other_user import NOBODY, as_nobody, needs_root, write_files

from syncline.config import owned_files
from syncline.errors import ConfigError


@pytest.fixture(autouse=True)
def _usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "file"
    path.parent.mkdir()
    path.write_bytes(b"content")
    return path


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def code_of(read, path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert caught.value.facts["path"] in (str(path), str(path.parent))
    return caught.value.code


def test_our_own_file_is_read(file):
    assert owned_files.read_owned(file) == b"content"


@needs_root
@pytest.mark.parametrize("whose", ["file", "folder"])
def test_what_another_user_owns_is_refused_and_the_owner_named(file, whose):
    path = file if whose == "file" else file.parent
    os.chown(path, NOBODY, -1)
    with pytest.raises(ConfigError) as caught:
        owned_files.read_owned(file)
    assert caught.value.code == "foreign-run"
    assert caught.value.facts == {"path": str(path), "owner": "nobody"}


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_refused(file, mode):
    file.chmod(mode)
    assert code_of(owned_files.read_owned, file) == "writable-by-others"


def test_a_folder_that_everyone_can_write_is_refused_unless_each_may_remove_only_their_own_files(file):
    file.parent.chmod(0o777)
    assert code_of(owned_files.read_owned, file) == "writable-by-others"
    file.parent.chmod(0o1777)
    assert owned_files.read_owned(file) == b"content"


@pytest.mark.parametrize("opens", [owned_files.open_regular, owned_files.open_owned, owned_files.open_append])
def test_a_link_is_not_followed(file, opens):
    link = file.with_name("link")
    link.symlink_to(file)
    assert code_of(opens, link) == "linked-file"
    assert file.read_bytes() == b"content"


def test_a_linked_folder_is_not_followed(file, tmp_path):
    (tmp_path / "link").symlink_to(file.parent)
    assert code_of(owned_files.read_owned, tmp_path / "link" / "file") == "linked-file"


@pytest.mark.parametrize("opens", [owned_files.open_regular, owned_files.open_owned, owned_files.open_append])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, opens):
    os.mkfifo(tmp_path / "pipe")
    assert code_of(opens, tmp_path / "pipe") == "not-a-file"
    (tmp_path / "folder").mkdir()
    assert code_of(opens, tmp_path / "folder") == "not-a-file"


def test_a_missing_file_is_an_ordinary_error(tmp_path):
    for opens in (owned_files.open_regular, owned_files.open_owned):
        with pytest.raises(FileNotFoundError):
            opens(tmp_path / "nowhere")


@pytest.mark.parametrize(("folder_mode", "file_mode"), [(0o700, 0o600), (0o755, 0o644), (0o750, 0o640), (0o777, 0o644)])
def test_new_files_are_as_readable_as_their_folder_and_never_writable_by_others(tmp_path, folder_mode, file_mode):
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(folder_mode)
    os.umask(0)
    owned_files.replace_file(folder / "replaced", b"")
    owned_files.open_append(folder / "appended").close()
    owned_files.make_directory(folder / "inside")
    assert {mode_of(folder / name) for name in ("replaced", "appended")} == {file_mode}
    assert mode_of(folder / "inside") == folder_mode & 0o755


def test_replacing_writes_through_no_name_that_can_be_guessed(tmp_path, monkeypatch):
    names = [owned_files.temporary_name(tmp_path / "plan.json").name for _ in range(2)]
    assert names[0] != names[1]
    assert all(name.startswith(".plan.json.") and name.endswith(".tmp") for name in names)
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    guessed = tmp_path / ".plan.json.guessed.tmp"
    guessed.symlink_to(victim)
    monkeypatch.setattr(owned_files, "temporary_name", lambda path: guessed)
    with pytest.raises(FileExistsError):
        owned_files.replace_file(tmp_path / "plan.json", b"new")
    assert victim.read_bytes() == b"precious"


def test_replacing_a_link_replaces_the_link(tmp_path):
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "plan.json").symlink_to(tmp_path / "victim")
    owned_files.replace_file(tmp_path / "plan.json", b"new")
    assert (tmp_path / "victim").read_bytes() == b"precious"
    assert (tmp_path / "plan.json").read_bytes() == b"new"
    assert not (tmp_path / "plan.json").is_symlink()


def test_a_replacement_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no rename")

    monkeypatch.setattr(owned_files.os, "replace", fail)
    with pytest.raises(OSError, match="no rename"):
        owned_files.replace_file(tmp_path / "plan.json", b"new")
    assert not list(tmp_path.glob(".plan*"))


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    for name in (".plan.json.0123.tmp", ".report.html.0123.tmp", "plan.json"):
        (tmp_path / name).touch()
    owned_files.remove_unfinished(tmp_path / "plan.json")
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {".report.html.0123.tmp", "plan.json"}


def test_a_relative_cache_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert owned_files.cache_home() == tmp_path / ".cache"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert owned_files.cache_home() == Path("/var/cache/me")


def test_a_new_cache_is_for_this_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = owned_files.cache_folder("kernels")
    owned_files.make_cache(folder)
    assert mode_of(folder) == mode_of(folder.parent) == 0o700
    owned_files.check_cache(folder)


@needs_root
def test_a_cache_that_another_user_made_first_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    as_nobody(tmp_path / "cache", lambda: write_files({"syncline/kernels/evil.so": b"evil"}))
    for use in (owned_files.check_cache, owned_files.make_cache):
        with pytest.raises(ConfigError) as caught:
            use(owned_files.cache_folder("kernels"))
        assert caught.value.code == "foreign-run"


def test_a_cache_in_a_folder_that_everyone_can_write_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    owned_files.make_cache(owned_files.cache_folder("kernels"))
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError) as caught:
        owned_files.check_cache(owned_files.cache_folder("kernels"))
    assert caught.value.code == "writable-by-others"
