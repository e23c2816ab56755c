"""How entries are measured: the counting by hand, the killing with processes that only sleep and spin."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from syncline.errors import SynclineError
from syncline.lab.bench.peer_recipes import PeerFramework, adapters_folder, all_peers
from syncline.lab.bench.processes import MARK
from syncline.lab.survey.catalog import CATALOG, PART_KINDS
from syncline.lab.survey.probes import PROBES
from syncline.lab.survey.probes.effort import changed_lines, code_lines
from syncline.lab.survey.probes.kill import End, choose_victim, judge
from syncline.lab.survey.probes.memory_sampler import peak_memory
from syncline.lab.survey.probes.parts import count_parts
from syncline.lab.survey.probes.probe import Bench, last_event
from syncline.lab.survey.values import Absent

SOURCE = '''"""A docstring
of two lines."""

import os  # with a comment


def f(
    a,
):
    """What it does."""
    # a comment
    return """not
a docstring"""
'''


def bench(key: str, scratch: Path) -> Bench:
    peer = next(p for p in all_peers(adapters_folder()) if p.key == key)
    return Bench(
        entry=CATALOG[0], peer=peer, python=Path(sys.executable), environments=scratch, is_quick=True, scratch=scratch
    )


def test_every_entry_has_a_probe_and_every_probe_an_entry():
    assert {entry.probe for entry in CATALOG} == set(PROBES)


def test_code_lines_leave_out_comments_and_docstrings():
    assert code_lines(SOURCE) == [
        "import os  # with a comment", "def f(", "a,", "):", 'return """not', 'a docstring"""',
    ]  # fmt: skip


def test_changed_lines_are_counted_in_both_directions():
    assert changed_lines(["a", "b", "c"], ["a", "x", "y", "c"]) == (2, 1)
    assert changed_lines(["a"], ["a"]) == (0, 0)


def test_torch_is_counted_as_by_hand(tmp_path):
    """By hand: the tables of torch's reference for its optimizers, losses, initializers and activations."""
    found = count_parts(bench("ddp", tmp_path)).values
    by_hand = {"optimizers": 15, "losses": 22, "initializers": 14, "activations": 28}
    for kind, count in by_hand.items():
        assert found[kind] == pytest.approx(count, rel=0.05), kind
    assert isinstance(found["metrics"], Absent)


def test_syncline_is_counted_as_its_own_list_says(tmp_path):
    from syncline.cli.kinds import everything

    found = count_parts(bench("syncline-train", tmp_path)).values
    assert found == {kind: float(len(everything(kind))) for kind in PART_KINDS}


def test_an_adapter_without_a_count_says_so(tmp_path):
    peer = PeerFramework(key="x", folder=tmp_path, name="X", what="X.", start=())
    without = Bench(
        entry=CATALOG[0], peer=peer, python=Path(sys.executable), environments=tmp_path, is_quick=True, scratch=tmp_path
    )
    assert all(isinstance(value, Absent) for value in count_parts(without).values.values())


def test_the_youngest_of_the_processes_that_compute_is_the_victim():
    before = {1: (100, 5), 2: (0, 50), 3: (0, 60), 4: (500, 70)}
    after = {1: (101, 5), 2: (40, 50), 3: (45, 60), 4: (500, 70), 5: (900, 99)}
    assert choose_victim(before, after, workers=2) == 3


def test_no_victim_is_chosen_while_nothing_computes():
    with pytest.raises(SynclineError):
        choose_victim({1: (5, 1), 2: (5, 1)}, {1: (5, 1), 2: (5, 1)}, workers=2)


@pytest.mark.parametrize(
    ("end", "holds"),
    [
        (End(0, 3.0, '{"event": "measured", "steps": 95}\n'), True),
        (End(0, 3.0, '{"event": "measured", "steps": 50}\n'), False),  # exited early, and calls it success
        (End(0, 3.0, "nothing\n"), False),
        (End(1, 0.5, '{"event": "measured", "steps": 100}\n'), False),
        (End(None, 60.0, ""), False),
    ],
)
def test_a_run_survives_a_kill_only_if_it_completes_its_steps(end, holds):
    check = judge(end, steps=100)
    assert check.holds is holds
    assert check.seen


def test_peak_memory_is_that_of_marked_processes_of_this_one():
    hold = "import sys, time; held = bytearray(80_000_000); print(flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", hold], env={MARK: "memory-test"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with peak_memory() as peak:
        assert process.stdout is not None
        process.stdout.readline()
        deadline = time.monotonic() + 20
        while peak.bytes < 80e6 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.communicate(b"")
    assert 80e6 <= peak.bytes < 250e6


def test_memory_that_was_never_sampled_is_an_error():
    with pytest.raises(SynclineError), peak_memory():
        pass


def test_an_event_without_its_fields_is_an_error():
    with pytest.raises(SynclineError, match="without seconds"):
        last_event('{"event": "measured", "steps": 3}\n', "measured", "steps", "seconds")
