"""What every `Collective` must do, as checks that run with any way of starting ranks.

Here: the checks. Each is a function of a runner, which calls some work once for every rank of a new collective, and of
the number of ranks; it returns if the promise is kept. Not here: runners (`threads.py` has one) and pytest, which is
not needed but easily used:

    @pytest.mark.parametrize("check", [*CONTRACT, *PROMPT_ABORT], ids=lambda check: check.__name__)
    def test_my_collective(check):
        check(run_on_threads, 3)

`CONTRACT` holds for all. `PROMPT_ABORT` holds where a call in progress can be woken: not for gloo, whose calls end only
with a peer's connection or the time limit (`ProcessGroup.abort` says so too).

The work is made of this module's functions and plain values, so a runner may pickle it to send it to another process.
All ranks must run on one host, since two checks compare their clocks.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, Protocol, TypeVar

import torch

from syncline.comms.collective import Collective
from syncline.errors import PeerLost

__all__ = ["CONTRACT", "PROMPT_ABORT", "Check", "Runner"]

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
    a_broadcast_brings_the_tensor_of_any_source,
    a_gather_brings_payloads_of_any_length,
    a_barrier_waits_for_the_last,
    calls_of_all_kinds_follow_each_other_safely,
    after_an_abort_every_call_raises_peer_lost,
)
"""What every collective must do."""

PROMPT_ABORT: Final[tuple[Check, ...]] = (
    an_abort_elsewhere_ends_a_call_that_waits,
    an_abort_from_another_thread_ends_a_call_that_waits,
)
"""What a collective must do as well if its calls in progress can be woken."""


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


_CALLS: Final = ("sum_ of an allocated tensor", "sum_", "broadcast_", "gather", "barrier")


def _make(call: str, collective: Collective, flat: torch.Tensor) -> None:
    match call:
        case "sum_ of an allocated tensor":
            collective.sum_(flat, 0.5)
        case "sum_":
            collective.sum_(torch.ones(3))
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


def _weight(rank: int, case: int) -> float:
    """Unequal, one of them 0, and short in binary: with whole numbers, every order of additions gives the exact sum."""
    return (0.25, 1.5, 0.0, 1.0, 2.75, -0.5)[(rank + case) % 6]


def _whole_numbers(numel: int, seed: int, rank: int) -> torch.Tensor:
    return torch.arange(numel).mul_(2 * seed + 7_919).add_(rank * 104_729 + seed).remainder_(2001).sub_(1000).double()


def _normal(numel: int, seed: int, rank: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * seed + rank))


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
