"""How many pieces a share is computed in, whatever was measured: within the limit, and no more of them than needed."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from syncline.compute.memory_use import MemoryUse, fit_use, largest_use, pieces_within
from syncline.compute.partition import split
from syncline.config.amounts import bytes_of
from syncline.errors import ConfigError

MB = 10**6
uses = st.builds(MemoryUse, st.integers(0, 2000 * MB), st.floats(0, 500 * MB))
limits = st.integers(1 * MB, 4000 * MB)
shares = st.integers(1, 5000)


def found(limit: int, use: MemoryUse, samples: int, at_least: int = 1) -> tuple[int, int]:
    """Pieces and the samples in the largest, where there is a way at all."""
    try:
        pieces = pieces_within(limit, use, samples, at_least)
    except ConfigError:
        assume(False)
    assert pieces.samples == max(high - low for low, high in split(samples, pieces.count))
    assert pieces.expected_bytes == use.at(pieces.samples)
    return pieces.count, pieces.samples


@given(limits, uses, shares, st.integers(1, 8))
def test_no_piece_needs_more_than_the_limit(limit, use, samples, at_least):
    count, in_one = found(limit, use, samples, at_least)
    assert use.at(in_one) <= limit
    assert min(at_least, samples) <= count <= samples


@given(limits, uses, shares)
def test_with_one_piece_less_the_limit_would_be_missed_or_come_too_close(limit, use, samples):
    count, _ = found(limit, use, samples)
    if count > 1:
        assert use.at(-(-samples // (count - 1))) > 0.9 * limit - 1


@given(limits, uses, shares, shares)
def test_a_larger_share_still_fits_when_its_pieces_are_counted_anew(limit, use, samples, more):
    found(limit, use, samples)
    assert use.at(pieces_within(limit, use, samples + more).samples) <= limit  # never refused once it has fitted


@given(uses)
def test_what_does_not_fit_is_refused_with_what_is_needed_and_what_helps(use):
    limit = max(1, use.at(1))  # nothing would be left to spare
    assume(use.at(1) > 1)
    with pytest.raises(ConfigError, match=r"memory_limit is .* needs about .*--memory-limit, add --checkpoint-activ"):
        pieces_within(limit, use, 10)


def test_the_memory_that_is_asked_for_in_the_refusal_is_enough():
    use = MemoryUse(500 * MB, 7.5 * MB)
    with pytest.raises(ConfigError, match=r"needs about 564 MB with one sample at a time: 500 MB .* 7\.5 MB"):
        pieces_within(400 * MB, use, 10)
    assert pieces_within(565 * MB, use, 10).count == 10


def test_the_decision_is_told_in_a_line():
    pieces = pieces_within(900 * MB, MemoryUse(400 * MB, 20 * MB), 64)
    assert pieces.describe() == "micro-batches of 16: 4 pieces per step, about 720 of 900 MB"
    whole = pieces_within(9000 * MB, MemoryUse(400 * MB, 20 * MB), 64)
    assert whole.describe() == "micro-batches of 64: 1 piece per step, about 1,680 of 9,000 MB"


peaks_of_trials = st.lists(st.integers(1, 1000 * MB), min_size=1, max_size=9).map(
    lambda peaks: [(2 * 2**k, peak) for k, peak in enumerate(peaks)]
)


@given(peaks_of_trials, st.integers(0, 100 * MB))
def test_what_was_measured_lies_below_what_is_expected(peaks, more):
    use = fit_use(peaks, more)
    assert use.per_sample >= 0
    assert all(use.at(samples) >= peak + more - 1 for samples, peak in peaks)


@given(st.integers(0, 1000 * MB), st.integers(0, 50 * MB), st.integers(2, 9))
def test_a_straight_line_is_found_as_it_is(fixed, per_sample, count):
    use = fit_use([(2**k, fixed + per_sample * 2**k) for k in range(1, count + 1)])
    assert use.fixed == pytest.approx(fixed, abs=1 + 1e-6 * per_sample * 2**count)
    assert use.per_sample == pytest.approx(per_sample)


def test_memory_that_is_used_again_in_the_first_trials_does_not_hide_how_it_grows():
    # It is flat until what was free before is used up, and rises by 10 MB a sample from then on.
    use = fit_use([(2, 300 * MB), (4, 300 * MB), (8, 300 * MB), (16, 380 * MB)])
    assert use.per_sample == 10 * MB


@given(st.lists(uses, min_size=1, max_size=5), st.integers(1, 1000))
def test_what_all_workers_agree_on_is_enough_for_each(all_uses, samples):
    assert all(use.at(samples) <= largest_use(all_uses).at(samples) for use in all_uses)


@pytest.mark.parametrize(
    ("amount", "expected"),
    [
        ("900MB", 900 * MB), ("2GB", 2000 * MB), ("900", 900 * MB), (900, 900 * MB), (0.5, MB // 2),
        ("1.5 gb", 1500 * MB), (" 2 GiB ", 2 * 2**30), ("64kB", 64_000), (".5GB", 500 * MB), ("3G", 3000 * MB),
    ],
)  # fmt: skip
def test_an_amount_of_memory_is_read_as_people_write_it(amount, expected):
    assert bytes_of("memory_limit", amount) == expected


@pytest.mark.parametrize(
    "amount", ["", "MB", "2 apples", "-2GB", "0", 0, -1, True, float("nan"), float("inf"), "1e3MB"]
)
def test_what_is_no_amount_of_memory_is_refused(amount):
    with pytest.raises(ConfigError, match=r"memory_limit.*'900MB'"):
        bytes_of("memory_limit", amount)
