"""Torch's parts. Metrics and regularizers have no place of their own: torchmetrics is another package."""

import inspect

import torch
from peer_protocol import print_event
from torch import nn

CONTAINERS = {nn.Container, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict}


def classes(module, base):
    found = {v for n, v in vars(module).items() if inspect.isclass(v) and issubclass(v, base) and n[0] != "_"}
    return {c for c in found if c is not base}


losses = {getattr(nn, name) for name in nn.modules.loss.__all__} - {nn.NLLLoss2d}  # NLLLoss under a deprecated name
activations = {getattr(nn, name) for name in nn.modules.activation.__all__} - {nn.MultiheadAttention}
layers = classes(nn, nn.Module) - losses - activations - CONTAINERS - {nn.NLLLoss2d}
initializers = [name for name in vars(nn.init) if name[0] != "_" and name.endswith("_")]
parts = {
    "activations": [c.__name__ for c in activations],
    "initializers": initializers,
    "losses": [c.__name__ for c in losses],
    "layers": [c.__name__ for c in layers],
    "optimizers": [c.__name__ for c in classes(torch.optim, torch.optim.Optimizer)],
}
print_event(event="parts", version=torch.__version__, parts={kind: sorted(names) for kind, names in parts.items()})
