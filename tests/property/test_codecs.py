"""What is encoded for the wire, what comes out, and what is kept for the next time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from generators import flats, seeds
from hypothesis import example, given, settings
from hypothesis import strategies as st

from syncline.comms.codecs import BF16Codec, ErrorFeedback, ExactCodec, Int8Codec, OneBitCodec, TopKCodec, compensate
from syncline.comms.codecs import powersgd as power

CODECS = [ExactCodec(), BF16Codec(), Int8Codec(), OneBitCodec(), TopKCodec(0.01), TopKCodec(0.3), TopKCodec(1.0)]
LOSSY = CODECS[1:]
LARGE = 431_080
few = settings(max_examples=12)  # for each of seven codecs
every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
every_lossy_codec = pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)


def decoded(codec, x):
    return codec.decode(codec.encode(x), len(x))


# ------------------------------------------------------------------------------------------------- every codec


@every_codec
@few
@given(x=flats())
def test_the_payload_is_as_long_as_announced_and_decodes_to_as_many_values(codec, x):
    payload = codec.encode(x)
    assert payload.dtype == torch.uint8
    assert payload.shape == (codec.wire_bytes(len(x)),)
    y = codec.decode(payload, len(x))
    assert y.dtype == torch.float32
    assert y.shape == x.shape


@every_codec
@few
@given(x=flats())
def test_encoding_is_deterministic_and_leaves_its_input_alone(codec, x):
    before = x.clone()
    assert torch.equal(codec.encode(x), codec.encode(x.clone()))
    assert torch.equal(x, before)


@every_codec
@few
@given(x=flats(), offset=st.integers(0, 7))
def test_a_payload_may_lie_anywhere_in_a_message(codec, x, offset):
    payload = codec.encode(x)
    message = torch.cat((torch.zeros(offset, dtype=torch.uint8), payload))
    assert torch.equal(codec.decode(message[offset:], len(x)), codec.decode(payload, len(x)))


@every_codec
@few
@given(x=flats())
def test_what_is_decoded_is_nobody_elses_memory(codec, x):
    payload = codec.encode(x)
    first = codec.decode(payload, len(x))
    kept = first.clone()
    codec.decode(payload, len(x)).zero_()
    payload.zero_()
    assert torch.equal(first, kept)


@every_codec
@few
@given(x=flats())
def test_no_codec_turns_finite_values_into_others(codec, x):
    assert decoded(codec, x).isfinite().all()


@every_codec
@few
@given(x=flats(min_size=1), where=st.integers(0, 10_000), value=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_value_that_is_not_finite_is_still_not_finite_behind_the_wire(codec, x, where, value):
    x = x.clone()
    x[where % len(x)] = value
    assert not decoded(codec, x)[where % len(x)].isfinite()


@every_codec
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_tensor_of_nothing_but_such_values_does_not_crash(codec, value):
    assert not decoded(codec, torch.full((2500,), value)).isfinite().all()


@every_codec
def test_a_payload_of_another_size_is_refused(codec):
    payload = codec.encode(torch.ones(1000))
    with pytest.raises(ValueError, match="Both ends must use the same codec and the same model"):
        codec.decode(payload, 2000)


@every_codec
@pytest.mark.parametrize("x", [torch.ones(3, dtype=torch.float64), torch.ones(3, 3)], ids=["float64", "matrix"])
def test_only_flat_float32_tensors_are_encoded(codec, x):
    with pytest.raises(ValueError, match="A codec takes a flat float32 tensor"):
        codec.encode(x)


@pytest.mark.parametrize(
    ("codec", "factor"),
    [(BF16Codec(), 2), (Int8Codec(), 3.9), (OneBitCodec(), 25), (TopKCodec(0.01), 40)],
    ids=lambda value: str(value),
)
def test_a_large_tensor_shrinks_by_the_promised_factor(codec, factor):
    assert ExactCodec().wire_bytes(LARGE) / codec.wire_bytes(LARGE) >= factor


# ------------------------------------------------------------------------------------------------- how far off


@few
@given(flats())
def test_exact_is_exact(x):
    assert torch.equal(decoded(ExactCodec(), x), x)


def test_exact_keeps_the_bits_of_nan_and_of_minus_zero():
    x = torch.tensor([math.nan, -math.nan, -0.0])
    assert torch.equal(decoded(ExactCodec(), x).view(torch.int32), x.view(torch.int32))


@few
@given(flats())
def test_bf16_is_off_by_one_part_in_256_at_most(x):
    # Below the smallest normal number the absolute error is that of the smallest normal number.
    assert ((decoded(BF16Codec(), x) - x).abs() <= x.abs() * 2**-8 + 2**-134).all()


def test_bf16_rounds_ties_to_even():
    x = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])
    assert decoded(BF16Codec(), x).tolist() == [1.0, 1 + 2**-6]


@few
@given(flats())
def test_int8_is_off_by_half_a_step_of_the_block_at_most(x):
    y = decoded(Int8Codec(), x)
    for block, got in zip(x.split(256), y.split(256), strict=True):
        largest = block.abs().max().item() if len(block) else 0.0
        assert ((got - block).abs() <= largest / 254 * (1 + 1e-4) + 127 * torch.finfo(torch.float32).tiny).all()


@few
@given(flats(min_size=1))
def test_int8_keeps_signs_and_the_largest_value_of_a_block(x):
    y = decoded(Int8Codec(), x)
    assert (x * y.sign() >= 0).all()
    torch.testing.assert_close(y.abs().max(), x.abs().max(), rtol=1e-6, atol=2e-36)


def test_int8_survives_the_smallest_and_the_largest_floats():
    smallest = torch.tensor([1e-45, -3e-44, 1.2e-38])
    assert decoded(Int8Codec(), smallest).tolist() == [0.0, 0.0, 0.0]
    large = torch.tensor([3e38, -3e38, 1.0])
    torch.testing.assert_close(decoded(Int8Codec(), large), torch.tensor([3e38, -3e38, 0.0]), rtol=1e-6, atol=0)


def test_a_nan_spoils_its_own_int8_block_only():
    x = torch.ones(512)
    x[3] = math.nan
    y = decoded(Int8Codec(), x)
    assert y[:256].isnan().all()
    assert torch.equal(y[256:], x[256:])


@few
@given(flats())
def test_onebit_decodes_to_the_mean_of_the_values_with_the_same_sign(x):
    y = decoded(OneBitCodec(), x)
    for block, got in zip(x.split(1024), y.split(1024), strict=True):
        for side in (block >= 0, block < 0):
            if side.any():
                expected = block[side].double().mean().float().expand(int(side.sum()))
                torch.testing.assert_close(got[side], expected, rtol=1e-4, atol=1e-37)


@few
@given(flats(), st.sampled_from([0.01, 0.3, 1.0]))
def test_topk_sends_the_largest_values_unchanged_and_of_equal_ones_the_first(x, fraction):
    codec = TopKCodec(fraction)
    by_magnitude = np.argsort(-x.abs().numpy(), kind="stable")[: codec.count(len(x))]
    expected = torch.zeros_like(x)
    expected[by_magnitude] = x[by_magnitude]
    assert torch.equal(decoded(codec, x), expected)


@pytest.mark.parametrize(
    ("fraction", "numel", "count"),
    [(0.01, 100, 1), (0.07, 100, 7), (0.01, 101, 2), (1e-9, 5, 1), (1, 5, 5), (0.5, 0, 0)],
)
def test_topk_counts_in_the_decimal_number_that_was_typed(fraction, numel, count):
    assert TopKCodec(fraction).count(numel) == count


def test_topk_sends_nan_before_infinity_before_all_else():
    x = torch.tensor([1e38, math.inf, 3.0, math.nan])
    assert decoded(TopKCodec(0.25), x).isnan().tolist() == [False, False, False, True]
    assert decoded(TopKCodec(0.5), x)[:3].tolist() == [0.0, math.inf, 0.0]


@pytest.mark.parametrize("fraction", [0, -0.1, 1.5, math.nan])
def test_topk_refuses_a_fraction_that_is_none(fraction):
    with pytest.raises(ValueError, match="The fraction of topk is"):
        TopKCodec(fraction)


# ---------------------------------------------------------------------------------------------- error feedback


@every_codec
@few
@given(x=flats(min_size=1), data=st.data())
def test_what_is_decoded_and_what_is_kept_make_up_what_was_to_be_sent(codec, x, data):
    residual = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))]
    wanted = x + residual
    step = compensate(codec, x, residual)
    assert torch.equal(step.decoded, codec.decode(step.payload, len(x)))
    if isinstance(codec, (ExactCodec, BF16Codec, TopKCodec)):  # what they drop of a value is itself a float32
        assert torch.equal(step.decoded + step.residual, wanted)
    else:
        slack = 2**-23 * (wanted.abs() + step.decoded.abs())
        assert ((step.decoded.double() + step.residual.double() - wanted.double()).abs() <= slack).all()


@few
@given(flats(), flats())
def test_exact_leaves_nothing_behind(x, other):
    feedback = ErrorFeedback(ExactCodec())
    feedback.encode(x)
    assert feedback.residual.count_nonzero() == 0


@every_lossy_codec
@settings(max_examples=4)
@given(seed=st.integers(0, 10))
def test_over_time_all_that_was_given_is_sent_and_the_residual_stays_bounded(codec, seed):
    generator = torch.Generator().manual_seed(seed)
    feedback = ErrorFeedback(codec)
    given_sum, sent_sum, residuals = torch.zeros(300).double(), torch.zeros(300).double(), []
    # A mild one: a bit can move a value no further than its block moves on average, so a far outlier comes very late.
    bias = 0.1 * torch.randn(300, generator=generator)
    for _ in range(200):
        x = bias + torch.randn(300, generator=generator)
        sent_sum += codec.decode(feedback.encode(x), 300)
        given_sum += x
        residuals.append(feedback.residual.norm().item())
    torch.testing.assert_close(sent_sum + feedback.residual, given_sum, rtol=1e-5, atol=1e-3)
    # A fraction f of the values a step leaves one unsent for about 1/f steps.
    steps_late = 1 / codec.fraction if isinstance(codec, TopKCodec) else 2
    assert max(residuals) <= 3 * steps_late * math.sqrt(300)
    assert max(residuals[100:]) <= 1.3 * max(residuals[:100])


@every_lossy_codec
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_leaves_the_residual_as_it_was(codec, value):
    feedback = ErrorFeedback(codec)
    bad = torch.linspace(-1, 1, 300)
    bad[7] = value
    feedback.encode(bad)
    assert feedback.residual.count_nonzero() == 0
    feedback.encode(torch.linspace(-1, 1, 300))
    kept = feedback.residual.clone()
    assert not feedback.decode(feedback.encode(bad), 300).isfinite().all()
    assert torch.equal(feedback.residual, kept)


@every_lossy_codec
@few
@given(first=flats(min_size=1))
def test_feedback_goes_on_from_a_checkpoint_as_if_nothing_had_happened(codec, first):
    feedback, resumed = ErrorFeedback(codec), ErrorFeedback(codec)
    resumed.load(feedback.state())
    assert torch.equal(resumed.encode(first), feedback.encode(first))
    resumed = ErrorFeedback(codec)
    resumed.load(feedback.state())
    assert torch.equal(resumed.encode(first), feedback.encode(first))


def test_a_saved_state_does_not_change_when_training_goes_on():
    feedback = ErrorFeedback(OneBitCodec())
    feedback.encode(torch.linspace(-1, 1, 300))
    state = feedback.state()
    kept = state["residual"].clone()
    feedback.encode(torch.linspace(-1, 2, 300))
    assert torch.equal(state["residual"], kept)
    assert not torch.equal(feedback.residual, kept)


def test_a_residual_of_another_model_is_refused():
    feedback = ErrorFeedback(Int8Codec())
    feedback.encode(torch.ones(3))
    with pytest.raises(ValueError, match="The residual has 3 values, but the tensor to encode has 4"):
        feedback.encode(torch.ones(4))


# ---------------------------------------------------------------------------------------------------- PowerSGD

shapes = st.lists(st.lists(st.integers(1, 12), max_size=4).map(tuple), max_size=6)
ranks = st.integers(1, 4)


@few
@given(shapes, ranks, seeds)
@example([], 1, 0)
@example([(0, 3), (40, 0)], 1, 0)
def test_cutting_into_matrices_and_joining_is_the_identity(shapes, rank, seed):
    cut = power.cut(shapes, rank)
    flat = torch.arange(float(cut.numel))
    assert cut.numel == sum(math.prod(shape) for shape in shapes)
    matrices, plain = cut.split(flat)
    assert torch.equal(cut.join(matrices, plain), flat)
    assert len(plain) == cut.plain_numel


@few
@given(shapes, ranks, seeds)
def test_the_bytes_of_powersgd_are_those_of_both_messages_and_never_more_than_exact(shapes, rank, seed):
    cut = power.cut(shapes, rank)
    matrices, plain = cut.split(torch.ones(cut.numel))
    qs = cut.start(seed)
    first = power.pack([*map(power.left, matrices, qs), plain])
    second = power.pack([power.right(m, p) for m, p in zip(matrices, map(power.left, matrices, qs), strict=True)])
    assert 4 * (len(first) + len(second)) == cut.wire_bytes <= 4 * cut.numel
    assert [tuple(p.shape) for p in power.unpack(first, [*cut.left_shapes, plain.shape])[:-1]] == cut.left_shapes
    assert [tuple(q.shape) for q in power.unpack(second, cut.right_shapes)] == cut.right_shapes


@few
@given(shapes, ranks)
def test_only_what_shrinks_is_compressed(shapes, rank):
    cut = power.cut(shapes, rank)
    for m in cut.matrices:
        assert m.rank * (m.rows + m.cols) < m.rows * m.cols
    assert power.cut([(1000,), (1, 1000), (2, 2)], rank).matrices == ()


def power_step(m, q):
    p = power.orthogonalize(power.left(m, q))
    q = power.right(m, p)
    return p, q


@few
@given(st.integers(3, 20), st.integers(3, 20), st.integers(1, 3), st.integers(0, 1000))
def test_a_matrix_of_low_rank_is_found_exactly(rows, cols, rank, seed):
    generator = torch.Generator().manual_seed(seed)
    m = torch.randn(rows, rank, generator=generator) @ torch.randn(rank, cols, generator=generator)
    p, q = power_step(m, power.start(rows, cols, rank, seed))
    torch.testing.assert_close(p.T @ p, torch.eye(rank), rtol=0, atol=1e-5)
    torch.testing.assert_close(power.reconstruct(p, q), m, rtol=1e-3, atol=1e-3)


def test_iterating_approaches_the_best_approximation_of_that_rank():
    m = torch.randn(30, 20, generator=torch.Generator().manual_seed(0)) * 0.7 ** torch.arange(20)
    best = torch.linalg.svdvals(m)[2:].norm()
    q = power.start(30, 20, 2, 0)
    for _ in range(30):
        p, q = power_step(m, q)
    assert (m - power.reconstruct(p, q)).norm() <= 1.001 * best


@few
@given(st.integers(0, 1000))
def test_averaging_the_factors_of_workers_is_compressing_their_average(seed):
    generator = torch.Generator().manual_seed(seed)
    ms = [torch.randn(9, 7, generator=generator, dtype=torch.float64) for _ in range(3)]
    q = power.start(9, 7, 2, seed).double()
    p = power.orthogonalize(sum(power.left(m, q) for m in ms) / 3)
    averaged = sum(power.right(m, p) for m in ms) / 3
    expected_p, expected_q = power_step(sum(ms) / 3, q)
    torch.testing.assert_close(power.reconstruct(p, averaged), power.reconstruct(expected_p, expected_q))


def test_a_step_of_zero_gradients_does_not_end_compression():
    p, q = power_step(torch.zeros(9, 7), power.start(9, 7, 2, 0))
    assert power.reconstruct(p, q).count_nonzero() == 0
    m = torch.randn(9, 7, generator=torch.Generator().manual_seed(0))
    for _ in range(20):
        p, q = power_step(m, q)
    assert (m - power.reconstruct(p, q)).norm() < m.norm()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_powersgd_shows_values_that_are_not_finite(value):
    m = torch.ones(9, 7)
    m[4, 4] = value
    p, q = power_step(m, power.start(9, 7, 2, 0))
    assert not power.reconstruct(p, q).isfinite().all()


@few
@given(seeds)
def test_all_workers_start_from_the_same_factors_and_matrices_of_one_shape_from_different_ones(seed):
    cut = power.cut([(9, 7), (9, 7)], 2)
    first, second = cut.start(seed)
    assert torch.equal(first, cut.start(seed)[0])
    assert not torch.equal(first, second)


def test_powersgd_refuses_a_rank_below_one():
    with pytest.raises(ValueError, match="The rank of powersgd is 0"):
        power.cut([(9, 7)], 0)
