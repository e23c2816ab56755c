"""Caffe's Datum, read and written without protobuf."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from syncline.data.files.datum import Datum, read_datum, write_datum

sizes = st.integers(0, 2**31 - 1)
data = st.builds(
    Datum,
    channels=sizes,
    height=sizes,
    width=sizes,
    data=st.binary(max_size=40),
    label=st.integers(-(2**31), 2**31 - 1),
    floats=st.lists(st.floats(width=32, allow_nan=False), max_size=5).map(tuple),
    encoded=st.booleans(),
)


@given(data)
def test_what_is_written_is_read_back(datum: Datum):
    assert read_datum(write_datum(datum)) == datum


@given(st.binary(max_size=60))
def test_arbitrary_bytes_give_a_datum_or_a_value_error(message: bytes):
    with contextlib.suppress(ValueError):
        assert isinstance(read_datum(message), Datum)


def test_a_message_as_caffe_writes_it_is_read():
    """channels=1, height=2, width=2, data="abcd", label=7; and unknown fields are skipped."""
    message = bytes.fromhex("080110021802220461626364280768ff01")
    assert read_datum(message) == Datum(channels=1, height=2, width=2, data=b"abcd", label=7)


def test_packed_floats_are_read_too():
    assert read_datum(bytes.fromhex("32080000803f00000040")).floats == (1.0, 2.0)
