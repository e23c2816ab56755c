"""Where torch's own layers have the samples, if the shape of a tensor leaves that open.

Here: `axis_in_torch_layers`, for a call of dropout inside of `nn.MultiheadAttention` and the transformer layers, which
may be sequence-first. A tensor of shape (16, 16, 8) says nothing, but the layer does. Only such shapes are looked up,
because finding the layer takes a microsecond. Not here: all other shapes (`dropout.py`).
"""

from __future__ import annotations

import sys

from torch import nn
from torch.nn import functional as F

_DEPTH = 16
"""How many callers to look at: from dropout to the layer there are about ten."""
_ATTENTION = F.multi_head_attention_forward.__code__
_LAYERS = (nn.TransformerEncoderLayer.forward.__code__, nn.TransformerDecoderLayer.forward.__code__)


def axis_in_torch_layers() -> int | None:
    """The dimension of the samples in the tensor that torch's layer is dropping from; None outside of such layers."""
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame.f_code is _ATTENTION:
            return 0  # (samples * heads, ...), or (samples, heads, ...)
        if frame.f_code in _LAYERS:
            return 0 if frame.f_locals["self"].self_attn.batch_first else 1
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
