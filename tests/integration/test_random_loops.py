"""Random training scripts train the same with one, two and three workers. These are real runs: few in the gate."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from own_loop_scripts import HEAD
from real_runs import final_state, relative_difference
from real_runs import syncline as command

SAMPLERS = """
class Zigzag(torch.utils.data.Sampler):
    def __iter__(self):
        order = torch.randperm(103).tolist()
        yield from (order[i // 2] if i % 2 else order[-1 - i // 2] for i in range(90))
    def __len__(self):
        return 90

class Buckets:
    def __iter__(self):
        order = torch.randperm(103).tolist()
        yield from (order[:7], order[7:20], order[20:22], order[22:60], order[60:])
    def __len__(self):
        return 5
"""
LOADERS = {
    "shuffled": "DataLoader(data, batch_size=10, shuffle=True)",
    "in order, dropping the last": "DataLoader(data, batch_size=9, drop_last=True)",
    "weighted": "DataLoader(data, 8, sampler=torch.utils.data.WeightedRandomSampler(inputs[:, 0].exp(), 70))",
    "with replacement": "DataLoader(data, 9, sampler=torch.utils.data.RandomSampler(data, True, 75))",
    "a subset": "DataLoader(data, 6, sampler=torch.utils.data.SubsetRandomSampler(range(5, 61)))",
    "a sampler of its own": "DataLoader(data, 8, sampler=Zigzag())",
    "lists of batches": "DataLoader(data, batch_sampler=[[*range(13)], [*range(13, 60)], [*range(60, 103)]])",
    "random buckets": "DataLoader(data, batch_sampler=Buckets())",
}
OPTIMIZERS = {
    "SGD": "torch.optim.SGD(p, lr=0.05, momentum=0.9)",
    "AdamW": "torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)",
    "Adagrad": "torch.optim.Adagrad(p, lr=0.02)",
}
PARTS = {
    "one": ["model.parameters()"],
    "two at once": ["model[0].parameters()", "model[1:].parameters()"],
    "two in turn": ["model[0].parameters()", "model[1:].parameters()"],
}
"""The parameters of each optimizer."""
CLIPS = {
    "": "",
    "norm": "nn.utils.clip_grad_norm_(model.parameters(), 0.3)",
    "value": "nn.utils.clip_grad_value_(model.parameters(), 0.02)",
}
MODELS = {
    "one": "model = whole",
    "two": "model = nn.ModuleList(whole)\nencoder, head = nn.Sequential(*whole[:2]), whole[2]",
}


@dataclass(frozen=True)
class Loop:
    """A training script as its features."""

    loader: str
    models: str
    optimizer: str
    optimizers: str
    clip: str
    accumulate: int
    has_batch_norm: bool
    has_schedule: bool
    has_scaler: bool
    skips: bool

    def text(self) -> str:
        return "\n".join([*self._preparation(), *self._batch(), *self._step(), *self._end_of_epoch()]) + "\n"

    def _preparation(self) -> list[str]:
        norm = "nn.BatchNorm1d(16)" if self.has_batch_norm else "nn.Tanh()"
        models = "model" if self.models == "one" else "encoder, head"
        return [
            HEAD + SAMPLERS,
            # Without a bias: batch norm takes it out again, and Adam would make steps of the rounding in its gradient.
            f"whole = nn.Sequential(nn.Linear(12, 16, bias=False), {norm}, nn.Linear(16, 2))",
            MODELS[self.models],
            f"optimizers = [{OPTIMIZERS[self.optimizer]} for p in ({', '.join(PARTS[self.optimizers])},)]",
            "schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]",
            f"scaler = torch.amp.GradScaler('cpu', init_scale=2.0**10, enabled={self.has_scaler})",
            f"prepared = worker.prepare({models}, scaler, *optimizers, *schedulers, {LOADERS[self.loader]})",
            "batches = prepared[-1]",
        ]

    def _batch(self) -> list[str]:
        outputs = "model(x)" if self.models == "one" else "head(encoder(x))"
        return [
            "for epoch in worker.epochs(2):",
            "    for x, y in batches:",
            *(["        if worker.any((x[:, 1] > 2.3).any()):", "            continue"] if self.skips else []),
            f"        loss = F.cross_entropy({outputs}, y) / {self.accumulate}",
            # Somewhere a gradient overflows: on one worker, and all leave the step out.
            *(["        loss = loss * (float('inf') if (x[:, 2] > 2.5).any() else 1.0)"] if self.has_scaler else []),
            "        scaler.scale(loss).backward()",
        ]

    def _step(self) -> list[str]:
        chosen = "[optimizers[worker.batch % 2]]" if self.optimizers == "two in turn" else "optimizers"
        is_due = f"worker.batch % {self.accumulate} == {self.accumulate - 1} or worker.batch == len(batches) - 1"
        return [
            f"        if {is_due}:",
            f"            chosen = {chosen}",
            "            for o in chosen:",
            "                scaler.unscale_(o)",
            *([f"            {CLIPS[self.clip]}"] if self.clip else []),
            "            for o in chosen:",
            "                scaler.step(o)",
            "            scaler.update()",
            "            for o in optimizers:",
            "                o.zero_grad()",
        ]

    def _end_of_epoch(self) -> list[str]:
        return ["    for s in schedulers:", "        s.step()"] if self.has_schedule else []


LOOPS = st.builds(
    Loop,
    loader=st.sampled_from(sorted(LOADERS)),
    models=st.sampled_from(sorted(MODELS)),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    optimizers=st.sampled_from(sorted(PARTS)),
    clip=st.sampled_from(sorted(CLIPS)),
    accumulate=st.integers(1, 3),
    has_batch_norm=st.booleans(),
    has_schedule=st.booleans(),
    has_scaler=st.booleans(),
    skips=st.booleans(),
)
EXAMPLES = 60 if settings().max_examples >= 1_000 else 6
"""More in `make nightly`, whose profile asks for a thousand: each example is six processes."""


@pytest.mark.timeout(30 * EXAMPLES)
@settings(max_examples=EXAMPLES, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
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
