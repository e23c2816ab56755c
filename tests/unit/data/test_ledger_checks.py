"""Lines of a ledger that no run can have written are refused at once, whatever they would make the audit count."""

from __future__ import annotations

import pytest

from syncline.data.audit import audit
from syncline.data.ledger import Closed, Line, Opened, Used, encode
from syncline.data.ledger_file import read_ledger
from syncline.errors import DataError

OPENED = Opened(view=1, members=[0, 1], start=(0, 0, 0, 0), count=100, batch=10, epochs=3)
HUGE = 10**12


def refused(*lines: Line) -> DataError:
    with pytest.raises(DataError) as caught:
        audit(lines)
    assert caught.value.code == "impossible-ledger-line"
    return caught.value


@pytest.mark.parametrize(
    "run",
    [
        (0, 0, HUGE, 0, 1), (0, 0, 1, 1, HUGE), (0, 0, 5, 0, HUGE), (HUGE, 0, 5, 0, 1), (0, -5, 5, 0, 1),
        (0, 5, 5, 0, 1), (0, 0, 5, -5, 2), (-1, 0, 5, 0, 1), (0, 90, 101, 0, 1), (2, 0, 5, 0, 1), (0, 0, 5, 0, 0),
    ],
)  # fmt: skip
def test_a_range_outside_of_the_opened_samples_is_refused_with_its_line(run):
    error = refused(OPENED, Used(view=1, worker=0, steps=1, runs=[(0, 0, 5, 0, 1), run]))
    assert error.facts["line"] == 2
    assert str(run[0]) in error.facts["problem"]


@pytest.mark.parametrize(
    "line",
    [
        Opened(view=2, members=[0], start=(0, 0, 0, 0), count=HUGE, batch=10, epochs=3),
        Opened(view=2, members=[0], start=(HUGE, 0, HUGE, 0), count=100, batch=10, epochs=HUGE),
        Opened(view=2, members=[0], start=(0, 0, HUGE, 0), count=100, batch=10, epochs=3),
        Opened(view=2, members=[0], start=(0, 0, 0, 0), count=100, batch=0, epochs=3),
        Opened(view=2, members=[], start=(0, 0, 0, 0), count=100, batch=10, epochs=3),
        Opened(view=2, members=[0], start=(0, 0, 0, 0), count=100, batch=10, epochs=3, requeued=[(0, 0, HUGE)]),
        Closed(at=(0, 101, 10, 0)),
        Closed(at=(0, 0, HUGE, 0)),
        Closed(at=(-1, 0, 0, 0)),
    ],
)
def test_an_impossible_view_or_end_is_refused(line):
    assert refused(OPENED, line).facts["line"] == 2


def test_huge_numbers_in_several_fields_are_refused_as_well():
    refused(
        Opened(view=1, members=[0], start=(0, 0, 0, 0), count=100, batch=10, epochs=None),
        Used(view=1, worker=0, steps=HUGE, runs=[(HUGE, 0, 5, 0, 1)]),
    )
    refused(Opened(view=1, members=[0], start=(10**8, 0, HUGE, 0), count=100, batch=10, epochs=None))


@pytest.mark.parametrize("text", [b"{", b'"\xa6"', b"[" * 100_000, b'{"type": "used"}'])
def test_a_line_that_cannot_be_read_is_skipped(tmp_path, text):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(encode(OPENED) + b"\n" + text + b"\n")
    assert list(read_ledger(path)) == [OPENED]


def test_what_runs_write_is_accepted():
    halves = [
        Used(view=1, worker=worker, steps=20, runs=[(0, 5 * worker, 5 * worker + 5, 10, 10),
             (1, 5 * worker, 5 * worker + 5, 10, 10)])
        for worker in (0, 1)
    ]  # fmt: skip
    found = audit([OPENED, *halves, Closed(at=(2, 0, 20, 0))])
    assert found.is_clean
    assert [epoch.committed for epoch in found.epochs] == [100, 100]
