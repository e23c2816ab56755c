"""Random training scripts train the same with one, two and three workers. These are real runs, so there are few."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from own_loop_scripts import HEAD
from real_runs import final_state, relative_difference
from real_runs import syncline as command

LOADERS = {
    "shuffled": "DataLoader(data, batch_size=10, shuffle=True)",
    "in order, dropping the last": "DataLoader(data, batch_size=9, drop_last=True)",
    "weighted": "DataLoader(data, 8, sampler=torch.utils.data.WeightedRandomSampler(inputs[:, 0].exp(), 70))",
    "in buckets": "DataLoader(data, batch_sampler=[list(range(0, 13)), list(range(13, 60)), list(range(60, 103))])",
}
OPTIMIZERS = {
    "SGD": "torch.optim.SGD(p, lr=0.05, momentum=0.9)",
    "AdamW": "torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)",
}
CLIPS = {
    "": "",
    "norm": "nn.utils.clip_grad_norm_(model.parameters(), 0.3)",
    "value": "nn.utils.clip_grad_value_(model.parameters(), 0.02)",
}


@dataclass(frozen=True)
class Loop:
    """A training script as its features."""

    loader: str
    optimizer: str
    clip: str
    accumulate: int
    has_two_optimizers: bool
    has_batch_norm: bool
    has_schedule: bool
    skips: bool

    def text(self) -> str:
        norm = "nn.BatchNorm1d(16)" if self.has_batch_norm else "nn.Tanh()"
        parts = (
            ["model[0].parameters()", "model[1:].parameters()"] if self.has_two_optimizers else ["model.parameters()"]
        )
        lines = [
            HEAD,
            # Without a bias: batch norm takes it out again, and Adam would make steps of the rounding in its gradient.
            f"model = nn.Sequential(nn.Linear(12, 16, bias=False), {norm}, nn.Linear(16, 2))",
            f"optimizers = [{OPTIMIZERS[self.optimizer]} for p in ({', '.join(parts)},)]",
            "schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]",
            f"batches = worker.prepare(model, *optimizers, *schedulers, {LOADERS[self.loader]})[-1]",
            "for epoch in worker.epochs(2):",
            "    for x, y in batches:",
            *(["        if worker.any((x[:, 1] > 2.3).any()):", "            continue"] if self.skips else []),
            f"        (F.cross_entropy(model(x), y) / {self.accumulate}).backward()",
            "        is_last = worker.batch == len(batches) - 1",
            f"        if worker.batch % {self.accumulate} == {self.accumulate - 1} or is_last:",
            *([f"            {CLIPS[self.clip]}"] if self.clip else []),
            "            for o in optimizers:",
            "                o.step()",
            "            for o in optimizers:",
            "                o.zero_grad()",
            *(["    for s in schedulers:", "        s.step()"] if self.has_schedule else []),
        ]
        return "\n".join(lines) + "\n"


LOOPS = st.builds(
    Loop,
    loader=st.sampled_from(sorted(LOADERS)),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    clip=st.sampled_from(sorted(CLIPS)),
    accumulate=st.integers(1, 3),
    has_two_optimizers=st.booleans(),
    has_batch_norm=st.booleans(),
    has_schedule=st.booleans(),
    skips=st.booleans(),
)


@settings(max_examples=6, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
@given(loop=LOOPS)
def test_random_loops_train_the_same_with_any_number_of_workers(loop):
    found, audits = [], []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "loop.py").write_text(loop.text())
        for workers in (1, 2, 3):
            done = command("run", "loop.py", "--workers", str(workers), "--name", f"with-{workers}", cwd=folder)
            assert done.code == 0, done.err
            found.append(final_state(folder / "runs" / f"with-{workers}")["model"])
            audit = command("audit", f"runs/with-{workers}", cwd=folder)
            assert audit.code == 0, audit.out
            audits.append(audit.out)
    assert audits[0] == audits[1] == audits[2]
    for other in found[1:]:
        assert relative_difference(found[0], other) < 1e-4
