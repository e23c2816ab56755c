"""What a user may ask the server for: sources, names, shares, options and tokens."""

from __future__ import annotations

import socket

import pytest
from server_world import TOKEN, Adds

from syncline.errors import ConfigError
from syncline.serving.server.options import ServeOptions, make_server, token_of
from syncline.serving.server.sources import read_share, sources_of
from syncline.serving.server.tuning import probe


class Mean(Adds):
    def run(self, tensors):
        return [tensors["x"] - tensors["x"].mean(0, keepdims=True)]


def test_a_model_that_mixes_rows_is_found_out():
    assert probe(Adds(), 4) == (True, True)
    assert probe(Mean(), 4)[0] is False


def test_sources_become_models_versions_and_roles():
    def roles(found):
        return [(one.model, one.role) for one in found]

    assert roles(sources_of(["a.onnx", "b.onnx"])) == [("a", "stable"), ("b", "stable")]
    assert roles(sources_of(["a.onnx", "b.onnx"], name="m")) == [("m", "pinned"), ("m", "stable")]
    assert roles(sources_of(["a.onnx", "b.onnx"], name="m", canary=0.1)) == [("m", "stable"), ("m", "canary")]
    assert roles(sources_of(["a.onnx", "b.onnx"], shadow=True)) == [("a", "stable"), ("a", "shadow")]


@pytest.mark.parametrize(
    ("arguments", "options", "code"),
    [
        ([], {}, "nothing-to-serve"),
        (["a.onnx"], {"canary": 0.1}, "two-sources"),
        (["a.onnx", "b.onnx"], {"canary": 0.1, "shadow": True}, "two-roles"),
        (["x/a.onnx", "y/a.onnx"], {}, "same-name"),
        (["a.onnx"], {"name": "a/b"}, "invalid-setting"),
    ],
)
def test_sources_that_make_no_sense_are_refused(arguments, options, code):
    with pytest.raises(ConfigError) as raised:
        sources_of(arguments, **options)
    assert raised.value.code == code


@pytest.mark.parametrize("text", ["0", "100%", "-1%", "ten", "1.5", "nan"])
def test_a_share_that_is_none_is_refused(text):
    with pytest.raises(ConfigError):
        read_share(text)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"host": "0.0.0.0"}, "open-to-others"),
        ({"processes": 0}, "invalid-setting"),
        ({"max_batch": 0}, "invalid-setting"),
        ({"max_requests": 0}, "invalid-setting"),
        ({"follow": True}, "nothing-to-follow"),
        ({"tls_cert": "cert.pem"}, "half-tls"),
        ({"tls_cert": "cert.pem", "tls_key": "key.pem"}, "bad-tls"),
        ({"access_log": "/nowhere/log"}, "access-log"),
        ({"what": ("missing.onnx",)}, "no-model-file"),
        ({"what": ("missing",)}, "unknown-name"),
    ],
)
def test_options_that_cannot_be_served_are_refused_before_anything_starts(tmp_path, options, code):
    file = tmp_path / "m.onnx"
    file.touch()
    with pytest.raises(ConfigError) as raised:
        make_server(ServeOptions(**{"what": (str(file),), **options}), print)
    assert raised.value.code == code


def test_a_port_that_is_taken_is_named(tmp_path):
    file = tmp_path / "m.onnx"
    file.touch()
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError) as raised:
        make_server(ServeOptions(what=(str(file),), port=taken.getsockname()[1]), print)
    assert raised.value.code == "port-taken"


@pytest.mark.parametrize("text", ["short", "has a space in it, really", "", "ümlaut-is-not-ascii-enough"])
def test_a_token_that_is_weak_or_no_header_is_refused(tmp_path, text):
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ConfigError) as raised:
        token_of(file)
    assert raised.value.code == "bad-token"


def test_a_token_comes_from_a_file_or_is_new(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    assert token_of(file) == TOKEN
    assert token_of(None) != token_of(None)
