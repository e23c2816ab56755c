"""A worker's gradient, split along the shards.

Here: what each shard gets, and the `GradientFormat` that describes it. Pure functions of tensors. Not here: sending
(`client.py`), what the shard does with it (`shard.py`), and residuals of lossy codecs (strategies).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from syncline.comms.codecs import BF16Codec, Codec, ErrorFeedback, ExactCodec, Int8Codec, OneBitCodec, TopKCodec
from syncline.comms.parameter_server import messages as m
from syncline.comms.parameter_server.chunks import ParameterChunk, Span, overlap
from syncline.errors import ConfigError

CODECS: dict[str, type[Codec]] = {
    kind.__name__: kind for kind in (BF16Codec, ExactCodec, Int8Codec, OneBitCodec, TopKCodec)
}
"""The codecs whose payloads a server can decode."""


@dataclasses.dataclass(frozen=True)
class EncodedGradient:
    """A gradient after encoding: `payloads[i]` is what `codec` made of shard i's `part_of` it."""

    payloads: Sequence[Tensor]
    codec: Codec


def part_of(flat: Tensor, shard: Span, ranges: Sequence[Span] | None = None) -> Tensor:
    """A shard's part of `flat`, or of these ranges of it, in one flat tensor."""
    if ranges is None:
        return flat[slice(*shard)]
    found = [flat[slice(*common)] for span in ranges if (common := overlap(span, shard))]
    return torch.cat(found) if found else flat[:0]


def split_gradient(
    gradient: Tensor | EncodedGradient,
    shards: Sequence[Span],
    chunks: Sequence[Sequence[ParameterChunk]],
    *,
    ranges: Sequence[Span] | None = None,
    rows: Mapping[int, Tensor] | None = None,
) -> list[tuple[m.GradientFormat, list[Tensor]]]:
    """For each shard, the message and the bulk; `ranges` and `rows` as in `ParameterServers.push`."""
    if isinstance(gradient, EncodedGradient) and rows:
        raise ValueError("An encoded gradient travels whole. Pass rows only with a plain tensor.")
    touched = {i: r.detach().unique() for i, r in (rows or {}).items()}  # type: ignore[no-untyped-call]  # torch's
    found = []
    for index, (shard, own_chunks) in enumerate(zip(shards, chunks, strict=True)):
        spans = None
        if ranges is not None:
            spans = [(c[0] - shard[0], c[1] - shard[0]) for span in ranges if (c := overlap(span, shard))]
        if isinstance(gradient, EncodedGradient):
            numel = shard[1] - shard[0] if spans is None else sum(high - low for low, high in spans)
            update = m.GradientFormat(rows=[], spans=spans, codec=_codec_name(gradient.codec), numel=numel)
            found.append((update, [gradient.payloads[index]]))
            continue
        mine = check_flat(gradient, shard[1])[slice(*shard)]
        if touched:
            found.append(_by_rows(mine, own_chunks, touched, spans))
        else:
            bulk = [mine] if spans is None else [mine[low:high] for low, high in spans]
            update = m.GradientFormat(rows=[], spans=spans, codec=None, numel=sum(t.numel() for t in bulk))
            found.append((update, bulk))
    return found


def check_flat(flat: Tensor, numel: int) -> Tensor:
    """`flat`, if it can be sent or filled in place and has at least `numel` values."""
    if flat.dtype != torch.float32 or flat.dim() != 1 or not flat.is_contiguous() or flat.device.type != "cpu":
        raise ValueError(
            f"Parameter servers exchange contiguous flat float32 tensors on the CPU, but this one is {flat.dtype} of "
            f"shape {tuple(flat.shape)} on {flat.device}."
        )
    if flat.numel() < numel:
        raise ValueError(f"The parameters have at least {numel} values, but this tensor has only {flat.numel()}.")
    return flat.detach()


def _by_rows(
    mine: Tensor, chunks: Sequence[ParameterChunk], touched: Mapping[int, Tensor], spans: Sequence[Span] | None
) -> tuple[m.GradientFormat, list[Tensor]]:
    """A shard's part of a gradient of which some chunks travel by rows."""
    named: list[tuple[int, int]] = []
    indices: list[Tensor] = []
    values: list[Tensor] = []
    for index, chunk in enumerate(chunks):
        rows = touched.get(chunk.parameter)
        if rows is None:
            own = [chunk.span] if spans is None else [c for span in spans if (c := overlap(span, chunk.span))]
            values += [mine[low:high] for low, high in own]
            continue
        rows = rows[(rows >= chunk.first_row) & (rows < chunk.first_row + chunk.rows)] - chunk.first_row
        named.append((index, len(rows)))
        indices.append(rows)
        values.append(mine[slice(*chunk.span)].view(chunk.rows, -1)[rows].view(-1))
    numel = sum(v.numel() for v in values)
    update = m.GradientFormat(rows=named, spans=None if spans is None else list(spans), codec=None, numel=numel)
    return update, [*indices, *values]


def _codec_name(codec: Codec) -> tuple[str, list[float]]:
    """The class and settings from which a server makes the same codec."""
    plain = codec.codec if isinstance(codec, ErrorFeedback) else codec
    name = type(plain).__name__
    if CODECS.get(name) is not type(plain):
        known = sorted(CODECS)
        raise ConfigError(
            f"A parameter server cannot decode {name}. Use one of {', '.join(known)}.",
            code="codec-unknown-to-server",
            codec=name,
            known=known,
        )
    return name, list(dataclasses.astuple(plain))  # type: ignore[call-overload]  # all of them are dataclasses
