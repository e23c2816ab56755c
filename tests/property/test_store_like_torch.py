"""The store of a run does what torch's own does, whatever is asked of it in whatever order."""

from __future__ import annotations

from datetime import timedelta

import generators  # noqa: F401  # loads the profile of these tests
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from syncline.comms.store import connect_store, host_store

keys = st.sampled_from(["a", "b", "c"])
values = st.sampled_from(["", "7", "-3", "x"])
numbers = st.integers(-5, 5)
calls = st.one_of(
    st.tuples(st.just("set"), keys, values),
    st.tuples(st.just("add"), keys, numbers),
    st.tuples(st.just("compare_set"), keys, values, values),
    st.tuples(st.just("delete_key"), keys),
    st.tuples(st.just("check"), st.lists(keys, max_size=3)),
    st.tuples(st.just("num_keys")),
    st.tuples(st.just("get"), keys),
    st.tuples(st.just("wait"), st.lists(keys, max_size=3)),
    st.tuples(st.just("multi_get"), st.lists(keys, max_size=3)),
)


def outcome(store: dist.Store, call: tuple) -> object:
    name, *arguments = call
    try:
        return getattr(store, name)(*arguments)
    except Exception as error:  # which one is torch's business; that there is one is not
        return isinstance(error, (RuntimeError, ValueError))


def test_the_same_calls_have_the_same_outcome():
    host, port = host_store("127.0.0.1", b"secret")
    mine = connect_store("127.0.0.1", port, "view", 0.001, b"secret")

    @given(st.lists(calls, max_size=12))
    def check(sequence: list[tuple]) -> None:
        torchs = dist.HashStore()
        torchs.set_timeout(timedelta(milliseconds=1))
        for key in ("a", "b", "c"):
            mine.delete_key(key)
        for call in sequence:
            assert outcome(mine, call) == outcome(torchs, call), call

    try:
        check()
    finally:
        mine.close()
        host.close()
