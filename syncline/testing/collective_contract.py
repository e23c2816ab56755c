"""The contract of `Collective`, as checks that run with any way of starting ranks.

Here: the checks. Each is a function of a runner, which calls some work once for every rank of a new collective, and of
the number of ranks; it returns if the promise is kept. Most are the work itself, which `_on_each_rank` makes a check.
Not here: runners (`threads.py` has one) and pytest, which is not needed but easily used:

    @pytest.mark.parametrize("check", [*CONTRACT, *PROMPT_ABORT], ids=lambda check: check.__name__)
    def test_my_collective(check):
        check(run_on_threads, 3)

`CONTRACT` holds for all. `PROMPT_ABORT` holds where a call in progress can be woken. `SHARING` holds where the ranks
share memory.

The work is made of this module's functions and plain values, so a runner may pickle it to send it to another process.
All ranks must run on one host, since two checks compare their clocks.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Final, Protocol, TypeVar

import torch

from syncline.comms.collective import Collective
from syncline.comms.mixing import TOPOLOGIES, Mixing, mix, receivers, ring
from syncline.errors import PeerFailed
from syncline.testing.promises import Promises

__all__ = ["CONTRACT", "PROMPT_ABORT", "SHARING", "Check", "Runner"]

Result = TypeVar("Result")


class Runner(Protocol):
    """Runs work on every rank of a new collective, all at the same time."""

    def __call__(self, size: int, work: Callable[[Collective], Result], /) -> list[Result]:
        """The results in rank order; if a rank fails, its error."""


Check = Callable[[Runner, int], None]

_PROMISES: Final = Promises("This Collective")
_require, _require_equal, _expecting = _PROMISES.require, _PROMISES.require_equal, _PROMISES.expecting

_CPU: Final = torch.device("cpu")
_FLOATS: Final = (torch.float32, torch.float64)
# Nothing, one number, fewer than ranks, odd, more than a 256 KB staging area in float64 only, and in both.
_SIZES: Final = (0, 1, 3, 4_099, 40_003, 100_003)
_PROMPT_S: Final = 1.0
_ROUNDS: Final = 200


def _on_each_rank(work: Callable[[Collective], None]) -> Check:
    """The check that runs this work on every rank."""

    def check(run: Runner, size: int) -> None:
        run(size, work)

    check.__name__ = work.__name__
    return check


def every_rank_knows_its_place(run: Runner, size: int) -> None:
    """Ranks count from 0, and all know how many they are."""
    places = run(size, _place)
    _require(places == [(rank, size) for rank in range(size)], f"ranks and sizes are {places}")


def a_sum_has_the_same_bits_on_every_rank(run: Runner, size: int) -> None:
    """Where rounding depends on the order of additions, all ranks get the same rounding."""
    for allocated in (True, False):
        for dtype in _FLOATS:
            digests = run(size, partial(_sum_with_rounding, dtype=dtype, allocated=allocated))
            _require(len(set(digests)) == 1, f"the ranks' sums of {dtype} differ in their bits")


def a_barrier_waits_for_the_last(run: Runner, size: int) -> None:
    """No rank leaves before all have arrived."""
    rounds = zip(*run(size, _pass_barriers), strict=True)
    for number, passes in enumerate(rounds):
        last_arrival, first_leave = max(arrived for arrived, _ in passes), min(left for _, left in passes)
        _require(last_arrival <= first_leave, f"in round {number} a rank left the barrier before the last one came")


def an_abort_elsewhere_ends_a_call_that_waits(run: Runner, size: int) -> None:
    """One rank never comes and aborts; the others stop waiting for it at once."""
    if size == 1:
        return  # no rank to wait for
    for call in _CALLS:
        aborted_at, *raised_at = run(size, partial(_wait_for_rank_0, call=call))
        _require_prompt(call, aborted_at, raised_at)


def an_abort_from_another_thread_ends_a_call_that_waits(run: Runner, size: int) -> None:
    """A rank that waits for peers that never come is freed by a thread of its own."""
    if size == 1:
        return  # no rank to wait for
    for call in _CALLS:
        took_s, *_ = run(size, partial(_free_rank_0, call=call))
        _require_prompt(call, 0.0, [took_s])


def an_abort_elsewhere_ends_a_call_that_waits_in_a_split(run: Runner, size: int) -> None:
    """Whether or not the rank that aborts the whole is a member of the part, also in a part of a part."""
    if size == 1:
        return  # no rank to wait for
    can_be_apart = size > 2  # or no rank is left to wait
    cases = [(call, can_be_apart, False) for call in _CALLS]
    cases += [("barrier", False, False), ("barrier", False, True), ("barrier", can_be_apart, True)]
    for call, apart, again in cases:
        aborted_at, *raised_at = run(size, partial(_wait_in_split, call=call, apart=apart, again=again))
        _require_prompt(f"{call} in a split", aborted_at, raised_at)


# The work of one rank. Inputs are functions of the rank, so that every rank can work out what all the others hold.


def _place(collective: Collective) -> tuple[int, int]:
    return collective.rank, collective.size


def allocated_memory_is_flat_and_zeroed(collective: Collective) -> None:
    """`allocate` gives what was asked for, separately on every rank."""
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


def a_weighted_sum_is_exact(collective: Collective) -> None:
    """Each rank's own weight counts; any size, allocated or not, used again and again."""
    for allocated, dtype, (case, numel) in product((True, False), _FLOATS, enumerate(_SIZES)):
        tensor = _tensor(collective, numel, dtype, allocated)
        for again in range(2):
            seed = 10 * case + again
            weights = [_weight(rank, again) for rank in range(collective.size)]
            tensor.copy_(_whole_numbers(numel, seed, collective.rank))
            collective.all_reduce_(tensor, weights[collective.rank])
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
        collective.all_reduce_(tensor, weights[collective.rank])
        terms = [x.double() * w for x, w in zip(inputs, weights, strict=True)]
        allowed = 2 * collective.size * torch.finfo(dtype).eps * sum((t.abs() for t in terms), torch.zeros(numel))
        error = (tensor.double() - sum(terms, torch.zeros(numel))).abs()
        _require(bool((error <= allowed).all()), f"the sum of {numel} numbers of {dtype} is off by more than rounding")
        bits.update(tensor.numpy().tobytes())
    return bits.hexdigest()


def a_sum_keeps_integers_whole(collective: Collective) -> None:
    """Integers with weight 1 are not rounded to floats on the way."""
    for allocated in (True, False):
        for dtype, base in ((torch.int64, 2**54 + 1), (torch.int32, 2**25 + 1)):
            for numel in (1, 5, 70_001):
                tensor = _tensor(collective, numel, dtype, allocated)
                tensor.copy_(torch.arange(numel) + base + collective.rank)
                collective.all_reduce_(tensor)
                ranks = collective.size * (collective.size - 1) // 2
                expected = (torch.arange(numel) + base) * collective.size + ranks
                _require_equal(tensor, expected.to(dtype), f"the sum of {numel} integers of {dtype}")


def a_sum_of_part_of_a_tensor_leaves_the_rest_alone(collective: Collective) -> None:
    """Transposed, strided, 0-dimensional, partial and trained tensors, allocated or not."""
    factor = sum(_weight(rank, 0) * (rank + 1) for rank in range(collective.size))
    weight = _weight(collective.rank, 0)
    _require_rest_left_alone(collective, lambda part: collective.all_reduce_(part, weight), factor, "summed")


def a_sum_spreads_what_is_not_finite(collective: Collective) -> None:
    """NaN and infinity on one rank reach all, and only where they were."""
    last = collective.size - 1
    for allocated in (True, False):
        tensor = _tensor(collective, 9, torch.float32, allocated)
        tensor.fill_(1.0)
        if collective.rank == last:
            tensor[2], tensor[8] = torch.nan, torch.inf
        collective.all_reduce_(tensor, 0.5)
        _require(bool(tensor[2].isnan()), "a NaN of one rank is missing in the sum")
        _require(bool(tensor[8].isinf()), "an infinity of one rank is missing in the sum")
        _require(int(tensor.isfinite().sum()) == 7, "numbers became infinite beside the one that was")


def allocated_tensors_do_not_mix(collective: Collective) -> None:
    """Several tensors of equal and different sizes, summed in turn."""
    sizes = (5, 70_001, 5, 0, 1)
    tensors = [collective.allocate(numel, torch.float32, _CPU) for numel in sizes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    for again in range(1, 4):
        for number in (1, 4, 0, 3, 2):
            collective.all_reduce_(tensors[number])
        for number, tensor in enumerate(tensors):
            expected = torch.full_like(tensor, (number + 1) * collective.size**again)
            _require_equal(tensor, expected, f"allocated tensor {number} after {again} sums")


def a_mix_has_the_bits_of_the_equation(collective: Collective) -> None:
    """Every topology, and weights of any kind; any size, allocated or not, used again and again."""
    for allocated, dtype, (case, numel) in product((True, False), _FLOATS, enumerate(_SIZES)):
        tensor = _tensor(collective, numel, dtype, allocated)
        values = {rank: _normal(numel, case, rank).to(dtype) for rank in range(collective.size)}
        tensor.copy_(values[collective.rank])
        for name, mixing in _mixings(collective.size).items():
            collective.mix_(tensor, mixing)
            # Continues where the last one ended.
            values = {rank: mix(values, weights) for rank, weights in mixing.items()}
            _require_equal(tensor, values[collective.rank], f"{numel} numbers of {dtype} after the mixing {name}")


def a_permutation_hands_tensors_on_bit_for_bit(collective: Collective) -> None:
    """Floats that are no numbers, and integers too."""
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


def a_mix_of_part_of_a_tensor_leaves_the_rest_alone(collective: Collective) -> None:
    """Transposed, strided, 0-dimensional, partial and trained tensors, allocated or not."""
    mixing = _mixings(collective.size)["uneven"]
    factor = sum(weight * (rank + 1) for rank, weight in mixing[collective.rank].items())
    _require_rest_left_alone(collective, lambda part: collective.mix_(part, mixing), factor, "mixed")


def _require_rest_left_alone(
    collective: Collective, call: Callable[[torch.Tensor], None], factor: float, done: str
) -> None:
    """`call` gives any view of any tensor, rank + 1 times larger on each rank, `factor` times its first value."""
    for allocated, numel in product((True, False), (36, 360_000)):
        for name, view in _views(numel).items():
            whole = _tensor(collective, numel, torch.float32, allocated)
            start = torch.arange(numel, dtype=torch.float32).remainder_(1000.0)
            whole.copy_(start)
            view(whole).mul_(collective.rank + 1)
            call(view(whole))
            view(start).mul_(factor)
            _require_equal(whole, start, f"a tensor after its {name} part was {done}")
    trained = torch.nn.Parameter(torch.full((3, 5), float(collective.rank + 1)))
    call(trained)
    _require_equal(trained.detach(), torch.full((3, 5), factor), f"a parameter after it was {done}")
    _require(trained.requires_grad and trained.is_leaf, f"a parameter is no longer one after it was {done}")


def a_mix_counts_its_bytes_for_each_rank_that_takes_them(collective: Collective) -> None:
    """And none where no rank takes."""
    for allocated in (True, False):
        for numel in (0, 7, 70_001):
            tensor = _tensor(collective, numel, torch.float64, allocated)
            for name, mixing in _mixings(collective.size).items():
                before = collective.bytes_sent
                collective.mix_(tensor, mixing)
                counted = collective.bytes_sent - before
                expected = tensor.nbytes * len(receivers(mixing, collective.rank))
                _require(counted == expected, f"the mixing {name} counted {counted} bytes and sent {expected}")


def a_mixing_that_does_not_fit_is_refused_on_every_rank(collective: Collective) -> None:
    """Before any rank waits for another; later calls work."""
    size = collective.size
    tensor = torch.ones(4)
    own: Mixing = {rank: {rank: 1.0} for rank in range(size)}
    halves: Mixing = {rank: {rank: 0.5} for rank in range(size)}
    wrong: list[tuple[str, torch.Tensor, Mixing]] = [
        ("that leaves out a rank", tensor, {rank: own[rank] for rank in range(size - 1)}),
        ("of more ranks than there are", tensor, {**own, size: {size: 1.0}}),
        ("that takes from no rank", tensor, {**own, 0: {}}),
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


def a_split_gives_collectives_of_those_with_the_same_color(collective: Collective) -> None:
    """Every way to divide the ranks; all calls work there, in between those of the whole; bytes are counted anew."""
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
    total = whole.size * (whole.size + 1) // 2
    own = part.allocate(1_003, torch.float64, _CPU)
    for name, tensor in {"the whole's": flat, "the part's": own, "ordinary": torch.empty(5)}.items():
        tensor.fill_(whole.rank + 1)
        part.all_reduce_(tensor, 0.5)
        expected = sum(m + 1 for m in members) * 0.5
        _require(bool((tensor == expected).all()), f"{where}: sum of {name} tensor in a part")
        tensor.fill_(whole.rank + 1)
        whole.all_reduce_(tensor)
        _require(bool((tensor == total).all()), f"{where}: sum of {name} tensor in the whole")
        mixing = ring(range(part.size), 0, 0)
        values = {r: _normal(tensor.numel(), 1, m).to(tensor.dtype) for r, m in enumerate(members)}
        tensor.copy_(values[part.rank])
        part.mix_(tensor, mixing)
        _require_equal(tensor, mix(values, mixing[part.rank]), f"{where}: {name} tensor mixed in a part")
    for source, member in enumerate(members):
        number = torch.tensor(whole.rank)
        part.broadcast_(number, source)
        _require(int(number) == member, f"{where}: broadcast in a part")
        _require(whole.all_gather(b"%d" % whole.rank)[member] == b"%d" % member, f"{where}: gather of the whole")
        for _ in range(source):  # parts of different sizes call the whole equally often
            part.barrier()
    for _ in range(whole.size - len(members)):
        whole.all_gather(b"%d" % whole.rank)
    gathered = part.all_gather(b"x" * whole.rank)
    _require(gathered == [b"x" * m for m in members], f"{where}: gather in a part")


def a_split_can_be_split_again(collective: Collective) -> None:
    """Also when some have split more often than others."""
    rank, size = collective.rank, collective.size
    halves = collective.split(rank % 2)
    members = list(range(rank % 2, size, 2))
    flat = torch.empty(9)
    if rank % 2 == 0:
        for color in (0, halves.rank % 2):
            part = halves.split(color)
            flat.fill_(1.0)
            part.all_reduce_(flat)
            _require(bool((flat == part.size).all()), "sum in a part of a part")
    for shift in range(2):
        again = collective.split((rank + shift) // 2)
        peers = [r for r in range(size) if (r + shift) // 2 == (rank + shift) // 2]
        _require(again.all_gather(b"%d" % rank) == [b"%d" % r for r in peers], "gather in a second split")
        _require(halves.all_gather(b"%d" % rank) == [b"%d" % r for r in members], "gather in the first split")
    _require(collective.all_gather(b"%d" % rank) == [b"%d" % r for r in range(size)], "gather after two splits")


def an_abort_of_a_split_is_only_its_own(collective: Collective) -> None:
    """The whole continues, and so do the other parts."""
    halves = collective.split(collective.rank % 2)
    part = halves.split(0)
    if collective.rank % 2 == 1:
        part.abort()
        with _expecting(PeerFailed, "a call in a part of a part that was aborted"):
            part.barrier()
    else:
        part.barrier()
    halves.barrier()
    collective.barrier()
    if collective.rank % 2 == 0:
        halves.abort()
        for each in (halves, part):
            with _expecting(PeerFailed, "a call in a part that was aborted, or in what was split from it"):
                each.all_gather(b"payload")
    else:
        halves.barrier()
    tensor = torch.ones(3)
    collective.all_reduce_(tensor)
    _require(bool((tensor == collective.size).all()), "a sum in the whole after parts were aborted")


def an_abort_reaches_what_was_split(collective: Collective) -> None:
    """Calls of the part raise after the whole was aborted."""
    parts = [collective.split(0), collective.split(collective.rank)]
    parts.append(parts[0].split(0))
    flats = [part.allocate(10, torch.float32, _CPU) for part in parts]
    collective.barrier()
    collective.abort()
    for part, flat in zip(parts, flats, strict=True):
        for name in _CALLS:
            with _expecting(PeerFailed, f"{name} in a split after an abort of the whole"):
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
        return _abort_later(collective)
    if apart and rank == collective.size - 1:
        return 0.0  # never comes
    with _expecting(PeerFailed, f"{call} in a split"):
        _make(call, part, flat)
    return time.monotonic()


def shared_memory_is_seen_by_all(collective: Collective) -> None:
    """Flat, zeroed, one for all, and apart from what else is shared or allocated."""
    rank, size = collective.rank, collective.size
    for dtype in (*_FLOATS, torch.uint8, torch.int64):
        for numel in (0, 1, 3, 40_003):
            tensor, other = collective.allocate_shared(numel, dtype), collective.allocate_shared(numel, dtype)
            own = collective.allocate(numel, dtype, _CPU)
            _require(
                tensor.shape == (numel,) and tensor.dtype == dtype,
                f"allocate_shared({numel}, {dtype}) gave something else",
            )
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
    collective.allocate_shared(10, torch.float32)
    _require(collective.bytes_sent == before, "sharing memory counted bytes")


def parts_share_memory_of_their_own(collective: Collective) -> None:
    """What is shared in a split is seen by its members only."""
    part = collective.split(collective.rank % 2)
    tensor = part.allocate_shared(part.size, torch.float32)
    tensor[part.rank] = collective.rank + 1
    collective.barrier()
    expected = [float(r + 1) for r in range(collective.rank % 2, collective.size, 2)]
    _require(tensor.tolist() == expected, "memory shared in a part holds something else than its members wrote")


def a_broadcast_brings_the_tensor_of_any_source(collective: Collective) -> None:
    """Large, non-contiguous, 0-dimensional, integer and trained tensors, from each rank."""
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


def a_gather_brings_payloads_of_any_length(collective: Collective) -> None:
    """Nothing, a few bytes and more than a megabyte, all in one call."""

    def payload(rank: int, case: int) -> bytes:
        length = (0, 1, 300_001, 1_500_007, 262_144)[(rank + case) % 5]
        return (b"%d from rank %d. " % (case, rank) * (length // 8 + 1))[:length]

    for case in range(5):
        expected = [payload(rank, case) for rank in range(collective.size)]
        _require(collective.all_gather(expected[collective.rank]) == expected, f"gather {case} brought something else")
    for case in range(50):
        _require(collective.all_gather(b"") == [b""] * collective.size, "a gather of nothing brought something")
        expected = [b"x" * (rank + case) for rank in range(collective.size)]
        _require(collective.all_gather(expected[collective.rank]) == expected, "a gather after nothing went wrong")


def _pass_barriers(collective: Collective) -> list[tuple[float, float]]:
    passes = []
    for number in range(30):
        if number % collective.size == collective.rank:
            _keep_busy(0.001)  # so that the others are there long before
        arrived = time.monotonic()
        collective.barrier()
        passes.append((arrived, time.monotonic()))
    return passes


def calls_of_all_kinds_follow_each_other_safely(collective: Collective) -> None:
    """Two hundred rounds of everything: what a slow rank still reads must not be overwritten by a quick one."""
    rank, size = collective.rank, collective.size
    flat = collective.allocate(1_001, torch.float32, _CPU)
    for number in range(_ROUNDS):
        source = number % size
        flat.fill_(rank + number)
        collective.all_reduce_(flat, 2.0)
        _require(bool((flat == 2.0 * (size * number + size * (size - 1) / 2)).all()), f"round {number}: allocated sum")
        ordinary = torch.full((number % 7, 3), float(rank + 1), dtype=torch.float64)
        collective.all_reduce_(ordinary, 0.5)
        _require(bool((ordinary == 0.25 * size * (size + 1)).all()), f"round {number}: ordinary sum")
        mixing = {r: {r: 0.75, (r + number) % size: 0.25} if number % size else {r: 1.0} for r in range(size)}
        expected = 0.75 * rank + 0.25 * ((rank + number) % size)
        flat.fill_(rank)
        collective.mix_(flat, mixing)
        _require(bool((flat == expected).all()), f"round {number}: allocated tensor mixed")
        ordinary = torch.full((number % 7, 3), float(rank), dtype=torch.float64)
        collective.mix_(ordinary, mixing)
        _require(bool((ordinary == expected).all()), f"round {number}: ordinary tensor mixed")
        payloads = [bytes([r, number % 256]) * (300 * ((r + number) % 3)) for r in range(size)]
        _require(collective.all_gather(payloads[rank]) == payloads, f"round {number}: all_gather")
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
            collective.all_reduce_(large)
            _require(bool((large == size * (size - 1) / 2).all()), f"round {number}: large sum")


def after_an_abort_every_call_raises_peer_failed(collective: Collective) -> None:
    """An abort is for good, and may be repeated."""
    flat = _allocated_unless_aborted(collective)
    collective.abort()
    for _ in range(2):
        for name in _CALLS:
            with _expecting(PeerFailed, f"{name} after an abort"):
                _make(name, collective, flat)
        collective.abort()
    collective.close()


def _wait_for_rank_0(collective: Collective, *, call: str) -> float:
    flat = _allocated_unless_aborted(collective)
    if collective.rank == 0:
        return _abort_later(collective)
    with _expecting(PeerFailed, f"{call} without rank 0"):
        _make(call, collective, flat)
    raised_at = time.monotonic()
    with _expecting(PeerFailed, "a later call"):
        collective.barrier()
    return raised_at


def _free_rank_0(collective: Collective, *, call: str) -> float:
    flat = collective.allocate(10, torch.float32, _CPU)
    if collective.rank != 0:
        return 0.0  # never comes
    with ThreadPoolExecutor(1) as other_thread:
        aborted_at = other_thread.submit(_abort_later, collective)
        with _expecting(PeerFailed, f"{call} without the others"):
            _make(call, collective, flat)
        return time.monotonic() - aborted_at.result()


_CALLS: Final = (
    "all_reduce_ of an allocated tensor",
    "all_reduce_",
    "mix_ of an allocated tensor",
    "mix_",
    "broadcast_",
    "all_gather",
    "split",
    "barrier",
)


def _make(call: str, collective: Collective, flat: torch.Tensor) -> None:
    match call:
        case "all_reduce_ of an allocated tensor":
            collective.all_reduce_(flat, 0.5)
        case "all_reduce_":
            collective.all_reduce_(torch.ones(3))
        case "mix_ of an allocated tensor":
            collective.mix_(flat, _all_to_all(collective.size))
        case "mix_":
            collective.mix_(torch.ones(3), _all_to_all(collective.size))
        case "split":
            collective.split(0)
        case "broadcast_":
            collective.broadcast_(torch.ones(3))
        case "all_gather":
            collective.all_gather(b"payload")
        case _:
            collective.barrier()


def _abort_later(collective: Collective) -> float:
    """The time of the abort."""
    # Most likely the call to be woken is asleep by now. If it is not even made yet, it must raise all the same, so the
    # check does not depend on this pause.
    time.sleep(0.03)
    aborted_at = time.monotonic()
    collective.abort()
    return aborted_at


def _allocated_unless_aborted(collective: Collective) -> torch.Tensor:
    try:
        return collective.allocate(10, torch.float32, _CPU)
    except PeerFailed:  # a quick rank has allocated and aborted already
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


def _require_prompt(call: str, aborted_at: float, raised_at: Sequence[float]) -> None:
    late = [f"{t - aborted_at:.1f} s" for t in raised_at if t - aborted_at > _PROMPT_S]
    _require(not late, f"{call} raised PeerFailed only {', '.join(late)} after the abort")


CONTRACT: Final[tuple[Check, ...]] = (
    every_rank_knows_its_place,
    a_sum_has_the_same_bits_on_every_rank,
    a_barrier_waits_for_the_last,
    *map(
        _on_each_rank,
        (
            allocated_memory_is_flat_and_zeroed,
            a_weighted_sum_is_exact,
            a_sum_keeps_integers_whole,
            a_sum_of_part_of_a_tensor_leaves_the_rest_alone,
            a_sum_spreads_what_is_not_finite,
            allocated_tensors_do_not_mix,
            a_mix_has_the_bits_of_the_equation,
            a_permutation_hands_tensors_on_bit_for_bit,
            a_mix_of_part_of_a_tensor_leaves_the_rest_alone,
            a_mix_counts_its_bytes_for_each_rank_that_takes_them,
            a_mixing_that_does_not_fit_is_refused_on_every_rank,
            a_broadcast_brings_the_tensor_of_any_source,
            a_gather_brings_payloads_of_any_length,
            a_split_gives_collectives_of_those_with_the_same_color,
            a_split_can_be_split_again,
            an_abort_of_a_split_is_only_its_own,
            an_abort_reaches_what_was_split,
            calls_of_all_kinds_follow_each_other_safely,
            after_an_abort_every_call_raises_peer_failed,
        ),
    ),
)
"""What every collective must do."""

PROMPT_ABORT: Final[tuple[Check, ...]] = (
    an_abort_elsewhere_ends_a_call_that_waits,
    an_abort_from_another_thread_ends_a_call_that_waits,
    an_abort_elsewhere_ends_a_call_that_waits_in_a_split,
)
"""What a collective must do as well if its calls in progress can be woken."""

SHARING: Final[tuple[Check, ...]] = (
    _on_each_rank(shared_memory_is_seen_by_all),
    _on_each_rank(parts_share_memory_of_their_own),
)
"""What a collective must do as well if its ranks share memory."""
