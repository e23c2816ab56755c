"""After a shrink, every view names a worker by its worker_id, although its rank in the new View is another one."""

from __future__ import annotations

import io

import pytest
from scripted_run import START, plan, started

from syncline.observe.report.record import record_of
from syncline.observe.report.report_page import as_html
from syncline.observe.state import RunState
from syncline.observe.strategy_stats import strategy_stats
from syncline.observe.terminal.plain import PlainLines
from syncline.observe.terminal.quiet import Quiet
from syncline.observe.terminal.screen import draw
from syncline.observe.terminal.strategy_report import as_lines
from syncline.telemetry.events import (
    Event,
    ExchangeStats,
    FatalFailure,
    Progress,
    Recovered,
    RunEnded,
    WarningMessage,
    WorkerFailure,
    WorkerReady,
    WorkerSlow,
)


def progress(worker_id: int, step: int) -> Progress:
    return Progress(
        time=START + step, worker_id=worker_id, epoch=0, step=step, samples=64, seconds=1.0, cursor=64 * step, loss=0.5
    )


@pytest.fixture
def events() -> list[Event]:
    """Worker 1 of three fails without a replacement. Worker 2 has rank 1 from then on; it is slow, warns and fails."""
    ready = [
        WorkerReady(time=START + 1, worker_id=i, pid=100 + i, parameters=9, collective="SharedMemory") for i in range(3)
    ]
    return [
        started(plan(3)),
        *ready,
        *(progress(i, 5) for i in range(3)),
        WorkerFailure(
            time=START + 6, worker_id=1, name="worker 1", cause="was killed", step=5, workers=2, is_replaced=False
        ),
        Recovered(time=START + 7, view=2, members=[0, 2], step=6),
        *(progress(i, 10) for i in (0, 2)),
        ExchangeStats(time=START + 10, worker_id=2, step=10, steps=5, exchanges=5, bytes_sent=100),
        WorkerSlow(
            time=START + 11, worker_id=2, step=10, is_slow=True, work_s=0.04, median_s=0.01, slowest_phase="data"
        ),
        WarningMessage(time=START + 12, worker_id=2, message="Step skipped."),
        FatalFailure(time=START + 13, worker_id=2, message="The loss became nan."),
        RunEnded(time=START + 13, reason="failed", message="The loss became nan on worker 2."),
    ]


def test_plain_and_quiet_lines_name_it_by_its_id(events):
    out, err = io.StringIO(), io.StringIO()
    for view in (PlainLines(out, err), Quiet(io.StringIO(), err)):
        for event in events[:-1]:
            view.on_event(event)
        view.close()
    lines = (out.getvalue() + err.getvalue()).splitlines()
    assert [line for line in lines if "worker 1" in line and "was killed" not in line] == []
    for fact in ("is slow", "Step skipped", "failed: The loss became nan"):
        found = [line for line in lines if fact in line]
        assert found
        assert all("worker 2" in line or fact == "Step skipped" for line in found)


def test_the_screen_lists_the_members_by_their_ids(events):
    state = RunState()
    for event in events[:-4]:
        state.apply(event)
    lines = draw(state, width=100, height=40).plain.splitlines()
    assert any("✗ 1 failed" in line for line in lines)
    assert any("● 2 " in line for line in lines)
    assert state.workers[2].step == 10
    assert state.workers[1].step == 5


def test_the_report_has_the_same_ids_in_its_table_chart_and_timeline(events):
    record = record_of("run", events)
    page = as_html([record])
    assert sorted(record.workers) == [0, 1, 2]
    assert [m.text.split(" ")[1] for m in record.marks if m.kind in ("failure", "slow")] == ["1", "2"]
    assert '<th scope="row">worker 2</th>' in page


def test_the_strategy_report_has_the_same_ids(events):
    (share,) = strategy_stats(events).shares
    assert share.worker_id == 2
    assert any(line.split()[:2] == ["2", "5"] for line in as_lines(strategy_stats(events)))
