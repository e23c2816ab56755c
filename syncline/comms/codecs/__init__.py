"""How a flat tensor of float32 values becomes the bytes that travel, and comes back. One codec, one file."""

from __future__ import annotations

from syncline.comms.codecs import powersgd
from syncline.comms.codecs.codec import Codec
from syncline.comms.codecs.feedback import Compensated, ErrorFeedback, compensate
from syncline.comms.codecs.floats import BF16Codec, ExactCodec
from syncline.comms.codecs.int8 import Int8Codec
from syncline.comms.codecs.onebit import OneBitCodec
from syncline.comms.codecs.topk import TopKCodec

__all__ = [
    "BF16Codec",
    "Codec",
    "Compensated",
    "ErrorFeedback",
    "ExactCodec",
    "Int8Codec",
    "OneBitCodec",
    "TopKCodec",
    "compensate",
    "powersgd",
]
