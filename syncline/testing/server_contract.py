"""The contract of parameter servers, as checks that run with any way of starting servers.

Here: the checks. Each is a function of a *start*, which is called with the number of workers and gives, for the time
of a `with`, a function that connects a worker; the check returns if the promise is kept. Not here: starting servers
(`servers_on_threads` in `threads.py` is the simplest way), and pytest, which is not needed but easily used:

    @pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
    def test_my_servers(check):
        check(partial(servers_on_threads, 2))

How many shards there are and how bytes travel is up to the start; no check may notice.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam

from syncline.comms.codecs import Int8Codec, TopKCodec
from syncline.comms.parameter_server.client import ParameterServers
from syncline.comms.parameter_server.outgoing import EncodedGradient, part_of
from syncline.errors import ConfigError, PeerFailed
from syncline.testing.promises import Promises
from syncline.testing.threads import call_on_threads

__all__ = ["CONTRACT", "Check", "Start"]

Result = TypeVar("Result")
Connect = Callable[[int], ParameterServers]
"""Connects the worker of this rank."""


class Start(Protocol):
    """Starts servers for this many workers, and ends them on exit."""

    def __call__(self, size: int, /) -> AbstractContextManager[Connect]:
        """A function that connects to them."""


Check = Callable[[Start], None]

_PROMISES: Final = Promises("A parameter server")
_require, _require_equal, _expecting = _PROMISES.require, _PROMISES.require_equal, _PROMISES.expecting

_LIMIT_S: Final = 20.0
_SHAPES: Final = ((6, 5), (5,), (), (4, 3, 2), (0, 3), (9, 2))
_NUMEL: Final = 30 + 5 + 1 + 24 + 18
_Make = Callable[[list[nn.Parameter]], Optimizer]


def _sgd_in_groups(parameters: list[nn.Parameter]) -> Optimizer:
    groups: list[dict[str, Any]] = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.05}]
    return SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)


def _adamw_in_groups(parameters: list[nn.Parameter]) -> Optimizer:
    groups: list[dict[str, Any]] = [{"params": parameters[:1], "weight_decay": 0.1}, {"params": parameters[1:]}]
    return AdamW(groups, lr=0.01)


_sgd: Final = partial(SGD, lr=0.1, momentum=0.9)
_adam: Final = partial(Adam, lr=0.01)
_adagrad: Final = partial(Adagrad, lr=0.1)
_OPTIMIZERS: Final[tuple[_Make, ...]] = (_sgd_in_groups, _adam, _adamw_in_groups, _adagrad)


def every_worker_pulls_what_rank_0_began_with(start: Start) -> None:
    """The other workers' parameters do not matter."""

    def work(servers: ParameterServers) -> Tensor:
        parameters = _parameters(seed=servers.rank)
        servers.begin(parameters, SGD(parameters, lr=0.1), rule="apply")
        return _pulled(servers)

    for pulled in _on_workers(start, 3, work):
        _require_equal(pulled, _flat(_parameters(seed=0)), "the parameters that a worker pulled")


def collecting_equals_one_optimizer_on_the_weighted_sum(start: Start) -> None:
    """Bit by bit, for several optimizers with several groups; piggybacked values are summed with the same weights."""
    for make in _OPTIMIZERS:

        def work(servers: ParameterServers, make: Any = make) -> tuple[Tensor, Tensor, Tensor]:
            parameters = _parameters()
            servers.begin(parameters, make(parameters), rule="collect")
            out, piggybacked = torch.empty(_NUMEL), torch.empty(2)
            for step in range(4):
                piggybacked[0], piggybacked[1] = float(servers.rank), step
                servers.collect(_gradient(step, servers.rank), piggybacked, weight=_weight(servers.rank), out=out)
            return out, _pulled(servers), piggybacked.clone()

        expected = _Reference(make)
        for step in range(4):
            expected.step(_weighted_sum([_gradient(step, r) for r in range(3)]))
        piggybacked = _weighted_sum([torch.tensor([float(r), 3.0]) for r in range(3)])
        for out, pulled, summed in _on_workers(start, 3, work):
            _require_equal(out, expected.flat, f"what {expected.name} collected and sent back")
            _require_equal(pulled, out, "what was pulled after it was collected")
            _require_equal(summed, piggybacked, "the sum of the piggybacked values")


def a_step_whose_loss_is_not_finite_changes_nothing(start: Start) -> None:
    """Neither parameters nor the optimizer's state change, and every worker sees the NaN."""

    def work(servers: ParameterServers) -> Tensor:
        parameters = _parameters()
        servers.begin(parameters, _sgd(parameters), rule="collect")
        for step in range(3):
            piggybacked = torch.tensor([float("nan") if (step, servers.rank) == (1, 1) else 1.0])
            servers.collect(_gradient(step, servers.rank), piggybacked, weight=_weight(servers.rank))
            _require(
                bool(piggybacked.isfinite()) == (step != 1),
                f"the loss of step {step} came back as {piggybacked.item()}",
            )
        return _pulled(servers)

    expected = _Reference(_sgd)
    for step in (0, 2):
        expected.step(_weighted_sum([_gradient(step, r) for r in range(2)]))
    for pulled in _on_workers(start, 2, work):
        _require_equal(pulled, expected.flat, "the parameters after a step that was to be skipped")


def pushes_in_turn_equal_one_optimizer(start: Start) -> None:
    """Each push is one step with the weighted gradient, and a pull sees the worker's own pushes."""
    for make in _OPTIMIZERS:
        expected = _Reference(make)
        with _begun(start, 2, make, rule="apply") as workers:
            gradient = torch.empty(_NUMEL)
            for step in range(6):
                turn = workers[step % 2]
                gradient.copy_(_gradient(step, turn.rank))
                turn.push(gradient, weight=0.75)
                gradient.fill_(torch.nan)  # it may be overwritten at once
                expected.step(_gradient(step, turn.rank) * 0.75)
                _require_equal(_pulled(turn), expected.flat, f"what {expected.name} made of pushes")


def a_schedule_of_the_worker_reaches_the_servers(start: Start) -> None:
    """Settings that change between pushes count from the next push on, each worker's for its own pushes."""
    expected = _Reference(_sgd)
    with start(1) as connect, contextlib.closing(connect(0)) as servers:
        parameters = _parameters()
        optimizer = _sgd(parameters)
        servers.begin(parameters, optimizer, rule="apply")
        for step in range(6):
            for each in (optimizer, expected.optimizer):
                each.param_groups[0].update(lr=0.1 / (1 + step // 2), momentum=0.9 - 0.1 * (step // 3))
            servers.push(_gradient(step, 0), weight=1.0)
            expected.step(_gradient(step, 0))
        _require_equal(_pulled(servers), expected.flat, "the parameters after a schedule")


def staleness_counts_the_updates_between_reading_and_applying(start: Start) -> None:
    """The worker that has not read since others pushed is behind by their number, and its own."""
    with _begun(start, 2, _sgd, rule="apply") as (first, second):
        for _ in range(3):
            first.push(_gradient(0, 0), weight=1.0)
            _pulled(first)
        second.push(_gradient(0, 1), weight=1.0)
        second.push(_gradient(0, 1), weight=1.0)
        _pulled(second)
        second.push(_gradient(0, 1), weight=1.0)
        _pulled(second)
        first.push(_gradient(0, 0), weight=1.0)
        _pulled(first)
        _require(first.take_staleness() == {0: 3, 3: 1}, "the staleness of the first worker's updates is wrong")
        _require(second.take_staleness() == {0: 1, 3: 1, 4: 1}, "the staleness of the second worker's updates is wrong")
        _require(first.take_staleness() == {}, "staleness was reported twice")


def the_gate_holds_a_worker_that_is_too_far_ahead(start: Start) -> None:
    """And opens when the slowest has come near enough, by a push or by ticks."""
    with _begun(start, 3, _sgd, rule="apply", clock=5) as (quick, slow, third):
        third.tick(10)
        for _ in range(2):
            _require(quick.gate(2, _LIMIT_S), "the gate is shut for a worker that is near the others")
            quick.push(_gradient(0, 0), weight=1.0)
        _require(quick.clock == 7, f"two pushes took the clock from 5 to {quick.clock}")
        _require(quick.gate(2, _LIMIT_S), "the gate is shut at its bound")
        quick.tick()
        _require(not quick.gate(2, 0.0), "the gate let a worker pass that is 3 ahead, with bound 2")
        _require(not quick.gate(2, 0.0), "asking again opened the gate")
        slow.push(_gradient(0, 1), weight=1.0)
        _require(quick.gate(2, _LIMIT_S), "the gate stayed shut when the slowest had come near")
        _require(not quick.gate(0, 0.0), "a smaller bound let a worker pass")
        slow.tick(2)
        _require(quick.gate(0, _LIMIT_S), "the gate stayed shut for equal clocks")
        _pulled(quick)
        _require(quick.cache_clock == 8, f"a copy of 8 steps is said to be of {quick.cache_clock}")


def a_gate_that_stays_shut_does_not_disturb_other_calls(start: Start) -> None:
    """It may open in the middle of them, or be asked for anew."""
    with _begun(start, 2, _sgd, rule="apply") as (quick, slow):
        expected = _Reference(_sgd)
        for step in range(5):
            _require(not quick.gate(0, 0.0) if step else quick.gate(0, _LIMIT_S), "the gate is wrong")
            quick.push(_gradient(step, 0), weight=1.0)
            expected.step(_gradient(step, 0))
            _require_equal(_pulled(quick), expected.flat, "what was pulled while a gate was shut")
        _require(not quick.gate(0, 0.0), "the gate is open")
        slow.tick(5)
        _pulled(slow)  # so that the tick was heard
        _require_equal(_pulled(quick), expected.flat, "what was pulled while a gate opened")
        _require(quick.gate(0, _LIMIT_S), "the gate did not open")


def workers_and_the_center_pull_at_each_other(start: Start) -> None:
    """Rule "elastic": what a worker gives the center gets, from the values before."""
    rate = 0.25
    with _begun(start, 2, _sgd, rule="elastic", rate=rate) as workers:
        center = _flat(_parameters())
        for step in range(4):
            turn = workers[step % 2]
            mine = _gradient(step, turn.rank)
            distance = mine - center
            moved = mine.clone()
            turn.pull_elastic(moved)
            _require_equal(moved, mine - rate * distance, "a worker that was pulled to the center")
            center = center.add(distance, alpha=rate)
            _require_equal(_pulled(turn), center, "the center after a worker pulled at it")


def rows_travel_alone_and_count_as_the_dense_gradient(start: Start) -> None:
    """Rows in any order; dense parameters get zeros elsewhere; fewer bytes travel."""
    with _begun(start, 1, _adam, rule="apply") as (servers,):
        expected = _Reference(_adam)
        for step in range(4):
            rows = {0: torch.tensor([5, 1, 3]), 5: torch.tensor([8, 0, 4, 8]), 3: torch.tensor([], dtype=torch.int64)}
            gradient = _only_rows(_gradient(step, 0), rows)
            servers.push(gradient, weight=0.5, rows=rows)
            expected.step(gradient * 0.5)
        _require_equal(_pulled(servers), expected.flat, "the parameters after pushes of rows")


def sparse_parameters_are_treated_as_torch_treats_them(start: Start) -> None:
    """Rows that were not touched are left alone, by SparseAdam, Adagrad and SGD; also collected from several."""
    rows = [{0: torch.tensor([4, 1])}, {0: torch.tensor([1, 5])}]
    makes: tuple[_Make, ...] = (partial(SparseAdam, lr=0.01), _adagrad, partial(SGD, lr=0.1))
    for make in makes:
        expected = _Reference(make, _embedding())
        with start(1) as connect, contextlib.closing(connect(0)) as servers:
            parameters = _embedding()
            servers.begin(parameters, make(parameters), rule="apply", sparse=[True])
            for step in range(4):
                gradient = _gradient(step, 0)[:30]
                servers.push(gradient, weight=1.0, rows=rows[step % 2])
                expected.step_sparse(gradient, rows[step % 2][0])
            out = torch.empty(30)
            servers.pull(out)
            _require_equal(out, expected.flat, f"what {expected.name} made of sparse pushes")

        def work(servers: ParameterServers, make: Any = make) -> Tensor:
            parameters = _embedding()
            servers.begin(parameters, make(parameters), rule="collect", sparse=[True])
            out = torch.empty(30)
            for step in range(3):
                own = _only_rows(_gradient(step, servers.rank)[:30], rows[servers.rank])
                servers.collect(own, torch.ones(1), weight=0.5, rows=rows[servers.rank], out=out)
            return out

        expected = _Reference(make, _embedding())
        for step in range(3):
            terms = [_only_rows(_gradient(step, r)[:30], rows[r]) for r in range(2)]
            expected.step_sparse((terms[0] * 0.5).add_(terms[1], alpha=0.5), torch.tensor([1, 4, 5]))
        for out in _on_workers(start, 2, work):
            _require_equal(out, expected.flat, f"what {expected.name} made of sparse gradients collected")


def ranges_touch_nothing_beside_them(start: Start) -> None:
    """Parameters without a value in the ranges have no gradient; a pull of ranges fills only those."""
    spans = [(3, 20), (30, 35), (40, 44)]
    with _begun(start, 1, _adam, rule="apply") as (servers,):
        expected = _Reference(_adam)
        for step in range(3):
            servers.push(_gradient(step, 0), weight=1.0, ranges=spans)
            gradient = torch.zeros(_NUMEL)
            for low, high in spans:
                gradient[low:high] = _gradient(step, 0)[low:high]
            expected.set_gradients(gradient)
            for index in (2, 4, 5):  # no value of theirs is in the ranges
                expected.parameters[index].grad = None
            if len(servers.ranges) > 1:
                break  # with more shards, pieces of a parameter are on their own
            expected.optimizer.step()
        before = _pulled(servers)
        if len(servers.ranges) == 1:
            _require_equal(before, expected.flat, "the parameters after pushes of ranges")
        out = torch.full((_NUMEL,), 7.0)
        servers.pull(out, ranges=spans)
        for low, high in spans:
            _require_equal(out[low:high], before[low:high], "a range that was pulled")
            out[low:high] = 7.0
        _require_equal(out, torch.full((_NUMEL,), 7.0), "what lies beside the ranges that were pulled")


def encoded_gradients_count_as_what_they_decode_to(start: Start) -> None:
    """Each shard's part is encoded on its own."""
    for codec in (Int8Codec(), TopKCodec(0.25)):
        with _begun(start, 1, _sgd, rule="apply") as (servers,):
            expected = _Reference(_sgd)
            for step in range(3):
                parts = [part_of(_gradient(step, 0), shard) for shard in servers.ranges]
                payloads = [codec.encode(part) for part in parts]
                sent = servers.bytes_sent
                servers.push(EncodedGradient(payloads, codec), weight=0.5)
                _require(servers.bytes_sent - sent == sum(len(p) for p in payloads), "other bytes than the payloads")
                decoded = [codec.decode(p, part.numel()) for p, part in zip(payloads, parts, strict=True)]
                expected.step(torch.cat(decoded) * 0.5)
            _require_equal(_pulled(servers), expected.flat, f"the parameters after pushes as {codec.name}")


def fetching_ahead_brings_ones_own_pushes(start: Start) -> None:
    """And never waits; what was taken is not there a second time."""
    with _begun(start, 1, _sgd, rule="apply") as (servers,):
        out = torch.zeros(_NUMEL)
        _require(not servers.take_prefetched(out), "there was something to take before anything was fetched")
        for step in range(5):
            servers.push(_gradient(step, 0), weight=1.0)
            servers.prefetch()
            servers.prefetch()
            _until(lambda: servers.take_prefetched(out), "what was fetched ahead never came")
            _require(not servers.take_prefetched(out), "the same was taken twice")
            _require_equal(out, _pulled(servers), "what was fetched ahead")
            _require(servers.cache_clock == step + 1, "the clock of what was fetched ahead is wrong")
        _require(servers.take_staleness() == {0: 5}, "fetching ahead does not count as reading")


def a_saved_state_continues_bit_for_bit(start: Start) -> None:
    """In new servers, from the pulled parameters and the state."""
    for make in _OPTIMIZERS:
        expected = _Reference(make)
        with _begun(start, 1, make, rule="apply") as (servers,):
            for step in range(3):
                servers.push(_gradient(step, 0), weight=1.0)
            saved, state = _pulled(servers), servers.state()
        with start(1) as connect, contextlib.closing(connect(0)) as servers:
            parameters = _parameters(seed=5)
            nn.utils.vector_to_parameters(saved, parameters)
            servers.begin(parameters, make(parameters), rule="apply", clock=3, state=state)
            for step in range(3, 6):
                servers.push(_gradient(step, 0), weight=1.0)
            continued = _pulled(servers)
            _require(servers.clock == 6, f"three steps after clock 3, the clock is {servers.clock}")
            _require(servers.take_staleness() == {0: 1, 1: 1, 2: 1}, "versions do not continue from the saved one")
        for step in range(6):
            expected.step(_gradient(step, 0))
        _require_equal(continued, expected.flat, f"the parameters of {expected.name} after continuing")


def a_second_beginning_starts_anew(start: Start) -> None:
    """With another rule and another model; what the worker's own optimizer remembers is taken along."""

    def work(servers: ParameterServers) -> Tensor:
        parameters = _parameters()
        servers.begin(parameters, _sgd(parameters), rule="apply")
        servers.push(_gradient(0, servers.rank), weight=1.0)
        servers.prefetch()
        small = [nn.Parameter(torch.ones(3, 2))]
        optimizer = _sgd(small)
        small[0].grad = torch.ones(3, 2)
        optimizer.step()
        out = torch.empty(6)
        servers.begin(small, optimizer, rule="collect", clock=7)
        _require(servers.clock == 7, "the clock did not start anew")
        servers.collect(torch.ones(6), torch.ones(1), weight=0.5, out=out)
        return out

    expected = _Reference(_sgd, [nn.Parameter(torch.ones(3, 2))])
    for _ in range(2):
        expected.step(torch.ones(6))
    for out in _on_workers(start, 2, work):
        _require_equal(out, expected.flat, "the parameters after beginning again")


def bytes_are_counted_as_they_travel(start: Start) -> None:
    """Only bulk counts, the same through any transport."""
    with _begun(start, 1, _sgd, rule="apply") as (servers,):
        sent, received = servers.bytes_sent, servers.bytes_received
        servers.push(_gradient(0, 0), weight=1.0)
        servers.tick()
        _pulled(servers)
        _require(servers.bytes_sent - sent == 4 * _NUMEL, f"{servers.bytes_sent - sent} bytes sent")
        _require(servers.bytes_received - received == 4 * _NUMEL, f"{servers.bytes_received - received} bytes received")


def a_wrong_request_is_refused_and_changes_nothing(start: Start) -> None:
    """The wrong rule is an error for the worker that used it; its next request succeeds."""
    with _begun(start, 2, _sgd, rule="apply") as (first, second):
        before = _pulled(first)
        try:
            first.pull_elastic(torch.zeros(_NUMEL))
        except PeerFailed:
            raise
        except Exception as error:
            _require("rule 'apply'" in str(error), f"the error does not say what is wrong: {error}")
        else:
            _require(False, "a request by another rule was met")
        _require_equal(_pulled(second), before, "the parameters after a request that was refused")


def a_worker_that_vanishes_does_not_harm_the_others(start: Start) -> None:
    """No worker waits at the gate for it; a replacement can join, no further behind than the slowest."""
    with start(2) as connect:
        stays, vanishes = connect(0), connect(1)
        with contextlib.closing(stays):
            _begin_all([stays, vanishes], _sgd, rule="apply")
            stays.tick(4)
            _require(not stays.gate(0, 0.0), "the gate is open for a worker that is 4 ahead")
            vanishes.close(goodbye=False)
            _require(stays.gate(0, _LIMIT_S), "the gate waits for a worker that is gone")
            stays.push(_gradient(0, 0), weight=1.0)
            expected = _pulled(stays)
            with contextlib.closing(connect(1)) as newcomer:
                parameters = _parameters(seed=3)
                newcomer.begin(parameters, _sgd(parameters), rule="apply", mode="join")
                _require(newcomer.clock == 5, f"a newcomer's clock is {newcomer.clock}, the slowest's is 5")
                _require_equal(_pulled(newcomer), expected, "what a newcomer pulled")
                newcomer.push(_gradient(1, 1), weight=1.0)
                changed = _pulled(newcomer)
                _require(not torch.equal(changed, expected), "a newcomer's push has no effect")
                _require_equal(_pulled(stays), changed, "what was pulled after a newcomer's push")


def waiting_for_the_gradient_of_a_failed_worker_raises_peer_failed(start: Start) -> None:
    """`PeerFailed`, not a timeout; also for workers that collect later."""
    with start(2) as connect:
        stays, vanishes = connect(0), connect(1)
        try:
            _begin_all([stays, vanishes], _sgd, rule="collect")
            vanishes.close(goodbye=False)
            for _ in range(2):
                with _expecting(PeerFailed, "a collect without the other worker"):
                    stays.collect(_gradient(0, 0), torch.ones(1), weight=0.5)
        finally:
            stays.close()
        with contextlib.closing(connect(1)):
            pass  # so that every worker has said goodbye


def clipping_is_offered_only_where_the_whole_norm_is_known(start: Start) -> None:
    """With one shard it equals torch's; with more it is refused before anything is sent."""
    with _begun(start, 1, _sgd, rule="collect") as (servers,):
        if len(servers.ranges) > 1:
            with _expecting(ConfigError, "clip_norm with several shards"):
                servers.collect(_gradient(0, 0), torch.ones(1), weight=1.0, clip_norm=1.0)
            return
        expected = _Reference(_sgd)
        for step in range(3):
            servers.collect(_gradient(step, 0), torch.ones(1), weight=1.0, clip_norm=1.0)
            expected.set_gradients(_gradient(step, 0))
            nn.utils.clip_grad_norm_([p for p in expected.parameters if p.numel()], 1.0)
            expected.optimizer.step()
        _require_equal(_pulled(servers), expected.flat, "the parameters after clipped steps")


CONTRACT: Final[tuple[Check, ...]] = (
    every_worker_pulls_what_rank_0_began_with,
    collecting_equals_one_optimizer_on_the_weighted_sum,
    a_step_whose_loss_is_not_finite_changes_nothing,
    pushes_in_turn_equal_one_optimizer,
    a_schedule_of_the_worker_reaches_the_servers,
    staleness_counts_the_updates_between_reading_and_applying,
    the_gate_holds_a_worker_that_is_too_far_ahead,
    a_gate_that_stays_shut_does_not_disturb_other_calls,
    workers_and_the_center_pull_at_each_other,
    rows_travel_alone_and_count_as_the_dense_gradient,
    sparse_parameters_are_treated_as_torch_treats_them,
    ranges_touch_nothing_beside_them,
    encoded_gradients_count_as_what_they_decode_to,
    fetching_ahead_brings_ones_own_pushes,
    a_saved_state_continues_bit_for_bit,
    a_second_beginning_starts_anew,
    bytes_are_counted_as_they_travel,
    a_wrong_request_is_refused_and_changes_nothing,
    a_worker_that_vanishes_does_not_harm_the_others,
    waiting_for_the_gradient_of_a_failed_worker_raises_peer_failed,
    clipping_is_offered_only_where_the_whole_norm_is_known,
)
"""What every server of parameters must do."""


# Workers


def _on_workers(start: Start, size: int, work: Callable[[ParameterServers], Result]) -> list[Result]:
    """The results of `work` for each worker, run concurrently."""
    with start(size) as connect:

        def with_goodbye(rank: int) -> Result:
            with connect(rank) as servers:
                return work(servers)

        return call_on_threads(size, with_goodbye)


@contextmanager
def _begun(start: Start, size: int, make: _Make, **how: Any) -> Iterator[list[ParameterServers]]:
    """Workers that have begun, all used by this thread: the order of their calls is the check's."""
    with start(size) as connect, contextlib.ExitStack() as stack:
        workers = [stack.enter_context(contextlib.closing(connect(rank))) for rank in range(size)]
        _begin_all(workers, make, **how)
        yield workers


def _begin_all(workers: Sequence[ParameterServers], make: _Make, **how: Any) -> None:
    def begin(rank: int) -> None:
        parameters = _parameters()
        workers[rank].begin(parameters, make(parameters), **how)

    call_on_threads(len(workers), begin)


def _pulled(servers: ParameterServers) -> Tensor:
    out = torch.full((_NUMEL,), torch.nan)
    servers.pull(out)
    return out


# Inputs, the same wherever they are made


def _parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in _SHAPES]


def _gradient(step: int, rank: int) -> Tensor:
    return torch.randn(_NUMEL, generator=torch.Generator().manual_seed(1000 + 10 * step + rank))


def _weight(rank: int) -> float:
    return (rank + 1) / 7.3


def _weighted_sum(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0] * _weight(0)
    for rank, term in enumerate(terms[1:], 1):
        total.add_(term, alpha=_weight(rank))
    return total


def _flat(parameters: Sequence[Tensor]) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in parameters])


def _embedding() -> list[nn.Parameter]:
    return [nn.Parameter(_gradient(99, 0)[:30].view(6, 5))]


class _Reference:
    """Parameters with one optimizer in this process, which the servers must match bit by bit."""

    def __init__(self, make: _Make, parameters: list[nn.Parameter] | None = None) -> None:
        self.parameters = _parameters() if parameters is None else parameters
        self.optimizer = make(self.parameters)
        self.name = type(self.optimizer).__name__

    @property
    def flat(self) -> Tensor:
        return _flat(self.parameters)

    def set_gradients(self, flat: Tensor) -> None:
        for p, part in zip(self.parameters, torch.split(flat, [p.numel() for p in self.parameters]), strict=True):
            p.grad = part.view(p.shape).clone()

    def step(self, flat: Tensor) -> None:
        self.set_gradients(flat)
        self.optimizer.step()

    def step_sparse(self, flat: Tensor, rows: Tensor) -> None:
        """A step in which only these rows of the one parameter have a gradient."""
        (parameter,) = self.parameters
        values = flat.view(parameter.shape)[rows]
        sparse = torch.sparse_coo_tensor(rows.unsqueeze(0), values, parameter.shape, check_invariants=True)
        parameter.grad = sparse.coalesce()
        self.optimizer.step()


def _only_rows(flat: Tensor, rows: dict[int, Tensor]) -> Tensor:
    """The gradient with zeros in rows that were not touched."""
    masked = flat.clone()
    start = 0
    for index, shape in enumerate(_SHAPES):
        numel = torch.Size(shape).numel()
        if index in rows and start < flat.numel():
            mine = masked[start : start + numel].view(shape)
            kept = mine[rows[index]].clone()
            mine.zero_()
            mine[rows[index]] = kept
        start += numel
    return masked


def _until(is_so: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not is_so():
        _require(time.monotonic() < deadline, otherwise)
        threading.Event().wait(0.001)
