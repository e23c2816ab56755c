"""How a flat tensor of float32 values becomes the bytes that travel, and comes back. One codec, one file."""

from __future__ import annotations

from syncline.algorithms.codecs.bf16 import BF16
from syncline.algorithms.codecs.codec import Codec
from syncline.algorithms.codecs.exact import Exact
from syncline.algorithms.codecs.feedback import Compensated, ErrorFeedback, compensate
from syncline.algorithms.codecs.int8 import Int8
from syncline.algorithms.codecs.onebit import OneBit
from syncline.algorithms.codecs.powersgd import PowerSGD
from syncline.algorithms.codecs.topk import TopK

__all__ = [
    "BF16",
    "Codec",
    "Compensated",
    "ErrorFeedback",
    "Exact",
    "Int8",
    "OneBit",
    "PowerSGD",
    "TopK",
    "compensate",
]
