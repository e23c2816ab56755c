"""The keys of a run, derived from a secret that a person may have chosen."""

from __future__ import annotations

import time

import pytest

from syncline.comms.zmq_sockets import Keys


def test_both_ends_derive_the_same_keys_and_other_secrets_others():
    secret = b"sixteen characters"
    assert Keys.of(secret) == Keys.of(secret)
    assert len({*Keys.of(secret), *Keys.of(secret + b"x")}) == 8


def test_a_guess_of_the_secret_is_expensive_and_a_run_does_not_wait_for_it():
    began = time.thread_time()
    Keys.of(b"sixteen characters")
    assert 0.005 < time.thread_time() - began < 0.3


def test_random_keys_need_no_derivation(monkeypatch):
    monkeypatch.setattr("hashlib.scrypt", lambda *_, **__: pytest.fail("costs time at the start of every run"))
    assert Keys.new() != Keys.new()
