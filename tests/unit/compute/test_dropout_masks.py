"""Dropout masks as numbers: the published generator, the same bits with and without a compiler, sane statistics."""

from __future__ import annotations

import itertools
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.compute.kernels import build
from syncline.compute.kernels import dropout as masks
from syncline.compute.kernels.dropout import Draw, drop, ones, random_words

has_compiler = pytest.mark.skipif(not any(map(shutil.which, build._COMPILERS)), reason="there is no C++ compiler")
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
keys = st.integers(0, 2**64 - 1)
indices = st.integers(-(2**63), 2**63 - 1)
SAMPLES = torch.tensor([3, 0, 2**40 + 1, -1])


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 as the paper states it, in Python's integers."""
    (a, b, c, d), (k, l) = counter, key  # noqa: E741
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32) ^ b ^ k, right % 2**32, (left >> 32) ^ d ^ l, left % 2**32
        k, l = (k + 0x9E3779B9) % 2**32, (l + 0xBB67AE85) % 2**32  # noqa: E741
    return a, b, c, d


# The test vectors that the authors publish with their library, Random123.
@pytest.mark.parametrize(("counter", "key", "expected"), [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
])  # fmt: skip
def test_the_reference_is_the_published_generator(counter, key, expected):
    assert philox(counter, key) == expected


@given(keys, indices, st.integers(0, 700))
def test_each_element_has_its_word_of_the_published_generator(key, sample, element):
    word = int(random_words(key, torch.tensor([sample]), element + 1)[0, element])
    block = element // 64 * 16 + element % 16
    counter = (block, 0, sample % 2**32, (sample >> 32) % 2**32)
    assert word == philox(counter, (key % 2**32, key >> 32))[element % 64 // 16]


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_compiled", lambda _dtype: None)


@has_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "length"), [(4, 1), (4, 63), (8, 64), (4, 65), (12, 1000), (4, 40_000)])
def test_without_a_compiler_the_bits_are_the_same(monkeypatch, dtype, rows, length):
    draw = Draw(0x0123456789ABCDEF, 0.37)
    x = torch.randn(rows, length, dtype=dtype, generator=torch.Generator().manual_seed(1))
    x[0, 0] = float("inf")
    assert masks._compiled(dtype) is not None
    compiled = drop(draw, SAMPLES, x), ones(draw, SAMPLES, x.shape, dtype, x.device)
    without_compiler(monkeypatch)
    for mine, reference in zip(
        (drop(draw, SAMPLES, x), ones(draw, SAMPLES, x.shape, dtype, x.device)), compiled, strict=True
    ):
        assert torch.equal(torch.nan_to_num(mine, 7.0), torch.nan_to_num(reference, 7.0))


@has_compiler
def test_the_number_of_threads_does_not_matter():
    x, threads = torch.randn(8, 50_000), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = drop(Draw(5, 0.5), torch.arange(8), x)
        torch.set_num_threads(2)
        assert torch.equal(drop(Draw(5, 0.5), torch.arange(8), x), alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_asked_for_and_the_rest_is_scaled_up(dtype, p):
    y = ones(Draw(11, p), torch.arange(50), torch.Size((50, 4000)), dtype, torch.device("cpu"))
    dropped = float((y == 0).float().mean())
    assert abs(dropped - p) < 4 * (p * (1 - p) / y.numel()) ** 0.5
    assert set(y.unique().tolist()) == {0.0, float(torch.tensor(1 / (1 - p), dtype=dtype))}


def test_probabilities_near_the_ends_are_no_special_cases():
    for p, dropped in ((1e-12, 0), (1 - 1e-12, 999)):
        y = ones(Draw(2, p), torch.arange(1), torch.Size((1, 999)), torch.float64, torch.device("cpu"))
        assert int((y == 0).sum()) == dropped


def test_what_is_not_finite_does_not_disappear():
    x = torch.full((1, 64), float("nan"))
    assert drop(Draw(3, 0.5), torch.tensor([1]), x).isnan().all()


def test_bytes_of_the_words_are_evenly_distributed():
    words = random_words(99, torch.arange(16), 1 << 14)
    expected = words.numel() / 256
    for shift in (0, 8, 16, 24):
        counts = torch.bincount(((words >> shift) & 255).flatten(), minlength=256).double()
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert 255 - 5 * 510**0.5 < chi_square < 255 + 5 * 510**0.5


def test_calls_samples_and_neighboring_elements_are_independent():
    """Correlations of +-1 values are normal with a deviation of 1 / sqrt(count)."""
    signs = torch.stack([
        (random_words(key, torch.arange(6), 20_000) >= 1 << 31).double() * 2 - 1 for key in (1, 2, 1 << 32, 77)
    ])  # fmt: skip
    rows = signs.flatten(0, 1)
    bound = 5 / rows.shape[1] ** 0.5
    for a, b in itertools.combinations(rows, 2):
        assert abs(float((a * b).mean())) < bound
    for lag in (1, 15, 16, 17, 32, 48, 64, 128):
        assert abs(float((rows[:, lag:] * rows[:, :-lag]).mean())) < bound
