"""A worker computes on the device that is its own, whatever its process is shown."""

from __future__ import annotations

import pytest
import torch

from syncline.compute.device import device_here


@pytest.mark.parametrize(
    ("planned", "visible", "is_then"),
    [
        ("cpu", None, "cpu"),
        ("cpu", "0", "cpu"),
        ("cuda:2", None, "cuda:2"),
        ("cuda:2", "", "cuda:2"),
        ("cuda:2", "0,1,2", "cuda:2"),
        ("cuda:2", "5", "cuda:0"),
        ("cuda:2", "GPU-8a2b", "cuda:0"),
        ("mps", "0", "mps"),
    ],
)
def test_of_one_visible_gpu_it_takes_that_one(planned, visible, is_then):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert device_here(planned, environment) == torch.device(is_then)
