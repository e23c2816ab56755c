"""Train with several workers from Python: set `workers=`.

python from_python.py
"""

import torch
from torch import nn

import syncline

inputs = torch.randn(4000, 10)
targets = inputs @ torch.randn(10, 1) + 0.1 * torch.randn(4000, 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


result = syncline.train(
    model=Net(),
    data=(inputs[:3500], targets[:3500]),
    test=(inputs[3500:], targets[3500:]),
    loss="mse_loss",
    optimizer=syncline.adam(lr=0.01),
    metrics=["mean_squared_error", "r2_score"],
    workers=2,
    epochs=5,
)
print(f"R2 on new data: {result.metrics['test/r2_score']:.3f}; the run is in {result.run_dir}")
print(f"prediction for the first new sample: {result.model(inputs[3500:3501]).item():.3f}")
