"""The comparison with and without fault tolerance is fair: both do the same, and the one that is on really is."""

from __future__ import annotations

import time

import torch

from syncline.bench import tolerance
from syncline.bench.overhead import as_in_a_worker, make_workload
from syncline.data.audit import audit_file


def test_both_come_to_the_same_parameters_and_only_one_keeps_an_account(tmp_path):
    work = make_workload(batch=8, steps=6)
    with as_in_a_worker():
        off_ends, off = tolerance.run(work, tmp_path, time.perf_counter, is_on=False)
        assert not (tmp_path / "ledger.jsonl").exists()
        on_ends, on = tolerance.run(work, tmp_path, time.perf_counter, is_on=True)
    assert len(off_ends) == len(on_ends) == 6
    assert on_ends == sorted(on_ends)
    for name, tensor in off.state_dict().items():
        assert torch.equal(on.state_dict()[name], tensor), name
    (epoch,) = audit_file(tmp_path / "ledger.jsonl").epochs
    assert (epoch.committed, epoch.lost, epoch.repeated) == (48, 0, 0)
