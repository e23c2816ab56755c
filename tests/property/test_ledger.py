"""The ledger tells the truth: clean for a run that is, and not for one in which a sample was lost or used twice."""

from __future__ import annotations

import tempfile
from dataclasses import astuple
from pathlib import Path

import msgspec
from hypothesis import assume, given
from hypothesis import strategies as st

from syncline.data.assignment import Assignment, Position, Range
from syncline.data.audit import audit, audit_file
from syncline.data.ledger import (
    YOUNG_S,
    Began,
    Closed,
    Line,
    Opened,
    RecentLines,
    Tally,
    Used,
    decode,
    encode,
    ranges_of,
)
from syncline.data.ledger_file import LedgerFile, put_back, read_ledger

ranges = st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(1, 9)).map(lambda r: (r[0], r[1], r[1] + r[2]))


@given(st.lists(ranges, max_size=20))
def test_runs_hold_exactly_the_ranges_that_were_added(added: list[Range]) -> None:
    tally = Tally()
    for number, each in enumerate(added):
        tally.add([each], number + 1)
    assert [r for run in tally.take() for r in ranges_of(run)] == added
    assert tally.take() == []


def test_a_steady_worker_needs_one_run_an_epoch() -> None:
    tally = Tally()
    assignment = Assignment(Position(), 4, 64_000, 64, epochs=1)
    for dealt in assignment.steps_of(1):
        tally.add(dealt.ranges, dealt.position.step + 1)
    assert tally.take() == [(0, 16, 32, 64, 1000)]


def opened(assignment: Assignment, view: int, members: list[int]) -> Opened:
    return Opened(
        view,
        members,
        astuple(assignment.start),
        assignment.count,
        assignment.batch,
        assignment.epochs or 1,
        list(assignment.requeued),
    )


@st.composite
def histories(draw: st.DrawFn) -> list[Line]:
    """A run in which workers are lost at any time: which samples took effect, and who has said so, is drawn."""
    assignment = Assignment(
        Position(), draw(st.integers(1, 4)), draw(st.integers(4, 40)), draw(st.integers(1, 9)), epochs=2
    )
    lines: list[Line] = []
    changes = draw(st.integers(0, 3))
    for view in range(1, changes + 2):
        members = list(range(assignment.size))
        lines.append(opened(assignment, view, members))
        if view == changes + 1:
            break
        last = assignment.start.step + draw(st.integers(0, 6))
        effect = {}
        for rank in members:
            done = min(last, assignment.start.step + draw(st.integers(0, 6)))
            effect[rank] = draw(st.integers(assignment.start.step, done))
            said = draw(st.integers(assignment.start.step, done))
            lines += _used(assignment, view, rank, said)
        assignment = assignment.next(draw(st.integers(1, 4)), effect)
        if assignment.start.epoch >= 2:
            break
    view = changes + 1
    end = assignment.start
    for rank in range(assignment.size):
        dealt = list(assignment.steps_of(rank))
        end = dealt[-1].after(assignment.count) if dealt else assignment.start
        if isinstance(lines[-1], Used) or lines[-1] == opened(assignment, view, list(range(assignment.size))):
            lines += _used(assignment, view, rank, end.step)
    return [*lines, Closed(astuple(end))]


def _used(assignment: Assignment, view: int, rank: int, until: int) -> list[Line]:
    tally = Tally()
    for step in range(assignment.start.step, until):
        tally.add(assignment.step_of(step, rank).ranges, step + 1)
    runs = tally.take()
    return [Used(view, rank, until, runs)] if runs else []


@given(histories())
def test_a_run_that_redid_the_samples_of_failed_workers_is_clean(lines: list[Line]) -> None:
    found = audit(lines)
    assert found.is_clean, found
    assert found.is_complete
    assert [decode(encode(line)) for line in lines] == lines


def plain_run(steps: dict[int, int]) -> list[Line]:
    """Two workers, 8 samples, batches of 4; each says what it has used up to a step."""
    assignment = Assignment(Position(), 2, 8, 4, epochs=1)
    lines: list[Line] = [opened(assignment, 1, [0, 1])]
    for rank, until in steps.items():
        lines += _used(assignment, 1, rank, until)
    return lines


def test_an_undisturbed_run_is_clean() -> None:
    found = audit([*plain_run({0: 2, 1: 2}), Closed((1, 0, 2, 0))])
    assert found.report_lines() == ["epoch 1: 8 of 8 samples committed once; 0 lost, 0 repeated"]


def test_a_sample_that_is_used_twice_is_found() -> None:
    lines = [*plain_run({0: 2, 1: 2}), Used(1, 1, 2, [(0, 6, 8, 0, 1)]), Closed((1, 0, 2, 0))]
    assert [e.repeated for e in audit(lines).epochs] == [2]


def test_a_sample_that_the_next_members_use_although_it_has_taken_effect_is_found() -> None:
    after = Assignment(Position(0, 4, 1), 1, 8, 4, epochs=1)
    lines = [*plain_run({0: 1, 1: 1}), opened(after, 2, [0]), Used(2, 0, 3, [(0, 0, 8, 0, 1)]), Closed((1, 0, 2, 0))]
    assert [e.repeated for e in audit(lines).epochs] == [4]


def test_a_sample_that_was_never_assigned_but_is_claimed_is_found() -> None:
    after = Assignment(Position(0, 8, 2), 1, 12, 4, epochs=1)
    lines: list[Line] = [opened(after, 1, [0]), Used(1, 0, 3, [(0, 8, 12, 0, 1)]), Closed((1, 0, 3, 0))]
    (epoch,) = audit(lines).epochs
    assert (epoch.lost, epoch.committed) == (8, 4)


def test_requeued_samples_that_were_never_redone_are_found() -> None:
    lines = [*plain_run({0: 2, 1: 1}), Closed((1, 0, 2, 0), [(0, 6, 8)])]
    (epoch,) = audit(lines).epochs
    assert (epoch.samples, epoch.lost, epoch.committed) == (8, 2, 6)


def test_a_run_that_was_stopped_may_put_off_what_it_has_to_make_up_for() -> None:
    found = audit([*plain_run({0: 1}), Closed((0, 4, 1, 0), [(0, 2, 4)], stopped_early=True)])
    assert found.is_clean
    assert [e.samples for e in found.epochs] == [2]


def test_samples_that_a_failed_worker_did_not_report_are_confirmed_by_the_others() -> None:
    after = Assignment(Position(0, 4, 1), 1, 8, 4, epochs=1)
    lines = [*plain_run({0: 1}), opened(after, 2, [0]), Used(2, 0, 2, [(0, 4, 8, 0, 1)]), Closed((1, 0, 2, 0))]
    found = audit(lines)
    assert found.is_clean
    assert found.confirmed == 2


def test_what_was_used_after_the_checkpoint_counts_as_not_used() -> None:
    again = Assignment(Position(), 2, 8, 4, epochs=1)
    lines = [*plain_run({0: 2, 1: 1}), opened(again, 2, [0, 1]), *_used(again, 2, 0, 2), *_used(again, 2, 1, 2)]
    found = audit([*lines, Closed((1, 0, 2, 0))])
    assert found.is_clean
    assert found.redone == 6


def test_lines_come_in_any_order_from_several_workers(tmp_path) -> None:
    start, *others = plain_run({0: 2, 1: 2})
    file = LedgerFile(tmp_path / "ledger.jsonl")
    for line in (others[1], start, start, Closed((1, 0, 2, 0)), others[0]):
        file.add(line, now=0.0)
        file.write(now=0.5)
    assert (tmp_path / "ledger.jsonl").read_bytes() == b"", "it may not be complete yet"
    file.write(now=1.0)
    file.close()
    with (tmp_path / "ledger.jsonl").open("ab") as cut_off:
        cut_off.write(b'{"type":"us')
    assert audit_file(tmp_path / "ledger.jsonl").is_clean
    assert audit_file(tmp_path / "ledger.jsonl").is_complete


@given(histories(), st.data())
def test_lines_that_the_driver_had_not_written_are_put_back_from_the_checkpoint(
    lines: list[Line], data: st.DataObject
) -> None:
    recent = RecentLines("session.0.0")
    texts = [recent.add(line, now=0.0).decode() for line in lines[:-1]]  # the end is written when all is saved
    keyed = [decode(text.encode()) for text in texts]
    is_written = data.draw(st.lists(st.booleans(), min_size=len(texts), max_size=len(texts)))
    earlier = [decode(RecentLines("before.0.0").add(line, now=0.0)) for line in plain_run({0: 1})]
    later = [decode(RecentLines("after.0.0").add(line, now=0.0)) for line in plain_run({1: 1})]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        there = [line for line, written in zip(keyed, is_written, strict=True) if written]
        has_later = bool(there) and data.draw(st.booleans())  # else it was the last session, and the lines come last
        path.write_bytes(b"".join(encode(x) + b"\n" for x in [*earlier, *there, *(later if has_later else [])]))
        put_back(path, texts)
        found = list(read_ledger(path))
        whole = [*earlier, *keyed, *(later if has_later else [])]
        assert sorted(line.key for line in found) == sorted(line.key for line in whole)
        assert audit(line for line in found if line.key.startswith("session")) == audit(keyed)
        assert [line for line in found if not line.key.startswith("session")] == [x for x in whole if x not in keyed]
        put_back(path, texts)
        assert list(read_ledger(path)) == found, "what is there is not added again"
        assert [entry.name for entry in Path(folder).iterdir()] == ["ledger.jsonl"]


def test_only_lines_that_may_not_be_on_disk_are_kept() -> None:
    recent = RecentLines("s.1.0")
    opening, used, *_ = plain_run({0: 2, 1: 2})
    recent.add(opening, now=0.0)
    recent.add(used, now=5.0)
    assert [decode(t.encode()).key for t in recent.texts(YOUNG_S - 1)] == ["s.1.0.1", "s.1.0.2"]
    assert [decode(t.encode()).key for t in recent.texts(YOUNG_S + 1)] == ["s.1.0.2"]


def of_session(session: str, lines: list[Line]) -> list[Line]:
    """The lines as the driver of this session gets them, after its own first one."""
    began = Began("run", "process 1 on here", f"{session}.driver")
    return [began, *(msgspec.structs.replace(line, key=f"{session}.0.0.{n}") for n, line in enumerate(lines))]


@given(histories(), histories(), st.data())
def test_two_drivers_at_once_are_never_clean_however_their_lines_mix(one, other, data) -> None:
    first, second = of_session("a", one), of_session("b", other)
    # The second begins before the first has ended.
    at = data.draw(st.integers(1, len(first) - 1))
    mixed, rest = first[:at], [first[at:], second]
    assume(rest[0])
    mixed.append(rest[1].pop(0))
    while any(rest):
        mixed.append(data.draw(st.sampled_from([lines for lines in rest if lines])).pop(0))
    found = audit(mixed)
    assert not found.is_clean
    assert found.problems


@given(histories())
def test_a_run_that_is_resumed_in_another_session_is_clean(lines: list[Line]) -> None:
    views = [n for n, line in enumerate(lines) if isinstance(line, Opened)]
    middle = views[len(views) // 2]
    found = audit([*of_session("a", lines[:middle]), *of_session("b", lines[middle:])])
    assert found.is_clean, found


def test_other_data_begins_a_new_epoch_and_the_rest_of_the_last_one_is_left_out() -> None:
    after = Assignment(Position(1, 0, 1), 1, 6, 3, epochs=2)
    line = msgspec.structs.replace(opened(after, 2, [0]), data_changed=True)
    lines = [*plain_run({0: 1, 1: 1}), line, *_used(after, 2, 0, 3), Closed((2, 0, 3, 0))]
    found = audit(lines)
    assert found.is_clean, found
    assert [(e.samples, e.committed) for e in found.epochs] == [(4, 4), (6, 6)]


def test_another_number_of_samples_within_an_epoch_is_a_problem() -> None:
    after = Assignment(Position(0, 4, 1), 1, 6, 4, epochs=1)
    found = audit([*plain_run({0: 1, 1: 1}), opened(after, 2, [0]), *_used(after, 2, 0, 2)])
    assert not found.is_clean
    assert "8" in found.problems[0]
    assert "6" in found.problems[0]
