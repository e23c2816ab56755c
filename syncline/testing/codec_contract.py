"""The contract of codecs, as one call: `check_codec`.

    check_codec(TopKCodec(0.01))
    check_codec(MyCodec())

Here: the promises of `syncline.comms.codecs.codec.Codec`, each a check of its own in `CONTRACT`, on tensors of the
sizes and kinds where mistakes happen. Not here: how large a codec's error may be in one exchange, since error feedback
sends the rest later; PowerSGD, which is not a codec.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor

from syncline.comms.codecs import Codec, ErrorFeedback

__all__ = ["CONTRACT", "Check", "check_codec"]

Check = Callable[[Codec], None]

# Nothing, one value, around the sizes of bytes and blocks, and more than one block of any codec.
_SIZES: Final = (0, 1, 2, 7, 8, 9, 255, 256, 257, 1023, 1024, 1025, 3000)
_EXCHANGES: Final = 30


def check_codec(codec: Codec) -> None:
    """Raise `AssertionError`, which says what is wrong, unless this codec keeps every promise in `CONTRACT`."""
    for check in CONTRACT:
        check(codec)


def a_payload_is_as_long_as_announced(codec: Codec) -> None:
    """Flat bytes, `wire_bytes` of them, whatever the values are: the other side makes room before it sees them."""
    for what, flat in _tensors():
        payload, expected = codec.encode(flat), codec.wire_bytes(flat.numel())
        _require(
            payload.dtype == torch.uint8 and tuple(payload.shape) == (expected,),
            codec,
            f"encodes {what} as {payload.dtype} of shape {tuple(payload.shape)}, but announces {expected} bytes: "
            "encode must give a flat uint8 tensor of wire_bytes(numel)",
        )


def as_many_values_come_out_as_went_in(codec: Codec) -> None:
    """Float32, finite if they were, in memory of their own, wherever in a message the payload lies."""
    for what, flat in _tensors():
        payload = codec.encode(flat)
        decoded = codec.decode(payload, flat.numel())
        _require(
            decoded.dtype == torch.float32 and decoded.shape == flat.shape,
            codec,
            f"decodes {what} to {decoded.dtype} of shape {tuple(decoded.shape)}: decode must give a flat float32 "
            "tensor of numel values",
        )
        _require(bool(decoded.isfinite().all()), codec, f"makes values that are not finite of {what}, which are")
        message = torch.cat((torch.zeros(3, dtype=torch.uint8), payload))
        _require(
            torch.equal(codec.decode(message[3:], flat.numel()), decoded),
            codec,
            f"decodes {what} differently behind a header of three bytes: copy what is not aligned before viewing it",
        )
        kept = decoded.clone()
        payload.zero_()
        codec.decode(message[3:], flat.numel()).zero_()
        _require(
            torch.equal(decoded, kept),
            codec,
            f"gives back memory that is not the caller's alone when it decodes {what}",
        )


def the_same_values_are_the_same_bytes(codec: Codec) -> None:
    """Again and again, and the values themselves are left alone: workers would drift apart otherwise."""
    for what, flat in _tensors():
        before = flat.clone()
        first = codec.encode(flat).clone()
        _require(torch.equal(flat, before), codec, f"changes its input, {what}: encode a copy")
        _require(
            torch.equal(codec.encode(flat.clone()), first),
            codec,
            f"encodes {what} differently the second time: a codec has no state and no chance in it",
        )


def what_is_not_sent_is_kept(codec: Codec) -> None:
    """With error feedback, all that was decoded and what is still held make up all that was given; a checkpoint too."""
    for size in _SIZES:
        generator = torch.Generator().manual_seed(size)
        feedback, resumed = ErrorFeedback(codec), ErrorFeedback(codec)
        given = torch.zeros(size, dtype=torch.float64)
        sent, moved = torch.zeros_like(given), torch.zeros_like(given)
        for exchange in range(_EXCHANGES):
            flat = torch.randn(size, generator=generator) * 10.0 ** (exchange % 5 - 2)
            if exchange == _EXCHANGES // 2:
                resumed.load(feedback.state())
            payload = feedback.encode(flat)
            decoded = codec.decode(payload, size)
            given += flat
            sent += decoded
            moved += flat.abs() + decoded.abs()
            _require(
                exchange < _EXCHANGES // 2 or torch.equal(resumed.encode(flat), payload),
                codec,
                f"continues differently after its residual was saved and loaded, with {size} values",
            )
        assert feedback.residual is not None
        off = (sent + feedback.residual - given).abs()
        _require(
            bool((off <= 1e-5 * moved).all()),
            codec,
            f"loses something: after {_EXCHANGES} exchanges of {size} values what was decoded and what is kept is off "
            f"by {float(off.max()) if size else 0.0:.3g} from what was given",
        )


def a_value_that_is_not_finite_shows_and_leaves_nothing_behind(codec: Codec) -> None:
    """NaN is visible after decoding, and the residual stays as it was: the training loop discards the step."""
    for size in _SIZES[1:]:
        for value in (math.nan, math.inf, -math.inf):
            good = torch.linspace(-1.0, 2.0, size)
            bad = good.clone()
            bad[size // 2] = value
            feedback = ErrorFeedback(codec)
            decoded = codec.decode(feedback.encode(bad), size)
            _require(
                not bool(decoded.isfinite().all()), codec, f"hides one {value} among {size} values from the other side"
            )
            _require(
                feedback.residual is not None and not bool(feedback.residual.any()),
                codec,
                f"has something left of a first exchange of {size} values with one {value} in it",
            )
            feedback.encode(good)
            assert feedback.residual is not None
            before = feedback.residual.clone()
            feedback.encode(bad)
            _require(
                torch.equal(feedback.residual, before),
                codec,
                f"has another residual after an exchange of {size} values with one {value} in it",
            )


CONTRACT: Final[tuple[Check, ...]] = (
    a_payload_is_as_long_as_announced,
    as_many_values_come_out_as_went_in,
    the_same_values_are_the_same_bytes,
    what_is_not_sent_is_kept,
    a_value_that_is_not_finite_shows_and_leaves_nothing_behind,
)


def _tensors() -> Iterator[tuple[str, Tensor]]:
    """Each with what it is called."""
    for size in _SIZES:
        generator = torch.Generator().manual_seed(size)
        random = torch.randn(size, generator=generator)
        yield f"{size} random values", random
        yield f"{size} zeros", torch.zeros(size)
        yield f"{size} equal values", torch.full((size,), -0.75)
        yield f"{size} values of which many are equal", (2 * random).round() / 2
        yield f"{size} tiny values", random * 1e-30
        yield f"{size} huge values", random * 1e30
        if size > 1:  # torch calls any stride of a single value contiguous
            yield f"{size} values that lie apart in memory", torch.randn(2 * size, generator=generator)[::2]


def _require(is_so: bool, codec: Codec, otherwise: str) -> None:
    if not is_so:
        raise AssertionError(f"The codec {codec.name} {otherwise}.")
