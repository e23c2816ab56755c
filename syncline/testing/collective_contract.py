"""What every `Collective` must do, as checks that run with any way of starting ranks.

Here: the checks. Each is a function of a runner, which calls some work once for every rank of a new collective, and of
the number of ranks; it returns if the promise is kept. Not here: runners (`threads.py` has one) and pytest, which is
not needed but easily used:

    @pytest.mark.parametrize("check", [*CONTRACT, *PROMPT_ABORT], ids=lambda check: check.__name__)
    def test_my_collective(check):
        check(run_on_threads, 3)

`CONTRACT` holds for all. `PROMPT_ABORT` holds where a call in progress can be woken. `SHARING` holds where the ranks
have memory in common.

The work is made of this module's functions and plain values, so a runner may pickle it to send it to another process.
All ranks must run on one host, since two checks compare their clocks.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar

import torch

from syncline.algorithms.mixing import TOPOLOGIES, Mixing, mix, receivers, ring
from syncline.comms.collective import Collective
from syncline.errors import PeerLost

__all__ = ["CONTRACT", "PROMPT_ABORT", "SHARING", "Check", "Runner"]

Result = TypeVar("Result")


class Runner(Protocol):
    """Runs work on every rank of a new collective, all at the same time."""

    def __call__(self, size: int, work: Callable[[Collective], Result], /) -> list[Result]:
        """The results in rank order; if a rank fails, its error."""


Check = Callable[[Runner, int], None]

_CPU: Final = torch.device("cpu")
_FLOATS: Final = (torch.float32, torch.float64)
# Nothing, one number, fewer than ranks, odd, more than a 256 KB staging area in float64 only, and in both.
_SIZES: Final = (0, 1, 3, 4_099, 40_003, 100_003)
_PROMPT_S: Final = 1.0
_ROUNDS: Final = 200


def every_rank_knows_its_place(run: Runner, size: int) -> None:
    """Ranks count from 0, and all know how many they are."""
    places = run(size, _place)
    _require(places == [(rank, size) for rank in range(size)], f"ranks and sizes are {places}")


def allocated_memory_is_flat_and_zeroed(run: Runner, size: int) -> None:
    """`allocate` gives what was asked for, separately on every rank."""
    run(size, _allocate)


def a_weighted_sum_of_allocated_tensors_is_exact(run: Runner, size: int) -> None:
    """Each rank's own weight counts; any size, used again and again."""
    for dtype in _FLOATS:
        run(size, partial(_sum_exactly, dtype=dtype, allocated=True))


def a_weighted_sum_of_ordinary_tensors_is_exact(run: Runner, size: int) -> None:
    """The same for tensors that the collective has never seen before."""
    for dtype in _FLOATS:
        run(size, partial(_sum_exactly, dtype=dtype, allocated=False))


def a_sum_has_the_same_bits_on_every_rank(run: Runner, size: int) -> None:
    """Where rounding depends on the order of additions, all ranks get the same rounding."""
    for allocated in (True, False):
        for dtype in _FLOATS:
            digests = run(size, partial(_sum_with_rounding, dtype=dtype, allocated=allocated))
            _require(len(set(digests)) == 1, f"the ranks' sums of {dtype} differ in their bits")


def a_sum_keeps_integers_whole(run: Runner, size: int) -> None:
    """Integers with weight 1 are not rounded to floats on the way."""
    run(size, _sum_integers)


def a_sum_of_part_of_a_tensor_leaves_the_rest_alone(run: Runner, size: int) -> None:
    """Transposed, strided, 0-dimensional, partial and trained tensors, allocated or not."""
    run(size, _sum_views)


def a_sum_spreads_what_is_not_finite(run: Runner, size: int) -> None:
    """NaN and infinity on one rank reach all, and only where they were."""
    run(size, _sum_not_finite)


def allocated_tensors_do_not_mix(run: Runner, size: int) -> None:
    """Several tensors of equal and different sizes, summed in turn."""
    run(size, _sum_in_turn)


def a_mix_of_allocated_tensors_has_the_bits_of_the_equation(run: Runner, size: int) -> None:
    """Every topology, and weights of any kind; any size, used again and again."""
    for dtype in _FLOATS:
        run(size, partial(_mix, dtype=dtype, allocated=True))


def a_mix_of_ordinary_tensors_has_the_bits_of_the_equation(run: Runner, size: int) -> None:
    """The same for tensors that the collective has never seen before."""
    for dtype in _FLOATS:
        run(size, partial(_mix, dtype=dtype, allocated=False))


def a_permutation_hands_tensors_on_bit_for_bit(run: Runner, size: int) -> None:
    """Floats that are no numbers, and integers too."""
    run(size, _permute)


def a_mix_of_part_of_a_tensor_leaves_the_rest_alone(run: Runner, size: int) -> None:
    """Transposed, strided, 0-dimensional, partial and trained tensors, allocated or not."""
    run(size, _mix_views)


def a_mix_counts_its_bytes_for_each_rank_that_takes_them(run: Runner, size: int) -> None:
    """And none where nobody takes."""
    run(size, _count_mixed_bytes)


def a_mixing_that_does_not_fit_is_refused_on_every_rank(run: Runner, size: int) -> None:
    """Before anybody waits for anybody, and what comes after works."""
    run(size, _refuse_mixings)


def a_broadcast_brings_the_tensor_of_any_source(run: Runner, size: int) -> None:
    """Large, non-contiguous, 0-dimensional, integer and trained tensors, from each rank."""
    run(size, _broadcast)


def a_gather_brings_payloads_of_any_length(run: Runner, size: int) -> None:
    """Nothing, a few bytes and more than a megabyte, all in one call."""
    run(size, _gather)


def a_barrier_waits_for_the_last(run: Runner, size: int) -> None:
    """Nobody leaves before everybody has come."""
    rounds = zip(*run(size, _pass_barriers), strict=True)
    for number, passes in enumerate(rounds):
        last_arrival, first_leave = max(arrived for arrived, _ in passes), min(left for _, left in passes)
        _require(last_arrival <= first_leave, f"in round {number} a rank left the barrier before the last one came")


def a_split_gives_collectives_of_those_with_the_same_color(run: Runner, size: int) -> None:
    """Every way to divide the ranks; all calls work there, in between those of the whole; bytes are counted anew."""
    run(size, _split_in_every_way)


def a_split_can_be_split_again(run: Runner, size: int) -> None:
    """Also when some have split more often than others."""
    run(size, _split_again)


def an_abort_of_a_split_is_only_its_own(run: Runner, size: int) -> None:
    """The whole goes on, and so do the other parts."""
    run(size, _abort_split)


def an_abort_reaches_what_was_split(run: Runner, size: int) -> None:
    """Calls of the part raise after the whole was aborted."""
    run(size, _abort_then_call_split)


def calls_of_all_kinds_follow_each_other_safely(run: Runner, size: int) -> None:
    """Two hundred rounds of everything: what a slow rank still reads must not be overwritten by a quick one."""
    run(size, _interleave)


def after_an_abort_every_call_raises_peer_lost(run: Runner, size: int) -> None:
    """An abort is for good, and may be repeated."""
    run(size, _abort_then_call)


def an_abort_elsewhere_ends_a_call_that_waits(run: Runner, size: int) -> None:
    """One rank never comes and aborts; the others stop waiting for it at once."""
    if size == 1:
        return  # nobody to wait for
    for call in _CALLS:
        aborted_at, *raised_at = run(size, partial(_wait_for_rank_0, call=call))
        late = [f"{t - aborted_at:.1f} s" for t in raised_at if t - aborted_at > _PROMPT_S]
        _require(not late, f"{call} raised PeerLost only {', '.join(late)} after the abort")


def an_abort_from_another_thread_ends_a_call_that_waits(run: Runner, size: int) -> None:
    """A rank that waits for peers that never come is freed by a thread of its own."""
    if size == 1:
        return  # nobody to wait for
    for call in _CALLS:
        took_s, *_ = run(size, partial(_free_rank_0, call=call))
        _require(took_s <= _PROMPT_S, f"{call} raised PeerLost only {took_s:.1f} s after the abort")


def an_abort_elsewhere_ends_a_call_that_waits_in_a_split(run: Runner, size: int) -> None:
    """Be the one who aborts the whole a member of the part or not, and be the part split again."""
    if size == 1:
        return  # nobody to wait for
    can_be_apart = size > 2  # or nobody is left to wait
    cases = [(call, can_be_apart, False) for call in _CALLS]
    cases += [("barrier", False, False), ("barrier", False, True), ("barrier", can_be_apart, True)]
    for call, apart, again in cases:
        aborted_at, *raised_at = run(size, partial(_wait_in_split, call=call, apart=apart, again=again))
        late = [f"{t - aborted_at:.1f} s" for t in raised_at if t - aborted_at > _PROMPT_S]
        _require(not late, f"{call} in a split raised PeerLost only {', '.join(late)} after the abort")


def shared_memory_is_seen_by_all(run: Runner, size: int) -> None:
    """Flat, zeroed, one for all, and apart from what else is shared or allocated."""
    run(size, _share)


def parts_share_memory_of_their_own(run: Runner, size: int) -> None:
    """What is shared in a split is seen by its members only."""
    run(size, _share_in_split)


CONTRACT: Final[tuple[Check, ...]] = (
    every_rank_knows_its_place,
    allocated_memory_is_flat_and_zeroed,
    a_weighted_sum_of_allocated_tensors_is_exact,
    a_weighted_sum_of_ordinary_tensors_is_exact,
    a_sum_has_the_same_bits_on_every_rank,
    a_sum_keeps_integers_whole,
    a_sum_of_part_of_a_tensor_leaves_the_rest_alone,
    a_sum_spreads_what_is_not_finite,
    allocated_tensors_do_not_mix,
    a_mix_of_allocated_tensors_has_the_bits_of_the_equation,
    a_mix_of_ordinary_tensors_has_the_bits_of_the_equation,
    a_permutation_hands_tensors_on_bit_for_bit,
    a_mix_of_part_of_a_tensor_leaves_the_rest_alone,
    a_mix_counts_its_bytes_for_each_rank_that_takes_them,
    a_mixing_that_does_not_fit_is_refused_on_every_rank,
    a_broadcast_brings_the_tensor_of_any_source,
    a_gather_brings_payloads_of_any_length,
    a_barrier_waits_for_the_last,
    a_split_gives_collectives_of_those_with_the_same_color,
    a_split_can_be_split_again,
    an_abort_of_a_split_is_only_its_own,
    an_abort_reaches_what_was_split,
    calls_of_all_kinds_follow_each_other_safely,
    after_an_abort_every_call_raises_peer_lost,
)
"""What every collective must do."""

PROMPT_ABORT: Final[tuple[Check, ...]] = (
    an_abort_elsewhere_ends_a_call_that_waits,
    an_abort_from_another_thread_ends_a_call_that_waits,
    an_abort_elsewhere_ends_a_call_that_waits_in_a_split,
)
"""What a collective must do as well if its calls in progress can be woken."""

SHARING: Final[tuple[Check, ...]] = (shared_memory_is_seen_by_all, parts_share_memory_of_their_own)
"""What a collective must do as well if its ranks have memory in common."""


# The work of one rank. Inputs are functions of the rank, so that every rank can work out what all the others hold.


def _place(collective: Collective) -> tuple[int, int]:
    return collective.rank, collective.size


def _allocate(collective: Collective) -> None:
    for dtype in (*_FLOATS, torch.bfloat16, torch.int64):
        for numel in _SIZES:
            tensor = collective.allocate(numel, dtype, _CPU)
            _require(tensor.shape == (numel,), f"allocate({numel}) has shape {tuple(tensor.shape)}")
            _require(tensor.dtype == dtype, f"allocate of {dtype} gave {tensor.dtype}")
            _require(tensor.is_contiguous(), "allocated memory is not contiguous")
            _require(not tensor.any(), "allocated memory is not zero")
            tensor.fill_(collective.rank + 1)
            collective.barrier()
            _require_equal(tensor, torch.full_like(tensor, collective.rank + 1), "memory of this rank's own")
            collective.barrier()


def _sum_exactly(collective: Collective, *, dtype: torch.dtype, allocated: bool) -> None:
    for case, numel in enumerate(_SIZES):
        tensor = _tensor(collective, numel, dtype, allocated)
        for again in range(2):
            seed = 10 * case + again
            weights = [_weight(rank, again) for rank in range(collective.size)]
            tensor.copy_(_whole_numbers(numel, seed, collective.rank))
            collective.sum_(tensor, weights[collective.rank])
            total = torch.zeros(numel, dtype=torch.float64)
            for rank, weight in enumerate(weights):
                total += _whole_numbers(numel, seed, rank) * weight
            _require_equal(tensor, total.to(dtype), f"the sum of {numel} numbers of {dtype}")


def _sum_with_rounding(collective: Collective, *, dtype: torch.dtype, allocated: bool) -> str:
    bits = hashlib.sha256()
    for case, numel in enumerate(_SIZES):
        tensor = _tensor(collective, numel, dtype, allocated)
        inputs = [_normal(numel, case, rank).to(dtype) for rank in range(collective.size)]
        weights = [(rank + 1) / (3 * collective.size + 0.7) for rank in range(collective.size)]
        tensor.copy_(inputs[collective.rank])
        collective.sum_(tensor, weights[collective.rank])
        terms = [x.double() * w for x, w in zip(inputs, weights, strict=True)]
        allowed = 2 * collective.size * torch.finfo(dtype).eps * sum((t.abs() for t in terms), torch.zeros(numel))
        error = (tensor.double() - sum(terms, torch.zeros(numel))).abs()
        _require(bool((error <= allowed).all()), f"the sum of {numel} numbers of {dtype} is off by more than rounding")
        bits.update(tensor.numpy().tobytes())
    return bits.hexdigest()


def _sum_integers(collective: Collective) -> None:
    for allocated in (True, False):
        for dtype, base in ((torch.int64, 2**54 + 1), (torch.int32, 2**25 + 1)):
            for numel in (1, 5, 70_001):
                tensor = _tensor(collective, numel, dtype, allocated)
                tensor.copy_(torch.arange(numel) + base + collective.rank)
                collective.sum_(tensor)
                ranks = collective.size * (collective.size - 1) // 2
                expected = (torch.arange(numel) + base) * collective.size + ranks
                _require_equal(tensor, expected.to(dtype), f"the sum of {numel} integers of {dtype}")


def _sum_views(collective: Collective) -> None:
    factor = sum(_weight(rank, 0) * (rank + 1) for rank in range(collective.size))
    for allocated in (True, False):
        for numel in (36, 360_000):
            for name, view in _views(numel).items():
                whole = _tensor(collective, numel, torch.float32, allocated)
                start = torch.arange(numel, dtype=torch.float32).remainder_(1000.0)
                whole.copy_(start)
                view(whole).mul_(collective.rank + 1)
                collective.sum_(view(whole), _weight(collective.rank, 0))
                view(start).mul_(factor)
                _require_equal(whole, start, f"a tensor after the sum of its {name} part")
    trained = torch.nn.Parameter(torch.full((3, 5), float(collective.rank + 1)))
    collective.sum_(trained, _weight(collective.rank, 0))
    _require_equal(trained.detach(), torch.full((3, 5), factor), "a parameter after its sum")


def _sum_not_finite(collective: Collective) -> None:
    last = collective.size - 1
    for allocated in (True, False):
        tensor = _tensor(collective, 9, torch.float32, allocated)
        tensor.fill_(1.0)
        if collective.rank == last:
            tensor[2], tensor[8] = torch.nan, torch.inf
        collective.sum_(tensor, 0.5)
        _require(bool(tensor[2].isnan()), "a NaN of one rank is missing in the sum")
        _require(bool(tensor[8].isinf()), "an infinity of one rank is missing in the sum")
        _require(int(tensor.isfinite().sum()) == 7, "numbers became infinite beside the one that was")


def _sum_in_turn(collective: Collective) -> None:
    sizes = (5, 70_001, 5, 0, 1)
    tensors = [collective.allocate(numel, torch.float32, _CPU) for numel in sizes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    for again in range(1, 4):
        for number in (1, 4, 0, 3, 2):
            collective.sum_(tensors[number])
        for number, tensor in enumerate(tensors):
            expected = torch.full_like(tensor, (number + 1) * collective.size**again)
            _require_equal(tensor, expected, f"allocated tensor {number} after {again} sums")


def _mix(collective: Collective, *, dtype: torch.dtype, allocated: bool) -> None:
    for case, numel in enumerate(_SIZES):
        tensor = _tensor(collective, numel, dtype, allocated)
        values = {rank: _normal(numel, case, rank).to(dtype) for rank in range(collective.size)}
        tensor.copy_(values[collective.rank])
        for name, mixing in _mixings(collective.size).items():
            collective.mix_(tensor, mixing)
            values = {
                rank: mix(values, weights) for rank, weights in mixing.items()
            }  # goes on where the last one ended
            _require_equal(tensor, values[collective.rank], f"{numel} numbers of {dtype} after the mixing {name}")


def _permute(collective: Collective) -> None:
    rank, size = collective.rank, collective.size
    for shift in range(size):
        mixing = {r: {(r + shift) % size: 1.0} for r in range(size)}
        source = (rank + shift) % size
        for allocated in (True, False):
            for dtype in (torch.int64, torch.uint8, torch.bfloat16, *_FLOATS):
                tensor = _tensor(collective, 5_003, dtype, allocated)
                # Any bits at all: many numbers of many sizes, infinities and NaN among them.
                bits = [
                    torch.randint(256, (tensor.nbytes,), generator=_generator(shift, r)).byte() for r in range(size)
                ]
                tensor.view(torch.uint8).copy_(bits[rank])
                collective.mix_(tensor, mixing)
                _require_equal(tensor.view(torch.uint8), bits[source], f"the bits of {dtype} from rank {source}")


def _mix_views(collective: Collective) -> None:
    mixing = _mixings(collective.size)["uneven"]
    factor = sum(weight * (rank + 1) for rank, weight in mixing[collective.rank].items())
    for allocated in (True, False):
        for numel in (36, 360_000):
            for name, view in _views(numel).items():
                whole = _tensor(collective, numel, torch.float32, allocated)
                start = torch.arange(numel, dtype=torch.float32).remainder_(1000.0)
                whole.copy_(start)
                view(whole).mul_(collective.rank + 1)
                collective.mix_(view(whole), mixing)
                view(start).mul_(factor)
                _require_equal(whole, start, f"a tensor after its {name} part was mixed")
    trained = torch.nn.Parameter(torch.full((3, 5), float(collective.rank + 1)))
    collective.mix_(trained, mixing)
    _require_equal(trained.detach(), torch.full((3, 5), factor), "a parameter after it was mixed")
    _require(trained.requires_grad and trained.is_leaf, "a parameter is no longer one after it was mixed")


def _count_mixed_bytes(collective: Collective) -> None:
    for allocated in (True, False):
        for numel in (0, 7, 70_001):
            tensor = _tensor(collective, numel, torch.float64, allocated)
            for name, mixing in _mixings(collective.size).items():
                before = collective.bytes_sent
                collective.mix_(tensor, mixing)
                counted = collective.bytes_sent - before
                expected = tensor.nbytes * len(receivers(mixing, collective.rank))
                _require(counted == expected, f"the mixing {name} counted {counted} bytes and sent {expected}")


def _refuse_mixings(collective: Collective) -> None:
    size = collective.size
    tensor = torch.ones(4)
    own: Mixing = {rank: {rank: 1.0} for rank in range(size)}
    halves: Mixing = {rank: {rank: 0.5} for rank in range(size)}
    wrong: list[tuple[str, torch.Tensor, Mixing]] = [
        ("that leaves out a rank", tensor, {rank: own[rank] for rank in range(size - 1)}),
        ("of more ranks than there are", tensor, {**own, size: {size: 1.0}}),
        ("that takes from nobody", tensor, {**own, 0: {}}),
        ("that takes from a rank that is not there", tensor, {**own, 0: {size: 1.0}}),
        ("that halves integers", torch.ones(4, dtype=torch.int64), halves),
    ]
    before = collective.bytes_sent
    for what, value, mixing in wrong:
        try:
            collective.mix_(value, mixing)
        except ValueError:
            _require(bool((value == 1).all()), f"a mixing {what} was refused, but had changed the tensor")
            continue
        _require(False, f"a mixing {what} was not refused")
    _require(collective.bytes_sent == before, "a mixing that was refused counted bytes")
    collective.mix_(tensor, halves)
    _require_equal(tensor, torch.full((4,), 0.5), "a tensor mixed after other mixings were refused")


def _split_in_every_way(collective: Collective) -> None:
    size = collective.size
    flat = collective.allocate(70_001, torch.float32, _CPU)
    for number, colors in enumerate(_partitions(size)):
        color = 7 - 3 * colors[collective.rank]  # any integers will do
        before = collective.bytes_sent
        part = collective.split(color)
        _require(collective.bytes_sent == before, "a split counted bytes")
        members = [rank for rank in range(size) if colors[rank] == colors[collective.rank]]
        _require(
            (part.rank, part.size, part.bytes_sent) == (members.index(collective.rank), len(members), 0),
            f"of the colors {colors}, rank {collective.rank} is rank {part.rank} of {part.size}",
        )
        _use_part(collective, part, members, flat, f"split {number}")
        part.close()


def _use_part(whole: Collective, part: Collective, members: list[int], flat: torch.Tensor, where: str) -> None:
    """All calls in a part, those of the whole in between."""
    everybody = whole.size * (whole.size + 1) // 2
    own = part.allocate(1_003, torch.float64, _CPU)
    for name, tensor in {"the whole's": flat, "the part's": own, "ordinary": torch.empty(5)}.items():
        tensor.fill_(whole.rank + 1)
        part.sum_(tensor, 0.5)
        expected = sum(m + 1 for m in members) * 0.5
        _require(bool((tensor == expected).all()), f"{where}: sum of {name} tensor in a part")
        tensor.fill_(whole.rank + 1)
        whole.sum_(tensor)
        _require(bool((tensor == everybody).all()), f"{where}: sum of {name} tensor in the whole")
        mixing = ring(range(part.size), 0, 0)
        values = {r: _normal(tensor.numel(), 1, m).to(tensor.dtype) for r, m in enumerate(members)}
        tensor.copy_(values[part.rank])
        part.mix_(tensor, mixing)
        _require_equal(tensor, mix(values, mixing[part.rank]), f"{where}: {name} tensor mixed in a part")
    for source, member in enumerate(members):
        number = torch.tensor(whole.rank)
        part.broadcast_(number, source)
        _require(int(number) == member, f"{where}: broadcast in a part")
        _require(whole.gather(b"%d" % whole.rank)[member] == b"%d" % member, f"{where}: gather of the whole")
        for _ in range(source):  # parts of different sizes call the whole equally often
            part.barrier()
    for _ in range(whole.size - len(members)):
        whole.gather(b"%d" % whole.rank)
    gathered = part.gather(b"x" * whole.rank)
    _require(gathered == [b"x" * m for m in members], f"{where}: gather in a part")


def _split_again(collective: Collective) -> None:
    rank, size = collective.rank, collective.size
    halves = collective.split(rank % 2)
    members = list(range(rank % 2, size, 2))
    flat = torch.empty(9)
    if rank % 2 == 0:
        for color in (0, halves.rank % 2):
            part = halves.split(color)
            flat.fill_(1.0)
            part.sum_(flat)
            _require(bool((flat == part.size).all()), "sum in a part of a part")
    for shift in range(2):
        again = collective.split((rank + shift) // 2)
        peers = [r for r in range(size) if (r + shift) // 2 == (rank + shift) // 2]
        _require(again.gather(b"%d" % rank) == [b"%d" % r for r in peers], "gather in a second split")
        _require(halves.gather(b"%d" % rank) == [b"%d" % r for r in members], "gather in the first split")
    _require(collective.gather(b"%d" % rank) == [b"%d" % r for r in range(size)], "gather after two splits")


def _abort_split(collective: Collective) -> None:
    halves = collective.split(collective.rank % 2)
    part = halves.split(0)
    if collective.rank % 2 == 1:
        part.abort()
        with _expecting_peer_lost("a call in a part of a part that was aborted"):
            part.barrier()
    else:
        part.barrier()
    halves.barrier()
    collective.barrier()
    if collective.rank % 2 == 0:
        halves.abort()
        for each in (halves, part):
            with _expecting_peer_lost("a call in a part that was aborted, or in what was split from it"):
                each.gather(b"payload")
    else:
        halves.barrier()
    tensor = torch.ones(3)
    collective.sum_(tensor)
    _require(bool((tensor == collective.size).all()), "a sum in the whole after parts were aborted")


def _abort_then_call_split(collective: Collective) -> None:
    parts = [collective.split(0), collective.split(collective.rank)]
    parts.append(parts[0].split(0))
    flats = [part.allocate(10, torch.float32, _CPU) for part in parts]
    collective.barrier()
    collective.abort()
    for part, flat in zip(parts, flats, strict=True):
        for name in _CALLS:
            with _expecting_peer_lost(f"{name} in a split after an abort of the whole"):
                _make(name, part, flat)
    collective.close()


def _wait_in_split(collective: Collective, *, call: str, apart: bool, again: bool) -> float:
    """Rank 0 aborts the whole while others wait in a part: for rank 0 itself, or if it is apart, for the last."""
    rank = collective.rank
    part = collective.split(0 if apart and rank == 0 else 1)
    if again:
        part = part.split(0)
    flat = part.allocate(10, torch.float32, _CPU)
    collective.barrier()
    if rank == 0:
        aborted_at: list[float] = []
        _abort_later(collective, aborted_at)
        return aborted_at[0]
    if apart and rank == collective.size - 1:
        return 0.0  # never comes
    with _expecting_peer_lost(f"{call} in a split"):
        _make(call, part, flat)
    return time.monotonic()


def _share(collective: Collective) -> None:
    rank, size = collective.rank, collective.size
    for dtype in (*_FLOATS, torch.uint8, torch.int64):
        for numel in (0, 1, 3, 40_003):
            tensor, other = collective.share(numel, dtype), collective.share(numel, dtype)
            own = collective.allocate(numel, dtype, _CPU)
            _require(tensor.shape == (numel,) and tensor.dtype == dtype, f"share({numel}, {dtype}) gave something else")
            _require(tensor.is_contiguous() and tensor.device == _CPU, "shared memory is not plain memory of the CPU")
            _require(not tensor.any() and not other.any(), "shared memory is not zero")
            collective.barrier()
            tensor[rank::size] = rank + 1
            own.fill_(99)
            collective.barrier()
            expected = torch.arange(numel).remainder_(size).add_(1).to(dtype)
            _require_equal(tensor, expected, "what all ranks wrote to shared memory")
            _require(not other.any(), "what was written to one piece of shared memory is in another")
            collective.barrier()
    before = collective.bytes_sent
    collective.share(10, torch.float32)
    _require(collective.bytes_sent == before, "sharing memory counted bytes")


def _share_in_split(collective: Collective) -> None:
    part = collective.split(collective.rank % 2)
    tensor = part.share(part.size, torch.float32)
    tensor[part.rank] = collective.rank + 1
    collective.barrier()
    expected = [float(r + 1) for r in range(collective.rank % 2, collective.size, 2)]
    _require(tensor.tolist() == expected, "memory shared in a part holds something else than its members wrote")


def _broadcast(collective: Collective) -> None:
    for source in range(collective.size):
        mine, theirs = collective.rank + 1, source + 1
        for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8):
            for numel in _SIZES:
                tensor = torch.arange(numel).remainder_(50).to(dtype) * mine
                collective.broadcast_(tensor, source)
                expected = torch.arange(numel).remainder_(50).to(dtype) * theirs
                _require_equal(tensor, expected, f"{numel} numbers of {dtype} from rank {source}")
        for name, view in _views(360_000).items():
            whole = torch.arange(360_000, dtype=torch.float32)
            expected = whole.clone()
            view(whole).mul_(mine)
            view(expected).mul_(theirs)
            collective.broadcast_(view(whole), source)
            _require_equal(whole, expected, f"a tensor after the broadcast of its {name} part from rank {source}")
        counter = torch.tensor(2**54 + mine)  # like num_batches_tracked
        collective.broadcast_(counter, source)
        _require_equal(counter, torch.tensor(2**54 + theirs), f"a single integer from rank {source}")
        trained = torch.nn.Parameter(torch.full((3, 5), float(mine)))
        collective.broadcast_(trained, source)
        _require_equal(trained.detach(), torch.full((3, 5), float(theirs)), f"a parameter from rank {source}")
        _require(trained.requires_grad and trained.is_leaf, "a parameter is no longer one after the broadcast")


def _gather(collective: Collective) -> None:
    def payload(rank: int, case: int) -> bytes:
        length = (0, 1, 300_001, 1_500_007, 262_144)[(rank + case) % 5]
        return (b"%d from rank %d. " % (case, rank) * (length // 8 + 1))[:length]

    for case in range(5):
        everybody = [payload(rank, case) for rank in range(collective.size)]
        _require(collective.gather(everybody[collective.rank]) == everybody, f"gather {case} brought something else")
    for case in range(50):
        _require(collective.gather(b"") == [b""] * collective.size, "a gather of nothing brought something")
        everybody = [b"x" * (rank + case) for rank in range(collective.size)]
        _require(collective.gather(everybody[collective.rank]) == everybody, "a gather after nothing went wrong")


def _pass_barriers(collective: Collective) -> list[tuple[float, float]]:
    passes = []
    for number in range(30):
        if number % collective.size == collective.rank:
            _keep_busy(0.001)  # so that the others are there long before
        arrived = time.monotonic()
        collective.barrier()
        passes.append((arrived, time.monotonic()))
    return passes


def _interleave(collective: Collective) -> None:
    rank, size = collective.rank, collective.size
    flat = collective.allocate(1_001, torch.float32, _CPU)
    for number in range(_ROUNDS):
        source = number % size
        flat.fill_(rank + number)
        collective.sum_(flat, 2.0)
        _require(bool((flat == 2.0 * (size * number + size * (size - 1) / 2)).all()), f"round {number}: allocated sum")
        ordinary = torch.full((number % 7, 3), float(rank + 1), dtype=torch.float64)
        collective.sum_(ordinary, 0.5)
        _require(bool((ordinary == 0.25 * size * (size + 1)).all()), f"round {number}: ordinary sum")
        mixing = {r: {r: 0.75, (r + number) % size: 0.25} if number % size else {r: 1.0} for r in range(size)}
        expected = 0.75 * rank + 0.25 * ((rank + number) % size)
        flat.fill_(rank)
        collective.mix_(flat, mixing)
        _require(bool((flat == expected).all()), f"round {number}: allocated tensor mixed")
        ordinary = torch.full((number % 7, 3), float(rank), dtype=torch.float64)
        collective.mix_(ordinary, mixing)
        _require(bool((ordinary == expected).all()), f"round {number}: ordinary tensor mixed")
        everybody = [bytes([r, number % 256]) * (300 * ((r + number) % 3)) for r in range(size)]
        _require(collective.gather(everybody[rank]) == everybody, f"round {number}: gather")
        counter = torch.tensor(1000 * rank + number)
        collective.broadcast_(counter, source)
        _require(int(counter) == 1000 * source + number, f"round {number}: broadcast of an integer")
        if number % 3 == 0:
            collective.barrier()
        weights = torch.full((257,), float(rank - number))
        collective.broadcast_(weights, source)
        _require(bool((weights == source - number).all()), f"round {number}: broadcast of floats")
        if number % 20 == 0:
            large = torch.full((70_001,), float(rank))
            collective.sum_(large)
            _require(bool((large == size * (size - 1) / 2).all()), f"round {number}: large sum")


def _abort_then_call(collective: Collective) -> None:
    flat = _allocated_unless_aborted(collective)
    collective.abort()
    for _ in range(2):
        for name in _CALLS:
            with _expecting_peer_lost(f"{name} after an abort"):
                _make(name, collective, flat)
        collective.abort()
    collective.close()


def _wait_for_rank_0(collective: Collective, *, call: str) -> float:
    flat = _allocated_unless_aborted(collective)
    if collective.rank == 0:
        aborted_at: list[float] = []
        thread = threading.Thread(target=_abort_later, args=(collective, aborted_at))
        thread.start()
        thread.join()
        return aborted_at[0]
    with _expecting_peer_lost(f"{call} without rank 0"):
        _make(call, collective, flat)
    raised_at = time.monotonic()
    with _expecting_peer_lost("a later call"):
        collective.barrier()
    return raised_at


def _free_rank_0(collective: Collective, *, call: str) -> float:
    flat = collective.allocate(10, torch.float32, _CPU)
    if collective.rank != 0:
        return 0.0  # never comes
    aborted_at: list[float] = []
    thread = threading.Thread(target=_abort_later, args=(collective, aborted_at))
    thread.start()
    with _expecting_peer_lost(f"{call} without the others"):
        _make(call, collective, flat)
    raised_at = time.monotonic()
    thread.join()
    return raised_at - aborted_at[0]


_CALLS: Final = (
    "sum_ of an allocated tensor",
    "sum_",
    "mix_ of an allocated tensor",
    "mix_",
    "broadcast_",
    "gather",
    "split",
    "barrier",
)


def _make(call: str, collective: Collective, flat: torch.Tensor) -> None:
    match call:
        case "sum_ of an allocated tensor":
            collective.sum_(flat, 0.5)
        case "sum_":
            collective.sum_(torch.ones(3))
        case "mix_ of an allocated tensor":
            collective.mix_(flat, _all_to_all(collective.size))
        case "mix_":
            collective.mix_(torch.ones(3), _all_to_all(collective.size))
        case "split":
            collective.split(0)
        case "broadcast_":
            collective.broadcast_(torch.ones(3))
        case "gather":
            collective.gather(b"payload")
        case _:
            collective.barrier()


def _abort_later(collective: Collective, aborted_at: list[float]) -> None:
    # Most likely the call to be woken is asleep by now. If it is not even made yet, it must raise all the same, so the
    # check does not depend on this pause.
    time.sleep(0.03)
    aborted_at.append(time.monotonic())
    collective.abort()


def _allocated_unless_aborted(collective: Collective) -> torch.Tensor:
    try:
        return collective.allocate(10, torch.float32, _CPU)
    except PeerLost:  # a quick rank has allocated and aborted already
        return torch.zeros(10)


def _tensor(collective: Collective, numel: int, dtype: torch.dtype, allocated: bool) -> torch.Tensor:
    return collective.allocate(numel, dtype, _CPU) if allocated else torch.zeros(numel, dtype=dtype)


def _mixings(size: int) -> dict[str, Mixing]:
    """Every topology, in its first steps where it changes with them, and weights that no topology has."""
    ranks = range(size)
    found = {
        f"{name}, step {step}": topology(ranks, step, 5) for name, topology in TOPOLOGIES.items() for step in (0, 1)
    }
    found["permutation"] = {rank: {(rank + 1) % size: 1.0} for rank in ranks}
    found["all to all"] = _all_to_all(size)
    found["from the last only"] = {rank: {size - 1: -0.3} for rank in ranks}
    # Not in ascending order, which must not matter; some take from others that do not take from them.
    found["uneven"] = {rank: {other: 0.5 + other for other in reversed(ranks[: rank + 1])} for rank in ranks}
    return found


def _all_to_all(size: int) -> Mixing:
    return {rank: dict.fromkeys(range(size), 1.0 / size) for rank in range(size)}


def _partitions(size: int) -> Iterator[Sequence[int]]:
    """Every way to put ranks into groups, as the number of each rank's group."""
    if size == 0:
        yield ()
        return
    for others in _partitions(size - 1):
        for group in range(max(others, default=-1) + 2):
            yield (*others, group)


def _weight(rank: int, case: int) -> float:
    """Unequal, one of them 0, and short in binary: with whole numbers, every order of additions gives the exact sum."""
    return (0.25, 1.5, 0.0, 1.0, 2.75, -0.5)[(rank + case) % 6]


def _whole_numbers(numel: int, seed: int, rank: int) -> torch.Tensor:
    return torch.arange(numel).mul_(2 * seed + 7_919).add_(rank * 104_729 + seed).remainder_(2001).sub_(1000).double()


def _normal(numel: int, seed: int, rank: int) -> torch.Tensor:
    return torch.randn(numel, generator=_generator(seed, rank))


def _generator(seed: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * seed + rank)


def _views(numel: int) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    return {
        "whole": lambda t: t,
        "reshaped": lambda t: t.view(-1, 6),
        "transposed": lambda t: t.view(-1, 6).t(),
        "strided": lambda t: t[1::2],
        "first": lambda t: t[: numel // 3],
        "middle": lambda t: t[numel // 3 : -5],
        "single": lambda t: t[numel // 2],
        "channels-last": lambda t: t.view(2, 3, -1, 3).permute(0, 3, 1, 2),
    }


def _keep_busy(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


@contextlib.contextmanager
def _expecting_peer_lost(what: str) -> Iterator[None]:
    try:
        yield
    except PeerLost:
        return
    _require(False, f"{what} did not raise PeerLost")


def _require(kept: bool, broken: str) -> None:
    if not kept:
        raise AssertionError(f"Broken promise of a Collective: {broken}.")


def _require_equal(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if not torch.equal(found, expected):
        wrong = (found != expected).flatten()
        where = int(wrong.nonzero()[0])
        raise AssertionError(
            f"Broken promise of a Collective: {what} has {int(wrong.sum())} wrong numbers of {wrong.numel()}; number "
            f"{where} is {found.flatten()[where].item()} and should be {expected.flatten()[where].item()}."
        )
