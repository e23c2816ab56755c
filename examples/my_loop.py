"""Run your own training loop on several workers.

    python my_loop.py                        one process
    syncline run my_loop.py --workers 4      four workers, the same parameters

Only the lines marked with + were added.
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

import syncline  # +

torch.manual_seed(0)
inputs = torch.randn(1000, 20)
targets = (inputs[:, :5].sum(1) > 0).long()
loader = DataLoader(TensorDataset(inputs, targets), batch_size=64, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loss_fn = torch.nn.CrossEntropyLoss()

worker = syncline.worker()  # +
model, optimizer, batches = worker.prepare(model, optimizer, loader)  # +

for epoch in range(3):
    for x, y in batches:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()

accuracy = (model(inputs).argmax(1) == targets).float().mean()
print(f"accuracy {accuracy:.4f}, checksum {sum(p.double().sum() for p in model.parameters()):.6f}")
