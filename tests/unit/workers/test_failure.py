"""From an exception to what is told of it: the user's frames, and never too long to arrive."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch._utils import ExceptionWrapper

from syncline.comms.control import Failed
from syncline.data.prefetch import fetch
from syncline.errors import ConfigError, PeerLost
from syncline.workers.failure import describe_failure


def described(error: BaseException) -> Failed:
    return describe_failure(error, rank=1, step=7, samples=[3, 4])


def raised(work: object) -> BaseException:
    with pytest.raises(BaseException) as caught:
        work()  # type: ignore[operator]
    return caught.value


def test_frames_that_only_lead_to_the_users_code_are_left_out():
    class Net(torch.nn.Module):
        def forward(self, x: object) -> object:
            return self.inner(x)

    outer, inner = Net(), Net()
    outer.inner = inner
    inner.inner = lambda _: 1 / 0
    told = described(raised(lambda: outer(None)))
    assert (told.kind, told.message, told.step, told.samples) == ("ZeroDivisionError", "division by zero", 7, [3, 4])
    assert "test_failure.py" in told.traceback
    assert "torch/nn/modules/module.py" not in told.traceback
    assert told.traceback.endswith("ZeroDivisionError: division by zero\n")


def test_our_own_frames_stay_where_the_users_code_called_us():
    told = described(raised(lambda: next(fetch(None, iter([None]), loaders=0, seed=0))))  # type: ignore[arg-type]
    assert "syncline/data/prefetch.py" in told.traceback


def test_our_own_errors_need_no_traceback():
    told = described(ConfigError("lr is -1."))
    assert (told.message, told.traceback, told.consequence) == ("lr is -1.", "", False)
    assert described(PeerLost("gone")).consequence


def test_what_happened_in_a_loader_process_is_told_as_if_it_had_happened_here():
    def read() -> None:
        raise KeyError("no such column")

    try:
        read()
    except KeyError:
        carried = ExceptionWrapper(where="in DataLoader worker process 0")  # as torch does it there
    told = described(raised(carried.reraise))
    assert (told.kind, told.message) == ("KeyError", "'no such column'")
    assert told.traceback.startswith("Traceback (most recent call last):\n")
    assert "in read" in told.traceback
    assert "reraise" not in told.traceback


def test_notes_belong_to_the_message():
    error = ValueError("bad")
    error.add_note("This happened on a Tuesday.")
    assert described(error).message == "bad\nThis happened on a Tuesday."


def test_a_huge_message_loses_its_middle_and_says_how_much():
    def fail() -> None:
        raise ValueError("first" + "x" * 10_000_000 + "last")

    told = described(raised(fail))
    assert len(msgspec.msgpack.encode(told)) < 100_000
    for text in (told.message, told.traceback):
        assert "first" in text
        assert "characters are left out here ...]" in text
        assert "last" in text
    cut = described(ValueError("a" * 5_000 + "b" * 5_000)).message
    assert cut == f"{'a' * 2_000} [... 6,000 characters are left out here ...] {'b' * 2_000}"


def test_a_message_of_usual_length_is_left_alone():
    assert described(ValueError("a" * 4_000)).message == "a" * 4_000


def test_an_exception_that_cannot_say_what_it_is_is_still_told():
    class Shy(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    told = described(raised(lambda: (_ for _ in ()).throw(Shy())))
    assert (told.kind, told.message) == ("Shy", "its text cannot be made: RuntimeError")
    assert "Shy" in told.traceback


def test_what_is_no_text_can_be_sent_all_the_same():
    told = described(FileNotFoundError(2, "No such file", b"caf\xe9".decode(errors="surrogateescape")))
    assert "caf\\udce9" in told.message
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=Failed) == told


def test_an_exception_without_words_is_told_by_its_name():
    assert described(MemoryError()).message == "MemoryError"
