"""Which device a worker computes on, as its own process sees it."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch


def device_here(planned: str, environment: Mapping[str, str] = os.environ) -> torch.device:
    """The planned device. If the process sees only one GPU, as under Ray, that GPU has index 0.

    >>> device_here("cuda:3", {"CUDA_VISIBLE_DEVICES": "3"}), device_here("cuda:3", {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    (device(type='cuda', index=0), device(type='cuda', index=3))
    """
    device = torch.device(planned)
    visible = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return torch.device("cuda", 0) if device.type == "cuda" and len(visible) == 1 else device
