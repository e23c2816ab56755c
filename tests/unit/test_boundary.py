"""Which exceptions are expected, which are the user's own, and what a report on the others holds."""

from __future__ import annotations

import errno
import functools
import json
import os
import resource
import stat
import sys
from pathlib import Path

import pytest
import zmq
from pyarrow.fs import FileSystem

import syncline
from syncline import boundary
from syncline.errors import ConfigError, SynclineError

# A frame of this file would make an exception the user's own, and calling a partial has no frame.
_guarded = boundary.guarding()(functools.partial.__call__)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.EMFILE, "too-few-files"),
        (errno.EFBIG, "file-too-large"),
        (errno.ENOSPC, "disk-full"),
        (errno.EACCES, "not-permitted"),
        (errno.ENOMEM, "no-memory"),
        (errno.EIO, "disk-error"),
    ],
)
def test_a_failure_of_the_system_has_a_code_and_names_its_file(number, code):
    found = boundary.as_expected(OSError(number, os.strerror(number), "runs/a/plan.json"))
    assert found is not None
    assert found.code == code
    assert found.facts == {"errno": errno.errorcode[number], "path": "runs/a/plan.json"}
    assert "runs/a/plan.json" in str(found)


def test_the_limit_in_effect_is_part_of_the_message(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4321, 4321))
    for number in (errno.EMFILE, errno.EFBIG):
        assert "4321" in str(boundary.as_expected(OSError(number, "x"))).replace(",", "")


def test_a_zmq_error_counts_as_what_its_errno_says():
    found = boundary.as_expected(zmq.ZMQError(errno.EMFILE))
    assert found is not None
    assert found.code == "too-few-files"


@pytest.mark.parametrize("error", [KeyError("x"), OSError(errno.EBADF, "bad"), OSError("no errno"), RecursionError()])
def test_what_can_only_be_a_bug_is_not_expected(error):
    assert boundary.as_expected(error) is None


def test_a_name_that_is_not_utf8_is_the_users_to_change():
    try:
        "runs/\udcff".encode()
    except UnicodeEncodeError as error:
        found = boundary.as_expected(error)
    assert isinstance(found, ConfigError)
    assert found.code == "not-utf8"
    assert "\\udcff" in found.facts["text"]


def test_a_deleted_working_directory_is_named(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError) as caught:
        boundary.check_surroundings()
    assert caught.value.code == "no-working-directory"
    with pytest.raises(ConfigError) as caught:
        syncline.train(model="mlp", data="digits", quiet=True)
    assert caught.value.code == "no-working-directory"


def test_a_run_is_refused_where_few_files_may_be_open(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    with pytest.raises(SynclineError) as caught:
        boundary.check_surroundings()
    assert caught.value.code == "too-few-files"
    assert caught.value.facts == {"limit": 20, "least": boundary.FEWEST_OPEN_FILES}


def of_ours() -> Exception:
    """An exception without a frame of the user's: this file counts as one."""
    try:
        json.loads("{")
    except ValueError as error:
        return error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
    raise AssertionError


def test_an_unexpected_exception_leaves_unchanged_with_a_note_and_a_private_report(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["syncline", "train", "--api-key", "abc123"])
    monkeypatch.setenv("SYNCLINE_SECRET", "hunter2hunter2")
    bug = functools.partial(json.loads, '{"hunter2hunter2')
    with pytest.raises(json.JSONDecodeError) as caught:
        _guarded(bug)
    (note,) = caught.value.__notes__
    report = Path(next(word for word in note.split() if "syncline-bug-" in word).rstrip(",."))
    text = report.read_text()
    assert "bug in Syncline" in note
    assert stat.S_IMODE(report.stat().st_mode) == 0o600
    for fact in (syncline.__version__, "torch: ", "python: ", "platform: ", "JSONDecodeError", "syncline train"):
        assert fact in text
    assert "hunter2" not in text
    assert "abc123" not in text
    report.unlink()


def test_the_report_on_a_bug_in_a_run_is_in_its_directory(tmp_path):
    error = of_ours()
    with pytest.raises(ValueError), boundary.in_run(tmp_path):
        raise error
    message = boundary.bug_message(error)
    (report,) = tmp_path.iterdir()
    assert str(report) in message
    assert boundary.bug_message(error) == message, "one report for one bug"
    assert list(tmp_path.iterdir()) == [report]


def test_an_exception_of_the_users_code_leaves_without_a_note():
    class Data:
        def __len__(self) -> int:
            raise ZeroDivisionError("the user's own mistake")

        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(ZeroDivisionError) as caught:
        syncline.train(model="mlp", data=Data(), quiet=True)
    assert not hasattr(caught.value, "__notes__")


def test_an_expected_failure_leaves_the_api_as_an_error_of_syncline(tmp_path):
    with pytest.raises(SynclineError) as caught:
        _guarded(functools.partial(os.listdir, tmp_path / "none"))
    assert caught.value.code == "path"
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_compiled_code_of_a_dependency_is_not_the_users():
    # Its frames have names such as pyarrow/_fs.pyx, wherever it is installed.
    with pytest.raises(SynclineError) as caught:
        _guarded(functools.partial(FileSystem.from_uri, "a\udcffb"))
    assert caught.value.code == "not-utf8"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("--token=xyzzy", "xyzzy"),
        ("--join-secret xyzzy", "xyzzy"),
        ("s3://user:xyzzy@host/path", "xyzzy"),
        ("{'password': 'xyzzy'}", "xyzzy"),
        ("AWS_SECRET_ACCESS_KEY=xyzzy", "xyzzy"),
    ],
)
def test_secrets_are_left_out_of_reports(text, secret):
    assert secret not in boundary.without_secrets(f"before {text} after")
    assert boundary.without_secrets(f"before {text} after").startswith("before ")
