"""From an exception to the message that is sent: the user's frames, and never too long."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch._utils import ExceptionWrapper

from syncline.comms.control import Failed
from syncline.data.prefetch import fetch
from syncline.errors import ConfigError, PeerFailed
from syncline.workers.failure import describe_failure


def described(error: BaseException) -> Failed:
    return describe_failure(error, worker_id=1, step=7, samples=[3, 4])


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
    sent = described(raised(lambda: outer(None)))
    assert (sent.kind, sent.message, sent.step, sent.samples) == ("ZeroDivisionError", "division by zero", 7, [3, 4])
    assert "test_failure.py" in sent.traceback
    assert "torch/nn/modules/module.py" not in sent.traceback
    assert sent.traceback.endswith("ZeroDivisionError: division by zero\n")


def test_our_own_frames_stay_where_the_users_code_called_us():
    sent = described(raised(lambda: next(fetch(None, iter([None]), loaders=0, seed=0))))  # type: ignore[arg-type]
    assert "syncline/data/prefetch.py" in sent.traceback


def test_our_own_errors_need_no_traceback():
    sent = described(ConfigError("lr is -1."))
    assert (sent.message, sent.traceback, sent.consequence) == ("lr is -1.", "", False)
    assert described(PeerFailed("gone")).consequence


def test_what_happened_in_a_loader_process_is_told_as_if_it_had_happened_here():
    def read() -> None:
        raise KeyError("no such column")

    try:
        read()
    except KeyError:
        carried = ExceptionWrapper(where="in DataLoader worker process 0")  # as torch does it there
    sent = described(raised(carried.reraise))
    assert (sent.kind, sent.message) == ("KeyError", "'no such column'")
    assert sent.traceback.startswith("Traceback (most recent call last):\n")
    assert "in read" in sent.traceback
    assert "reraise" not in sent.traceback


def test_notes_belong_to_the_message():
    error = ValueError("bad")
    error.add_note("This happened on a Tuesday.")
    assert described(error).message == "bad\nThis happened on a Tuesday."


def test_a_huge_message_loses_its_middle_and_says_how_much():
    def fail() -> None:
        raise ValueError("first" + "x" * 10_000_000 + "last")

    sent = described(raised(fail))
    assert len(msgspec.msgpack.encode(sent)) < 100_000
    for text in (sent.message, sent.traceback):
        assert "first" in text
        assert "characters omitted ...]" in text
        assert "last" in text
    cut = described(ValueError("a" * 5_000 + "b" * 5_000)).message
    assert cut == f"{'a' * 2_000} [... 6,000 characters omitted ...] {'b' * 2_000}"


def test_a_message_of_usual_length_is_left_alone():
    assert described(ValueError("a" * 4_000)).message == "a" * 4_000


def test_an_exception_that_cannot_say_what_it_is_is_still_told():
    class Shy(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    sent = described(raised(lambda: (_ for _ in ()).throw(Shy())))
    assert (sent.kind, sent.message) == ("Shy", "its message cannot be formatted: RuntimeError")
    assert "Shy" in sent.traceback


def test_what_is_no_text_can_be_sent_all_the_same():
    sent = described(FileNotFoundError(2, "No such file", b"caf\xe9".decode(errors="surrogateescape")))
    assert "caf\\udce9" in sent.message
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Failed) == sent


def test_an_exception_without_words_is_told_by_its_name():
    assert described(MemoryError()).message == "MemoryError"
