"""Scripts with everyday features of training loops, for tests that run them with one worker and with many.

Each is a complete script under plain python too. `script(body)` puts the data and the end around a loop.
"""

from __future__ import annotations

HEAD = """
import os, torch, syncline
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(103, 12)
targets = (inputs[:, :5].sum(1) > 0).long()
data = TensorDataset(inputs, targets)
worker = syncline.worker()
"""
NET = "model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 2))\n"
SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
PLAIN_LOOP = """
loader = DataLoader(data, batch_size=10, shuffle=True)
model, optimizer, batches = worker.prepare(model, optimizer, loader)
for epoch in range(2):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
"""
PLAIN = HEAD + NET + SGD + PLAIN_LOOP

ACCUMULATED = (
    HEAD
    + NET
    + SGD
    + """
model, optimizer, batches = worker.prepare(model, optimizer, DataLoader(data, batch_size=10, shuffle=True))
for epoch in range(2):
    for i, (x, y) in enumerate(batches):
        (F.cross_entropy(model(x), y) / 4).backward()
        if i % 4 == 3 or i == len(batches) - 1:
            optimizer.step()
            optimizer.zero_grad()
"""
)
IN_A_CONTEXT = (
    HEAD
    + NET
    + SGD
    + """
model, optimizer, batches = worker.prepare(model, optimizer, DataLoader(data, batch_size=10, shuffle=True))
for epoch in worker.epochs(2):
    for x, y in batches:
        with worker.accumulate(4):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
"""
)
CLIPPED = PLAIN.replace(
    "        optimizer.step()\n",
    "        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n        optimizer.step()\n",
)
CLIPPED_BY_VALUE = CLIPPED.replace(
    "clip_grad_norm_(model.parameters(), 0.1)", "clip_grad_value_(model.parameters(), 0.01)"
)
SCALED = (
    HEAD
    + NET
    + SGD
    + """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=7)
model, optimizer, batches, scaler = worker.prepare(
    model, optimizer, DataLoader(data, batch_size=10, shuffle=True), scaler
)
for epoch in range(2):
    for i, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if epoch == 1 and i == 3 and worker.rank == worker.size - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
worker.log(scale=scaler.get_scale())
"""
)
ADVERSARIAL = (
    HEAD
    + """
maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12))
judge = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1))
of_maker = torch.optim.Adam(maker.parameters(), lr=0.01)
of_judge = torch.optim.Adam(judge.parameters(), lr=0.01)
maker, judge, of_maker, of_judge = worker.prepare(maker, judge, of_maker, of_judge)
batches = worker.prepare(DataLoader(data, batch_size=10, shuffle=True))
for epoch in range(2):
    for x, y in batches:
        noise = x[:, :4]
        of_judge.zero_grad()
        fake = maker(noise)
        (F.softplus(-judge(x)).mean() + F.softplus(judge(fake.detach())).mean()).backward()
        of_judge.step()
        of_maker.zero_grad()
        F.softplus(-judge(fake)).mean().backward()
        of_maker.step()
model = nn.ModuleList([maker, judge])
"""
)
SAMPLING = (
    HEAD
    + """
maker = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 12))
judge = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.LeakyReLU(), nn.Linear(16, 1))
of_maker = torch.optim.Adam(maker.parameters(), lr=0.01)
of_judge = torch.optim.Adam(judge.parameters(), lr=0.01)
fixed_noise = torch.randn(8, 4)
batches = worker.prepare(maker, judge, of_maker, of_judge, DataLoader(data, batch_size=10, shuffle=True))[-1]
for epoch in range(2):
    for i, (real, _) in enumerate(batches, 0):
        judge.zero_grad()
        F.softplus(-judge(real)).mean().backward()
        fake = maker(torch.randn(len(real), 4))
        F.softplus(judge(fake.detach())).mean().backward()
        of_judge.step()
        maker.zero_grad()
        F.softplus(-judge(fake)).mean().backward()
        of_maker.step()
        if i % 4 == 0:
            fake = maker(fixed_noise)
"""
)
"""As torch's DCGAN example: every few batches it computes in training mode, which exchanges batch statistics."""
UNFROZEN = (
    HEAD
    + NET
    + """
for p in model[0].parameters():
    p.requires_grad_(False)
"""
    + SGD
    + PLAIN_LOOP.replace(
        "    for x, y in batches:\n",
        "    if epoch == 1:\n        model[0].requires_grad_(True)\n    for x, y in batches:\n",
    )
)
ADDED_BY_EPOCH = (
    HEAD
    + NET
    + """
optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
"""
    + PLAIN_LOOP.replace(
        "    for x, y in batches:\n",
        "    if epoch == 1:\n"
        "        optimizer.add_param_group({'params': model[0].parameters(), 'lr': 0.05})\n"
        "    for x, y in batches:\n",
    )
)
ADDED_BY_STEP = (
    HEAD
    + """
model = nn.Sequential(nn.Linear(12, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
model[:3].requires_grad_(False)
optimizer = torch.optim.AdamW(model[4].parameters(), lr=0.02)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
batches = worker.prepare(model, optimizer, schedule, DataLoader(data, batch_size=10, shuffle=True))[-1]
for epoch in worker.epochs(2):
    for x, y in batches:
        if worker.step in (4, 13):
            layer = model[2 if worker.step == 4 else 0].requires_grad_(True)
            optimizer.add_param_group({"params": list(layer.parameters()), "lr": optimizer.param_groups[0]["lr"] / 2})
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
"""
)
LOSS_WEIGHT = (
    HEAD
    + NET
    + """
loss_weight = nn.Parameter(torch.tensor(1.0))
optimizer = torch.optim.SGD([*model.parameters(), loss_weight], lr=0.05, momentum=0.9)
"""
    + PLAIN_LOOP.replace(
        "F.cross_entropy(model(x), y).backward()",
        "(F.cross_entropy(model(x), y) * loss_weight.exp() - loss_weight).backward()",
    )
    + "model = nn.ParameterList([*model.parameters(), loss_weight])\n"
)
UNUSED = (
    HEAD
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.often, self.rarely = nn.Linear(12, 2), nn.Linear(12, 2)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.often(x) + (self.rarely(x) if self.calls % 3 == 0 else 0.0)

model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
"""
    + PLAIN_LOOP
)
SUMMED = (
    PLAIN.replace("F.cross_entropy(model(x), y)", "F.cross_entropy(model(x), y, reduction='sum')")
    .replace("lr=0.1", "lr=0.01")
    .replace("optimizer, loader)", "optimizer, loader, loss='sum')")
)
CLOSURE = (
    HEAD
    + NET
    + """
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
model, optimizer = worker.prepare(model, optimizer)
for x, y in worker.batches((inputs, targets), steps=6):
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss
    optimizer.step(closure)
"""
)
DRAWN = (
    HEAD
    + NET
    + SGD
    + """
def get_batch(split):
    chosen = torch.randint(len(inputs), (10,))
    return inputs[chosen], targets[chosen]

model, optimizer = worker.prepare(model, optimizer)
for x, y in worker.batches(lambda: get_batch("train"), steps=25):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
)
WITHOUT_BATCHES = (
    HEAD
    + NET
    + SGD
    + """
model, optimizer = worker.prepare(model, optimizer)
for step in range(15):
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
"""
)
SUMMED_WITHOUT_BATCHES = WITHOUT_BATCHES.replace("lr=0.1", "lr=0.001").replace(
    "(inputs), targets)", "(inputs), targets, reduction='sum')"
)
SAID_WITHOUT_BATCHES = SUMMED_WITHOUT_BATCHES.replace("model, optimizer)", "model, optimizer, loss='sum')")
RANDOM_WITHOUT_BATCHES = WITHOUT_BATCHES.replace("nn.ReLU()", "nn.Dropout(0.5)")
AGREED_SKIPS = PLAIN.replace(
    "        optimizer.zero_grad()\n",
    "        if worker.any((x[:, 0] > 2.0).any()):\n            continue\n        optimizer.zero_grad()\n",
)
LEFT_EARLY = PLAIN.replace(
    "    for x, y in batches:\n", "    for i, (x, y) in enumerate(batches):\n        if i == 7:\n            break\n"
)
NORMALIZED = PLAIN.replace("nn.ReLU()", "nn.BatchNorm1d(16)")
SAMPLERS = {
    "weighted": "sampler=torch.utils.data.WeightedRandomSampler(inputs[:, 0].exp(), 57)",
    "with replacement": "sampler=torch.utils.data.RandomSampler(data, replacement=True, num_samples=61)",
    "a subset": "sampler=torch.utils.data.SubsetRandomSampler(range(5, 77))",
    "without the last": "shuffle=True, drop_last=True",
}
SAMPLED = {
    name: PLAIN.replace("batch_size=10, shuffle=True", f"batch_size=10, {how}") for name, how in SAMPLERS.items()
}
IN_BUCKETS = (
    HEAD
    + NET
    + SGD
    + """
class Buckets:
    def __iter__(self):
        order = torch.randperm(103).tolist()
        yield from (order[:7], order[7:20], order[20:21], order[21:60], order[60:])
    def __len__(self):
        return 5
"""
    + PLAIN_LOOP.replace("batch_size=10, shuffle=True", "batch_sampler=Buckets()")
)

SPARSE = (
    HEAD
    + """
words = torch.randint(50, (103, 4))
data = TensorDataset(words, targets)
model = nn.Sequential(nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 2))
sparse = torch.optim.SparseAdam(model[0].parameters(), lr=0.01)
dense = torch.optim.Adam(model[1].parameters(), lr=0.01)
batches = worker.prepare(model, sparse, dense, DataLoader(data, batch_size=10, shuffle=True))[-1]
for epoch in range(2):
    for x, y in batches:
        sparse.zero_grad()
        dense.zero_grad()
        F.cross_entropy(model(x), y).backward()
        sparse.step()
        dense.step()
"""
)

SPARSE_ON_SOME = (
    HEAD
    + """
words = torch.randint(50, (103, 4))
data = TensorDataset(inputs, words, targets)
model = nn.ModuleList([nn.EmbeddingBag(50, 2, sparse=True), nn.Linear(12, 2)])
sparse = torch.optim.SparseAdam(model[0].parameters(), lr=0.01)
dense = torch.optim.Adam(model[1].parameters(), lr=0.01)
batches = worker.prepare(model, sparse, dense, DataLoader(data, batch_size=10, shuffle=True))[-1]
for epoch in range(2):
    for x, y, z in batches:
        sparse.zero_grad()
        dense.zero_grad()
        out, is_chosen = model[1](x), x[:, 0] > 1.2
        if is_chosen.any():
            out = out.index_add(0, is_chosen.nonzero()[:, 0], model[0](y[is_chosen]))
        F.cross_entropy(out, z).backward()
        sparse.step()
        dense.step()
"""
)
"""Some batches have rows for the embedding on one worker only, and some on none."""

AHEAD = (
    HEAD
    + """
import signal, pathlib
model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
loader = DataLoader(data, batch_size=10, shuffle=True)
model, optimizer, schedule, batches = worker.prepare(model, optimizer, schedule, loader)
micro_steps = 1


def die(place):
    for victim, step, where in KILLS:
        flag = pathlib.Path(f"{os.environ.get('KILLED', '')}-{victim}-{step}-{where}")
        if (victim, step, where) == (worker.rank, worker.step, place) and not flag.exists() and "KILLED" in os.environ:
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)


KILLS = []


def stream():
    for epoch in worker.epochs(2):
        yield from batches


stream = stream()
x, y = next(stream, (None, None))
while x is not None:
    for _ in range(micro_steps):
        die("before forward")
        loss = F.cross_entropy(model(x), y) / micro_steps
        die("after forward")
        x, y = next(stream, (None, None))
        die("after taking")
        loss.backward()
        die("after backward")
        if x is None:
            break
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    die("after clipping")
    optimizer.step()
    die("after the step")
    optimizer.zero_grad()
    schedule.step()
"""
)
"""Takes the next batch in the middle of a step, as nanoGPT does."""
AHEAD_ALIKE = AHEAD.replace(" nn.Dropout(0.2),", "")
"""Without random numbers, which depend on the number of workers."""

LARGE = PLAIN.replace(
    "nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 2)", "nn.Linear(12, 1200), nn.Linear(1200, 1200), nn.Linear(1200, 2)"
).replace("lr=0.1", "lr=0.01")
COMBINED_FIRST = (
    HEAD
    + NET
    + SGD
    + """
model, optimizer = worker.prepare(model, optimizer)
for step in range(worker.step, 15):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), targets)
    worker.mean(loss.item())
    loss.backward()
    optimizer.step()
"""
)

SAME_RESULT = {
    "plain": PLAIN, "accumulated": ACCUMULATED, "accumulated in a context": IN_A_CONTEXT, "clipped": CLIPPED,
    "clipped by value": CLIPPED_BY_VALUE, "scaled losses": SCALED, "two models and optimizers": ADVERSARIAL,
    "unfrozen later": UNFROZEN, "parameters added by epoch": ADDED_BY_EPOCH, "parameters added by step": ADDED_BY_STEP,
     "a parameter of the loss": LOSS_WEIGHT, "parameters used now and then": UNUSED,
    "a summed loss": SUMMED, "LBFGS": CLOSURE, "drawn batches": DRAWN, "no batches": WITHOUT_BATCHES,
    "a summed loss, no batches": SUMMED_WITHOUT_BATCHES, "a loss said to be a sum, no batches": SAID_WITHOUT_BATCHES,
    "dropout, no batches": RANDOM_WITHOUT_BATCHES,
    "skips that all agree on": AGREED_SKIPS, "epochs left early": LEFT_EARLY, "batch norm": NORMALIZED,
    "batches taken ahead": AHEAD_ALIKE,
    "accumulated and taken ahead": AHEAD_ALIKE.replace("micro_steps = 1", "micro_steps = 4"),
    **SAMPLED, "batches of different sizes": IN_BUCKETS, "sparse gradients": SPARSE,
    "sparse on some workers": SPARSE_ON_SOME, "a large model": LARGE,
}  # fmt: skip
"""Scripts that train the same with any number of workers."""
