"""Every codec keeps the contract, and the contract notices those that do not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from syncline.comms.codecs import BF16Codec, ExactCodec, Int8Codec, OneBitCodec, TopKCodec
from syncline.testing.codec_contract import check_codec

CODECS = [ExactCodec(), BF16Codec(), Int8Codec(), OneBitCodec(), *map(TopKCodec, (0.001, 0.01, 0.25, 0.5, 1.0))]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_every_codec_keeps_the_contract(codec):
    check_codec(codec)


@dataclass(frozen=True)
class Halves:
    """A codec of one's own, in a few lines: float16."""

    name = "halves"

    def encode(self, flat):
        # Beyond its range float16 has only infinity.
        bounded = torch.where(flat.isfinite(), flat.clamp(-65504, 65504), flat)
        return bounded.contiguous().to(torch.float16).view(torch.uint8)

    def decode(self, payload, numel):
        return payload.clone().view(torch.float16).to(torch.float32)

    def wire_bytes(self, numel):
        return 2 * numel


def test_a_codec_of_ones_own_keeps_it_if_it_is_sound():
    check_codec(Halves())


class Longer(Halves):
    def wire_bytes(self, numel):
        return 2 * numel + 1


class Doubles(Halves):
    def decode(self, payload, numel):
        return super().decode(payload, numel).double()


class Changes(Halves):
    def encode(self, flat):
        return super().encode(flat.mul_(1.5))


class Chance(Halves):
    def encode(self, flat):
        return super().encode(flat + torch.rand_like(flat))


class Views(Halves):
    """Hands out one and the same memory every time."""

    def decode(self, payload, numel):
        decoded = super().decode(payload, numel)
        if numel not in memory:
            memory[numel] = decoded
        return memory[numel].copy_(decoded)


memory: dict[int, torch.Tensor] = {}


class Hides(Halves):
    def encode(self, flat):
        return super().encode(flat.nan_to_num())


class Unaligned(Halves):
    def decode(self, payload, numel):
        if payload.storage_offset() % 2:
            return torch.zeros(numel)
        return super().decode(payload, numel)


class Infinite(Halves):
    def encode(self, flat):
        return flat.to(torch.float16).contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    ("codec", "sentence"),
    [
        (Longer(), "announces 1 bytes: encode must give a flat uint8 tensor"),
        (Doubles(), "decode must give a flat float32 tensor"),
        (Changes(), "changes its input"),
        (Chance(), "differently the second time"),
        (Views(), "memory that is not the caller's alone"),
        (Hides(), "hides one nan among 1 values"),
        (Unaligned(), "behind a header of three bytes"),
        (Infinite(), "makes values that are not finite of 1 huge values"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_codec_that_breaks_a_promise_is_told_which(codec, sentence):
    memory.clear()
    with pytest.raises(AssertionError, match=f"The codec halves .*{sentence}"):
        check_codec(codec)
